"""Arms: named variants of one recipe that differ only in the settings under comparison.

Seed, text, failures and budget are settings too, so they are the same for all arms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from planaria.common.errors import UserError
from planaria.config import kinds, recipe, shipped
from planaria.config.bounds import Natural
from planaria.config.schema import Section

SectionType = TypeVar("SectionType", bound=Section)
Config = TypeVar("Config", bound=Section)


def _check_seeds(seeds: list[int]) -> list[int]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise PydanticCustomError("seeds", "use one or more distinct seeds")
    return seeds


class SeededTrials(Section):
    """Settings of any kind of trial."""

    seeds: Annotated[list[Natural], AfterValidator(_check_seeds)] = Field(default_factory=lambda: [1, 2, 3])
    """seeds of the runs; a seed determines weights, data order, failures and random draws"""


class TrialsWithArms(SeededTrials):
    """Settings of a trial whose arms are changes of its recipe."""

    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """arm → its changes, as tables of the recipe"""


def read_table(
    path: Path,
    name: str,
    kind: type[SectionType],
    runs: str,
    overrides: Mapping[str, Any] | None = None,
    required: bool = True,
) -> tuple[SectionType, dict[str, Any]]:
    """Return the table ``name`` of the recipe ``path``, and the rest, a recipe of the kind ``runs``.

    ``overrides`` overrides some of the table's settings. The table may be missing unless it is ``required``.

    :raises UserError: naming file and key of an error.
    """
    tree = recipe.read(path)
    kinds.require_kind(tree, path, name, runs)
    if name not in tree and required:
        command, spelling = kinds.command_of(runs), shipped.name_of(path)
        raise UserError(f"{spelling} has no [{name}] table; run it without one: `planaria {command} {spelling}`")
    table = tree.pop(name, {})
    settings = recipe.merge_tables(table, overrides or {}, kind) if isinstance(table, dict) else table
    return recipe.table(kind, settings, name, path), tree


MAX_ARM_NAME = 100
"""characters of an arm's name, which becomes part of file names"""


def file_name(arm: str) -> str:
    """Return an arm's name in a form that is valid in file names."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in arm)


@contextmanager
def prefix_errors(location: str) -> Iterator[None]:
    """Prefix errors raised within this context by the arm's ``location``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{location}: {error}") from None


@dataclass(frozen=True)
class ArmRules(Generic[Config]):
    """The changes that arms of one kind of trial may make."""

    section: str
    """name of the table that defines the arms"""
    kind: type[Config]
    free: tuple[str, ...]
    """dotted names that arms may change: sections or single settings"""
    checked: Callable[[Config, str], Config] = lambda config, place: config
    """further checks of a configuration, given its location in a file"""

    def arms(
        self, tree: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]], flags: Mapping[str, object], path: Path
    ) -> tuple[Config, dict[str, Config]]:
        """Return the recipe ``tree`` and each arm's configuration, with ``flags`` applied to all.

        :raises UserError: naming file, arm and key of an error, or of a change that is not allowed.
        """
        if not changes:
            named = f"{self.section}.arms"
            raise UserError(f"{path}: {named}: none is defined; add a table [{named}.NAME] for each")
        base = self.checked(recipe.resolve(self.kind, tree, flags, path), str(path))
        configs = {}
        for name, tables in changes.items():
            location = f"{self.section}.arms.{name}"
            if not any(map(str.isalnum, name)) or len(name) > MAX_ARM_NAME:
                raise UserError(
                    f"{path}: {location}: not a valid name; use 1 to {MAX_ARM_NAME} characters, a letter among them"
                )
            config = recipe.resolve(self.kind, recipe.merge_tables(tree, tables, self.kind), flags, path, location)
            configs[name] = self.checked(config, f"{path}: {location}")
            self.require_fair(base, config, f"{path}: {location}")
        if len({file_name(name) for name in configs}) < len(configs):
            raise UserError(
                f"{path}: {self.section}.arms: two names differ only in special characters; rename one of them"
            )
        return base, configs

    def require_fair(self, base: Config, arm: Config, location: str) -> None:
        """Raise UserError if ``arm`` differs from ``base`` in a setting that is not free."""
        ours, theirs = recipe.flatten(base), recipe.flatten(arm)
        for key in {**ours, **theirs}:
            if not self._may_change(key) and ours.get(key) != theirs.get(key):
                raise UserError(
                    f"{location}.{key} = {theirs.get(key)!r}: the recipe has {ours.get(key)!r}; "
                    f"arms may differ in {', '.join(self.free)} only"
                )

    def _may_change(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in (*self.free, "name"))
