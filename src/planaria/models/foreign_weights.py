"""Models in files: shapes first, then tensors one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import Llama, require_llama, require_shapes
from planaria.models.model_metadata import ModelMetadata
from planaria.models.moe_layer import ExpertRouting


@dataclass(frozen=True)
class WeightsFile:
    """A model in a file. Tensors are read on demand by :meth:`tensor`."""

    path: Path
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    """shape of each tensor by global name"""
    read: Callable[[str], Tensor]
    """read a tensor by global name, of any type, finite or not"""
    tokenizer: Path | None = None
    """path for :meth:`planaria.data.tokenizer.Tokenizer.open`, or None if there is no tokenizer"""
    bare: bool = False
    """whether the weights were trained without the tokens that the tokenizer's template adds"""
    routing: ExpertRouting | None = None
    """routing of layers with several feed-forward blocks, or None for one block per layer"""
    usage: ModelMetadata | None = None
    """settings stored beside the weights, or None if unknown"""
    expected: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] | None = None
    """return the shapes of a model's parameters by global name, or None for those of a LLaMA with ``routing``"""

    def __post_init__(self) -> None:
        """:raises UserError: naming the file and the first tensor that is missing, of another shape, or unknown."""
        layers, blocks = self.config.layers, self.routing.experts if self.routing else 1
        if layers * blocks > len(self.shapes):  # the modules alone of a hostile header would fill the memory
            raise UserError(
                f"{self.path}: {len(self.shapes)} tensors are too few for {layers} layers of {blocks} blocks; "
                "download it again"
            )
        try:
            require_shapes(self._expected_shapes(), self.shapes)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's parameters; on "meta", as a hostile header must not allocate terabytes."""
        if self.expected is not None:
            return dict(self.expected(self.config))
        model = Llama(self.config, device="meta", routing=self.routing)
        return {name: tuple(tensor.shape) for name, tensor in model.global_state().items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in fp32, in its own memory.

        :raises UserError: if it cannot be read, or has a non-finite number.
        """
        tensor = self.read(name).to(torch.float32)
        low, high = torch.aminmax(tensor)  # NaN where there is any; takes no memory of the tensor's size
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{self.path}: {name} has numbers that are not finite (NaN or infinity); use other weights")
        return tensor

    def model(self) -> Llama:
        """Return the whole model in memory; UserError as in :meth:`tensor`, or if it is not of the family llama."""
        require_llama(self.config, self.path)
        model = Llama(self.config, initialise=False, routing=self.routing)
        for name, parameter in model.global_state().items():
            parameter.copy_(self.tensor(name))
        return model


def validate_config(path: Path, settings: dict[str, Any]) -> ModelConfig:
    """Return the model section for a file's values.

    :raises UserError: naming the file and the first invalid value.
    """
    try:
        return ModelConfig.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{path}: {documents.first_error(error, ModelConfig, values=True)}") from error
