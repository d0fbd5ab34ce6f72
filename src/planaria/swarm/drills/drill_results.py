"""What a drill found: every arm with every seed, side by side. Its table and its page are drawn from this alone."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from planaria.common.documents import Record
from planaria.lab.trials.spread import Spread, spread
from planaria.swarm.records.measure import Tally
from planaria.swarm.records.outcome import Outcome, total
from planaria.swarm.repair.results import Repaired


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
