"""The lab's kinds of recipe."""

from __future__ import annotations

from planaria.config.kinds import RecipeKind
from planaria.config.schema import RunConfig

KINDS = (
    RecipeKind("compare", RunConfig, "compare", has_table=True),
    RecipeKind("experts", RunConfig, "experts train", has_table=True),
)
