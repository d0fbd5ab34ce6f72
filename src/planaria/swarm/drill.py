"""A drill: arms that start from the same weights with the same problems and differ in who attacks and who defends.

:func:`load` reads the arms from a recipe. :class:`Drill` is the result: every arm with every seed. The report is drawn
from it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.config.schema import Section
from planaria.lab.trials.arms import Armed, Rules, file_name, table_of
from planaria.lab.trials.spread import Spread, spread
from planaria.swarm.config import SwarmConfig
from planaria.swarm.records.measure import Tally
from planaria.swarm.records.outcome import Outcome, total
from planaria.swarm.repair.results import Repaired
from planaria.swarm.setting import checked, names, of_peer


class Run(Record):
    """One arm with one seed."""

    seed: int
    outcome: Outcome


class Drilled(Record):
    """One arm with all seeds."""

    name: str
    control: str
    """the arm without poison that it is measured against; empty if none"""
    attackers: list[str]
    runs: list[Run]

    def accuracy(self, last: int) -> Spread | None:
        """Honest peers' mean accuracy."""
        return spread(run.outcome.accuracy(last) for run in self.runs)

    def peer_accuracy(self, name: str, last: int) -> list[float]:
        """One honest peer's accuracy with each seed; empty where there is no such peer, or it attacks."""
        peers = [peer for run in self.runs for peer in run.outcome.honest if peer.name == name and peer.points]
        return [peer.last(last).accuracy.rate or 0.0 for peer in peers]

    def tokens(self, last: int) -> Spread | None:
        return spread(run.outcome.tokens(last) for run in self.runs)

    def success(self, kind: str, last: int) -> Spread | None:
        """An attack's success, where anything was eligible with every seed."""
        return spread(run.outcome.success(kind, last).rate for run in self.runs)

    def pooled(self, kind: str, last: int) -> Tally:
        """All seeds' draws together, for the interval."""
        return total([run.outcome.success(kind, last) for run in self.runs])

    def worst(self, kind: str, last: int) -> float | None:
        """The honest peer that fared worst, with any seed."""
        found = [rate for run in self.runs if (rate := run.outcome.worst(kind, last)) is not None]
        return max(found, default=None)

    def layer(self, name: str) -> tuple[Tally, Tally]:
        """(poison stopped, honest completions misjudged) by a layer, all seeds together."""
        layers = [run.outcome.layers[name] for run in self.runs if name in run.outcome.layers]
        return total([layer.stopped for layer in layers]), total([layer.misjudged for layer in layers])


class Drill(Record):
    """Everything that a drill found."""

    version: int = 1
    name: str
    last: int
    """evaluations at the end that count"""
    watch: Sequence[str]
    arms: list[Drilled]
    repairs: list[Repaired] = Field(default_factory=list)
    """of every attacked arm and seed, where repairs were asked for"""

    def arm(self, name: str) -> Drilled:
        return next(arm for arm in self.arms if arm.name == name)

    def peers(self) -> list[str]:
        """All that were honest in any arm."""
        return sorted({peer.name for arm in self.arms for run in arm.runs for peer in run.outcome.honest})

    def layers(self) -> list[str]:
        """All layers that were at work in any arm, in their order."""
        return list(dict.fromkeys(layer for arm in self.arms for run in arm.runs for layer in run.outcome.layers))


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
