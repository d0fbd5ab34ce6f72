"""The interface between model families and the pipeline.

A block stage maps hidden states [B, T, D] to hidden states of the same shape. Stage 0 embeds token ids at the start of
every route and computes the loss at its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from planaria.common.errors import UserError
from planaria.config.registry import Choice
from planaria.config.schema import ModelConfig
from planaria.models.activations import PassBytes, PassMode
from planaria.models.sampling import Sampling


class EndsStage(Protocol):
    """The interface of stage 0. A family may add ``fold_gradients()``, called before its gradients are read."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to hidden states [B, T, D]; D is ``model.dim``.

        T is ``model.context``, or less if the family accepts shorter samples."""
        ...

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats of hidden states [B, T, D] against the next tokens [B, T]; a scalar.

        Targets of -100, which dialogues have, are ignored, as by PyTorch's cross entropy."""
        ...


class TextModel(Protocol):
    """A whole model in memory that completes token ids."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to logits [B, T, V]."""
        ...

    def generate(self, tokens: Sequence[int], draws: Sampling, stops: Collection[int] = ()) -> Iterator[int]:
        """Yield tokens that continue ``tokens``, as they are drawn; end before one of ``stops``."""
        ...


class Pipelined(NamedTuple):
    """All stages of a model in one process."""

    ends: Any
    """an :class:`EndsStage`"""
    stages: Sequence[nn.Module]
    """block stages 1..S"""


class Family(Choice, ABC):
    """Base class of families; its fields are its options (``model.options``)."""

    former_members: ClassVar[Mapping[str, str]] = {
        "named": "has_global_names",
        "whole": "completes_texts",
        "preload": "modules_to_preload",
        "subspaces": "supports_subspaces",
        "masks": "accepts_document_mask",
        "adapts": "supports_adapters",
        "unlike": "stage_difference",
    }
    has_global_names: ClassVar[bool] = False
    """whether every cut shares the parameters' names (:meth:`global_name`), so that checkpoints can be re-cut"""
    completes_texts: ClassVar[bool] = False
    """whether a whole model completes texts (`planaria generate`)"""
    interchangeable: ClassVar[bool] = True
    """whether the module of a block stage becomes another stage with as many layers by loading its weights"""
    modules_to_preload: ClassVar[tuple[str, ...]] = ()
    """modules that the server from which workers fork imports once"""
    supports_subspaces: ClassVar[bool] = False
    """whether the residual stream can stay in a fixed subspace (``ModelConfig.subspace``)"""
    accepts_document_mask: ClassVar[bool] = False
    """whether block stages and stage 0's ``embed`` take a document mask (``data.document_mask``) after their input"""
    supports_adapters: ClassVar[bool] = False
    """whether stages can load the weights of ``train.start`` themselves, and train adapters on them (``model.lora``)"""
    resizable_settings: ClassVar[frozenset[str]] = frozenset()
    """settings of the model, besides those of its cut, that may change on resumption"""

    @abstractmethod
    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> nn.Module:
        """Build stage ``stage`` of 0..``stages``: an :class:`EndsStage` at 0, else a module of hidden states.

        Draw random weights from PyTorch's global generator, which is seeded per stage. On the device "meta" nothing may
        be computed from weights.
        """

    def boundary_width(self, config: ModelConfig) -> int:
        """Return the numbers per token of a hidden state between stages; fewer than ``model.dim`` if stages project
        what they send and receive."""
        return config.dim

    def accepts_shorter_samples(self) -> bool:
        """Return whether stages accept fewer tokens than ``model.context``, with the same results for these tokens.

        Then the padding of dialogues is not computed.
        """
        return False

    def parameter_counts(self, config: ModelConfig, stages: int, stage: int) -> tuple[int, int, int] | None:
        """Return the numbers of a stage's trained and frozen parameters and the bytes of the latter, with those of
        fixed tables, or None to count them on the device "meta"."""
        return None

    def pass_bytes(self, config: ModelConfig, stages: int, stage: int, passes: PassMode) -> PassBytes | None:
        """Return the memory of a stage's passes, or None if it is unknown: then none is predicted."""
        return None

    def layer_work(self, config: ModelConfig) -> tuple[float, ...] | None:
        """Return the FLOPs of each decoder layer's passes of one sample, or None if all layers are equal."""
        return None

    def layer_sizes(self, config: ModelConfig) -> tuple[int, ...] | None:
        """Return the number of parameters of each decoder layer, or None if all layers are equal."""
        return None

    def global_name(self, config: ModelConfig, stages: int, stage: int, local: str) -> str:
        """Return the name of a stage's parameter that every cut of the model shares.

        :raises ValueError: if there is none.
        """
        raise ValueError(f"{local}: this family has no names for all cuts")

    def global_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of the whole model by global name. Takes no memory.

        :raises UserError: if the family has no such names.
        """
        flat = config.model_copy(update={"ends_layers": 0, "block_layers": None})
        try:
            with torch.device("meta"):
                return {
                    self.global_name(flat, 1, stage, local): tuple(parameter.shape)
                    for stage in (0, 1)
                    for local, parameter in self.build_stage(flat, 1, stage).named_parameters()
                }
        except ValueError as error:
            raise UserError(f"model.family = {config.family!r}: {error}") from None

    @classmethod
    def completed_section(cls, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section ``[model]`` of a recipe without ``train.start``, with settings that its options determine.

        :raises UserError: if the recipe states others.
        """
        return dict(stated)

    @classmethod
    def settings_beside(cls, folder: Path, named: str, own: ModelConfig, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section ``stated`` beside the weights ``named`` in ``folder``, of the model ``own``, without
        settings that have no meaning in this family.

        :raises UserError: for settings that the weights determine.
        """
        return dict(stated)

    @classmethod
    def open_folder(cls, folder: Path) -> Any:
        """Open a Hugging Face folder as a :class:`~planaria.models.foreign_weights.WeightsFile`, or
        return None to open it as a LLaMA.

        :raises UserError: if files are missing or damaged, or the model is not of this family.
        """
        return None

    def text_model(self, config: ModelConfig, read: Callable[[str], Tensor], context: int) -> TextModel | None:
        """Return the whole model for texts of up to ``context`` tokens; ``read`` returns weights by global name.

        Return None if the family's weights are a LLaMA's, which planaria decodes itself.
        """
        return None

    def tables(self, config: ModelConfig) -> tuple[str, str]:
        """Return the global names of the embedding table and of the head that may be tied to it; "" if unknown."""
        return "", ""

    def check(self, config: ModelConfig, stages: int, masked: bool) -> None:
        """Raise UserError if the model cannot be trained in these stages; ``masked``: documents are masked."""

    def warnings(self, config: ModelConfig) -> list[str]:
        """Return what a user may not expect of this model's training, one clause each."""
        return []

    def stage_difference(self, config: ModelConfig, stages: int) -> str:
        """Return how block stages of equal size differ, and which cut has equal ones, or an empty string if they do not
        differ.
        """
        return ""

    def initialise(self, built: nn.Module, config: ModelConfig, stages: int, stage: int, seed: int) -> None:
        """Initialise a stage's weights, unless ``build_stage`` has."""
