"""Models in files, of other programs or ours: their shapes first, and their tensors one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.routed import Routing
from planaria.models.stages import Llama, require_shapes
from planaria.models.usage import Usage


@dataclass(frozen=True)
class Weights:
    """A model in a file. Nothing of its weights is in memory until :meth:`tensor` is asked for one."""

    place: Path
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    """by global name"""
    read: Callable[[str], Tensor]
    """one of them, of any type and finite or not"""
    tokenizer: Path | None = None
    """what :meth:`planaria.data.tokenizer.Tokenizer.open` opens; None: nothing is there"""
    bare: bool = False
    """whether the weights were trained without the tokens that the tokenizer's template adds"""
    routing: Routing | None = None
    """of layers with several feed-forward blocks"""
    usage: Usage | None = None
    """what lies beside the weights; None: nothing is known"""

    def __post_init__(self) -> None:
        """:raises UserError: naming the file and the first tensor that is missing, of another shape, or unknown."""
        layers, blocks = self.config.layers, self.routing.experts if self.routing else 1
        if layers * blocks > len(self.shapes):  # as modules alone, as many as a header may name would fill a machine
            raise UserError(
                f"{self.place}: {len(self.shapes)} tensors are too few for {layers} layers of {blocks} blocks; "
                "download it again"
            )
        # On a model without memory: a lying header must not ask for terabytes.
        model = Llama(self.config, device="meta", routing=self.routing)
        own = {name: tuple(one.shape) for name, one in model.global_state().items()}
        try:
            require_shapes(own, self.shapes)
        except UserError as error:
            raise UserError(f"{self.place}: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """fp32, in memory of its own.

        :raises UserError: when it cannot be read, or holds a number that is not finite.
        """
        found = self.read(name).to(torch.float32)
        low, high = torch.aminmax(found)  # NaN where there is any; takes no memory of the tensor's size
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{self.place}: {name} has numbers that are not finite (NaN or infinity); give others")
        return found

    def model(self) -> Llama:
        """The whole model in memory; UserError as in :meth:`tensor`."""
        model = Llama(self.config, initialise=False, routing=self.routing)
        for name, own in model.global_state().items():
            own.copy_(self.tensor(name))
        return model


def checked_config(place: Path, values: dict[str, Any]) -> ModelConfig:
    """The model section that a file describes.

    :raises UserError: naming the file and the first value that no LLaMA can have.
    """
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "shapes"
        raise UserError(f"{place}: {where}: {first['msg']} (found {first['input']!r:.80})") from error
