"""The interface between model families and the pipeline.

A block stage maps hidden states [B, T, D] to hidden states of the same shape. Stage 0 embeds token ids at the start of
every route and computes the loss at its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor, nn

from planaria.config.registry import Choice
from planaria.config.schema import ModelConfig
from planaria.models.activations import PassBytes, Passes


class EndsStage(Protocol):
    """The interface of stage 0. A family may add ``fold_gradients()``, called before its gradients are read."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to hidden states [B, T, D]; T is ``model.context``, D is ``model.dim``."""
        ...

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats of hidden states [B, T, D] against the next tokens [B, T]; a scalar."""
        ...


class Family(Choice, ABC):
    """Base class of families; its fields are its options (``model.options``)."""

    whole: ClassVar[bool] = False
    """whether stages can be joined to one model, for export and completion"""
    masks: ClassVar[bool] = False
    """whether block stages and stage 0's ``embed`` take a document mask (``data.document_mask``) after their input"""

    @abstractmethod
    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> nn.Module:
        """Build stage ``stage`` of 0..``stages``: an :class:`EndsStage` at 0, else a module of hidden states.

        Draw random weights from PyTorch's global generator, which is seeded per stage. On the device "meta" nothing may
        be computed from weights.
        """

    def pass_bytes(self, config: ModelConfig, stages: int, stage: int, passes: Passes) -> PassBytes | None:
        """Return the CUDA memory of a stage's passes, or None if it is unknown: then none is predicted."""
        return None

    def initialise(self, built: nn.Module, config: ModelConfig, stages: int, stage: int, seed: int) -> None:
        """Initialise a stage's weights, unless ``build_stage`` has."""
