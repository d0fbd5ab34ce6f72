"""The arms of a drill, with equal initial weights and problems, and different attackers and defences.

:func:`load` reads the arms from a recipe. :class:`Drill` is the result: every arm with every seed, the only source of
the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planaria.common.documents import Record
from planaria.common.errors import UserError, suggestion
from planaria.config.schema import Section
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import check_peers, peer_config, peer_names
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.outcome import RunOutcome, total
from planaria.swarm.repair.repair_results import Repaired
from planaria.trials.arms import ArmRules, TrialsWithArms, file_name, read_table
from planaria.trials.spread import Spread, spread


class DrillRun(Record):
    """One arm with one seed."""

    seed: int
    outcome: RunOutcome


class DrilledArm(Record):
    """One arm with all seeds."""

    name: str
    control: str
    """name of its control, an arm without poison; empty if none"""
    attackers: list[str]
    runs: list[DrillRun]

    def accuracy(self, last: int) -> Spread | None:
        return spread(run.outcome.accuracy(last) for run in self.runs)

    def peer_accuracy(self, name: str, last: int) -> list[float]:
        """Accuracy of one honest peer with each seed; empty if there is none, or it attacks."""
        peers = [peer for run in self.runs for peer in run.outcome.honest if peer.name == name and peer.points]
        return [peer.last(last).accuracy.rate or 0.0 for peer in peers]

    def tokens(self, last: int) -> Spread | None:
        return spread(run.outcome.tokens(last) for run in self.runs)

    def success(self, kind: str, last: int) -> Spread | None:
        """Success of an attack, if every seed has eligible completions."""
        return spread(run.outcome.success(kind, last).rate for run in self.runs)

    def pooled_success(self, kind: str, last: int) -> HitTally:
        """Counts over all seeds, for the interval."""
        return total([run.outcome.success(kind, last) for run in self.runs])

    def worst(self, kind: str, last: int) -> float | None:
        """Largest success at one honest peer with one seed."""
        results = [rate for run in self.runs if (rate := run.outcome.worst(kind, last)) is not None]
        return max(results, default=None)

    def layer(self, name: str) -> tuple[HitTally, HitTally]:
        """(poison stopped, honest completions misjudged) by a layer, over all seeds."""
        layers = [run.outcome.layers[name] for run in self.runs if name in run.outcome.layers]
        return total([layer.stopped for layer in layers]), total([layer.misjudged for layer in layers])


class Drill(Record):
    """The result of a drill."""

    version: int = 1
    name: str
    last: int
    """number of final evaluations that are averaged"""
    watch: Sequence[str]
    arms: list[DrilledArm]
    repairs: list[Repaired] = Field(default_factory=list)
    """repairs of every attacked arm and seed, if requested"""

    def arm(self, name: str) -> DrilledArm:
        return next(arm for arm in self.arms if arm.name == name)

    def peers(self) -> list[str]:
        """Peers that were honest in at least one arm."""
        return sorted({peer.name for arm in self.arms for run in arm.runs for peer in run.outcome.honest})

    def layers(self) -> list[str]:
        return list(dict.fromkeys(layer for arm in self.arms for run in arm.runs for layer in run.outcome.layers))


RULES = ArmRules(
    "drill",
    SwarmConfig,
    free=(
        *("attack", "defence", "peers", "loss", "optim", "rounds.gather", "rounds.mode", "shadow"),
        *("rounds.own", "rounds.foreign", "rounds.drop_flat", "rounds.prompts", "rounds.ahead"),
        *("task.reward", "task.agreement", "task.max_accuracy_drop"),
        *("sampling.max_new", "sampling.top_k"),  # a limit on length is a defence and also applies to evaluations
    ),
    checked=check_peers,
)


class DrillSpec(TrialsWithArms):
    """The ``[drill]`` table of a recipe, next to the swarm's own sections."""

    last: Annotated[int, Field(ge=1)] = 4
    """number of final evaluations that are averaged"""
    repair: bool = False
    """repair one poisoned peer of every attacked arm with all strategies"""
    controls: dict[str, str] = Field(default_factory=dict)
    """arm → its control, an arm without poison"""


class DrillArm(Section):
    """One arm of a drill: its configuration for every seed."""

    name: str
    config: SwarmConfig
    control: str = ""

    @property
    def folder(self) -> str:
        return file_name(self.name)

    def with_seed(self, seed: int) -> SwarmConfig:
        """Return the configuration with another seed, also of the warm-up."""
        warmup = self.config.warmup.model_copy(update={"seed": seed})
        return self.config.model_copy(update={"seed": seed, "warmup": warmup})

    @property
    def attackers(self) -> list[str]:
        """Names of the peers that send poison or withhold work."""
        attacks = {name: peer_config(self.config, name).attack for name in peer_names(self.config)}
        return [name for name, attack in attacks.items() if attack.kind != "none" and (attack.dose or attack.withhold)]


def load(
    path: Path, flags: Mapping[str, str], overrides: Mapping[str, object] | None = None, only: str | None = None
) -> tuple[DrillSpec, list[DrillArm]]:
    """Read the drill in the recipe ``path``, with ``flags`` applied to all arms; ``overrides`` overrides the table.

    ``only``: names of arms, separated by commas; with them, return these and their controls.

    :raises UserError: naming file, arm and key of an invalid or forbidden setting.
    """
    spec, tree = read_table(path, "drill", DrillSpec, "swarm", overrides)
    _, configs = RULES.arms(tree, spec.arms, flags, path)
    arms = [DrillArm(name=name, config=config, control=spec.controls.get(name, "")) for name, config in configs.items()]
    for name, control in spec.controls.items():
        if name not in spec.arms or control not in spec.arms:
            raise UserError(f"{path}: drill.controls.{name} = {control!r}: both must be arms: {', '.join(spec.arms)}")
    if spec.repair and (unsaved_arm := next((arm for arm in arms if not arm.config.rounds.keep), None)):
        raise UserError(
            f"{path}: drill.arms.{unsaved_arm.name}: rounds.keep = 0 leaves nothing to repair; set it above 0"
        )
    if only is not None:
        selected = select_arms(path, only, list(spec.arms))
        selected |= {spec.controls[name] for name in selected if name in spec.controls}
        arms = [arm for arm in arms if arm.name in selected]
    return spec, arms


def select_arms(path: Path, text: str, names: Sequence[str]) -> set[str]:
    """Return the arms that ``text`` names, separated by commas; of names that contain commas, the longest that fits.

    :raises UserError: if ``text`` names anything else.
    """
    words = {name: [word.strip() for word in name.split(",")] for name in sorted(names, key=len, reverse=True)}
    left, selected = [word.strip() for word in text.split(",")], set[str]()
    while left:
        name = next((name for name, own in words.items() if left[: len(own)] == own), None)
        if name is None:
            raise UserError(f"{path}: drill.arms.{left[0]}: no such arm; {suggestion(', '.join(left), names)}")
        selected.add(name)
        left = left[len(words[name]) :]
    return selected
