"""Settings of a recipe that the weights of its ``train.start`` determine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig

FIXED = ("family", "vocab", "dim", "layers", "heads", "kv", "hidden", "tied", "rope_theta", "norm_eps")
"""properties of trained weights that a recipe cannot change"""


def options_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a section of the model."""
    options = model.get("options")
    return dict(options) if isinstance(options, Mapping) else {}


def require_same(named: str, own: ModelConfig, stated: Mapping[str, object]) -> None:
    """Raise UserError for the first of :data:`FIXED` whose ``stated`` value differs from the weights."""
    for name in FIXED:
        if name in stated and not is_equal(stated[name], value := getattr(own, name)):
            setting = "kv_heads" if name == "kv" else name
            raise UserError(
                f"{named}: its model has {setting} = {value}, the recipe {stated[name]}; remove "
                f"model.{setting}, or set it to the same"
            )


def is_equal(stated: object, value: object) -> bool:
    """Return whether two sizes are equal; numbers that were stored in fp32 have seven digits."""
    if isinstance(stated, float) and isinstance(value, float):
        return math.isclose(stated, value, rel_tol=1e-7)
    return stated == value
