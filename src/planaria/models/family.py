"""What a family of models is to the pipeline: something that builds stages.

A stage's door is small. A block stage takes hidden states [B, T, D] and gives hidden states of the same shape; the ends
embed token ids at the start of every route and take the loss where it returns. What lies behind the door is the
family's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor, nn

from planaria.config.registry import Choice
from planaria.config.schema import ModelConfig


class EndsStage(Protocol):
    """The door of stage 0. A family may add ``fold_gradients()``, called before its gradients are read."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → hidden states [B, T, D]; T is ``model.context``, D is ``model.dim``."""
        ...

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of hidden states [B, T, D] against the next tokens [B, T]; a scalar."""
        ...


class Family(Choice, ABC):
    """Base of all families; its fields are its options (``model.options``)."""

    whole: ClassVar[bool] = False
    """can stages be put together as one model, to be exported and to complete texts?"""
    masks: ClassVar[bool] = False
    """do block stages, and the ends' ``embed``, take a mask of documents (``data.document_mask``) after their input?"""

    @abstractmethod
    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> nn.Module:
        """Stage ``stage`` of 0..``stages``: at 0 an :class:`EndsStage`, else a module of hidden states.

        Random weights are to be drawn from PyTorch's global generator, which is seeded for each stage. On the device
        "meta", by which shapes are asked for, nothing may be computed from weights.
        """

    def initialise(self, built: nn.Module, config: ModelConfig, stages: int, stage: int, seed: int) -> None:
        """Give a stage its initial weights, where ``build_stage`` has not."""
