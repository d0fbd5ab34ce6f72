"""A drill: arms that start from the same weights with the same problems, and differ in who attacks and who defends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planaria.common.errors import UserError
from planaria.config.schema import Section
from planaria.lab.trials.arms import Armed, Rules, file_name, table_of
from planaria.swarm.config import SwarmConfig
from planaria.swarm.setting import checked, names, of_peer

RULES = Rules(
    "drill",
    SwarmConfig,
    free=(
        *("attack", "defence", "peers", "loss", "optim", "rounds.gather", "rounds.mode", "shadow"),
        *("task.reward", "task.agreement", "task.brake"),
        *("sampling.max_new", "sampling.top_k"),  # a lower limit on length is a defence, and holds for evaluations too
    ),
    checked=checked,
)


class DrillSpec(Armed):
    """The ``[drill]`` table of a recipe, beside the swarm's own sections."""

    last: Annotated[int, Field(ge=1)] = 4
    """evaluations at the end whose mean counts: single ones drift"""
    repair: bool = False
    """repair one poisoned peer of every attacked arm in every way that there is, and show them side by side"""
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
        return file_name(self.name)

    def seeded(self, seed: int) -> SwarmConfig:
        """The configuration with another seed, from another school."""
        school = self.config.school.model_copy(update={"seed": seed})
        return self.config.model_copy(update={"seed": seed, "school": school})

    @property
    def attackers(self) -> list[str]:
        """The peers that send poison, or withhold their work, by name."""
        attacks = {name: of_peer(self.config, name).attack for name in names(self.config)}
        return [name for name, attack in attacks.items() if attack.kind != "none" and (attack.dose or attack.withhold)]


def load(path: Path, flags: Mapping[str, str], repair: bool = False) -> tuple[DrillSpec, list[Arm]]:
    """The drill in the recipe ``path``, with ``flags`` laid over all arms; ``repair`` asks for repairs in any case.

    :raises UserError: naming file, arm and key of what is wrong, or what an arm changes that it must not.
    """
    spec, tree = table_of(path, "drill", DrillSpec, "swarm", {"repair": True} if repair else None)
    _, configs = RULES.arms(tree, spec.arms, flags, path)
    arms = [Arm(name=name, config=config, control=spec.controls.get(name, "")) for name, config in configs.items()]
    for name, control in spec.controls.items():
        if name not in spec.arms or control not in spec.arms:
            raise UserError(f"{path}: drill.controls.{name} = {control!r}: both must be arms: {', '.join(spec.arms)}")
    if spec.repair and (kept := next((arm for arm in arms if not arm.config.rounds.keep), None)):
        raise UserError(
            f"{path}: drill.arms.{kept.name}: rounds.keep = 0: nothing would be left to repair; set it above 0"
        )
    return spec, arms
