"""Kinds of recipe: a run's own, and those that other parts of planaria list in ``PART/recipe_kinds.py`` as ``KINDS``.

These modules are imported only for recipes with keys that a run does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planaria.common.errors import UserError
from planaria.config import shipped
from planaria.config.schema import RunConfig, Section
from planaria.config.section import present_name


@dataclass(frozen=True)
class RecipeKind:
    """A kind of recipe."""

    name: str
    section: type[Section]
    """root section of its recipes"""
    command: str
    """the command that runs them"""
    has_table: bool = False
    """whether its recipes have a table of the kind's name besides the sections"""

    def accepts(self, key: str) -> bool:
        """Return whether a recipe without extra tables may have this key."""
        return present_name(self.section, key) in self.section.model_fields


TRAIN = RecipeKind("train", RunConfig, "train")


@cache
def recipe_kinds() -> tuple[RecipeKind, ...]:
    """Return all kinds, the run's own first."""
    return TRAIN, *shipped.registered_kinds("recipe_kinds")


def kinds_of(tree: Mapping[str, Any]) -> list[str]:
    """Return the possible kinds of a recipe, from its extra tables or from keys that only one kind accepts."""
    if tables := [kind.name for kind in recipe_kinds() if kind.has_table and kind.name in tree]:
        return tables
    roots = [kind for kind in recipe_kinds() if not kind.has_table]
    accepting = [[kind.name for kind in roots if kind.accepts(key)] for key in tree]
    decided = [names[0] for names in accepting if len(names) == 1]
    return [kind.name for kind in roots if kind.name in decided or not decided]


def command_of(name: str) -> str:
    """Return the command that runs recipes of this kind."""
    return next(kind.command for kind in recipe_kinds() if kind.name == name)


def require_kind(tree: Mapping[str, Any], recipe: Path, *kinds: str) -> None:
    """:raises UserError: naming the right command, if the recipe is of none of ``kinds``."""
    if TRAIN.name in kinds and all(map(TRAIN.accepts, tree)):
        return
    actual = kinds_of(tree)
    if not set(actual) & set(kinds):
        right = command_of(min(actual))
        named = shipped.name_of(recipe)
        raise UserError(f"{named} is a recipe for `planaria {right}`; run `planaria {right} {named}`")


def without_tables(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a run without the tables that other kinds of recipe add to it."""
    if all(map(TRAIN.accepts, tree)):
        return dict(tree)
    tables = {kind.name for kind in recipe_kinds() if kind.has_table and kind.section is TRAIN.section}
    return {key: value for key, value in tree.items() if key not in tables}
