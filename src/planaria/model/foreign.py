"""What the readers of other programs' model files share: shapes from strangers become a model, or one clear line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from planaria.config import ModelConfig
from planaria.errors import UserError
from planaria.model.stages import Llama


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


def assemble(place: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> Llama:
    """The model with these weights (by global name), or a UserError that names the file too."""
    try:
        # Shapes first, on a model without memory: a lying header must not ask for terabytes.
        Llama(config, device="meta").load_global_state(state)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    model = Llama(config, initialise=False)
    model.load_global_state(state)
    return model
