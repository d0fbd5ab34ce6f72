"""A drill: arms that start from the same weights with the same problems, and differ in who attacks and who defends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from planaria import recipe
from planaria.bounds import Natural
from planaria.config import Section
from planaria.errors import UserError
from planaria.swarm.config import SwarmConfig
from planaria.swarm.setting import checked, names, of_peer

FREE_TO_DIFFER = (
    "attack",
    "defence",
    "peers",
    "loss",
    "optim",
    "rounds.gather",
    "rounds.mode",
    "sampling.max_new",
    "sampling.top_k",
    "shadow",
)
"""what arms may change; with other tasks, schools, sizes or budgets they would not be comparable. A lower limit on
length is a defence, and holds for evaluations too."""


class DrillSpec(Section):
    """The ``[drill]`` table of a recipe, beside the swarm's own sections."""

    seeds: list[Natural] = Field(default_factory=lambda: [1, 2, 3])
    """one run of every arm for each; a seed gives school, problems and draws"""
    last: Annotated[int, Field(ge=1)] = 4
    """evaluations at the end whose mean counts: single ones drift"""
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """arm → what it changes, as tables of the recipe"""
    controls: dict[str, str] = Field(default_factory=dict)
    """arm → the arm without poison that it is measured against"""


class Arm(Section):
    """One arm of a drill: its whole configuration, for every seed."""

    name: str
    config: SwarmConfig
    control: str = ""

    @property
    def folder(self) -> str:
        """The arm's name as a folder's."""
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in self.name)

    def seeded(self, seed: int) -> SwarmConfig:
        """The configuration with another seed, from another school."""
        school = self.config.school.model_copy(update={"seed": seed})
        return self.config.model_copy(update={"seed": seed, "school": school})

    @property
    def attackers(self) -> list[str]:
        """The peers that send poison, by name."""
        attacks = {name: of_peer(self.config, name).attack for name in names(self.config)}
        return [name for name, attack in attacks.items() if attack.kind != "none" and attack.dose]


def load(path: Path, flags: Mapping[str, str]) -> tuple[DrillSpec, list[Arm]]:
    """The drill in the recipe ``path``, with ``flags`` laid over all arms.

    :raises UserError: naming file, arm and key of what is wrong, or what an arm changes that it must not.
    """
    tree = recipe.read(path)
    recipe.require_kind(tree, path, "drill", "swarm")
    table = tree.pop("drill", None)
    if table is None:
        raise UserError(f"{path}: has no [drill] table; `planaria swarm {path}` runs it, see docs/drills.md")
    spec = _spec(table, path)
    base = checked(recipe.resolve(SwarmConfig, tree, flags, path), str(path))
    arms = []
    for name, changes in spec.arms.items():
        place = f"drill.arms.{name}"
        config = checked(
            recipe.resolve(SwarmConfig, recipe.overlaid(tree, changes), flags, path, place), f"{path}: {place}"
        )
        _refuse_unfair(base, config, f"{path}: {place}")
        arms.append(Arm(name=name, config=config, control=spec.controls.get(name, "")))
    if len({arm.folder for arm in arms}) < len(arms):
        raise UserError(f"{path}: drill.arms: two names are alike but for signs; call one of them something else")
    for name, control in spec.controls.items():
        if name not in spec.arms or control not in spec.arms:
            raise UserError(f"{path}: drill.controls.{name} = {control!r}: both must be arms: {', '.join(spec.arms)}")
    return spec, arms


def _spec(table: Any, path: Path) -> DrillSpec:
    made = recipe.table(DrillSpec, table, "drill", path)
    if not made.seeds or len(set(made.seeds)) < len(made.seeds):
        raise UserError(f"{path}: drill.seeds = {made.seeds}: give one seed or more, each once")
    if not made.arms:
        raise UserError(f"{path}: drill.arms: there are none; write one table [drill.arms.NAME] for each")
    return made


def _refuse_unfair(base: SwarmConfig, arm: SwarmConfig, place: str) -> None:
    """Arms that differ in task, school or budget cannot be compared."""
    ours, theirs = _flat(base.model_dump(mode="json")), _flat(arm.model_dump(mode="json"))
    for key, value in theirs.items():
        if not key.startswith((*FREE_TO_DIFFER, "name")) and ours.get(key) != value:
            free = ", ".join(FREE_TO_DIFFER)
            raise UserError(
                f"{place}.{key} = {value!r}: the recipe has {ours.get(key)!r}; arms may differ in {free} only"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
