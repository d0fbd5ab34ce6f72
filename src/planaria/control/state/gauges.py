"""Workers' measurements of their passes and of incoming activations: the first and the latest ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeVar, cast

from planaria.control.facts.measurements import WorkerMeasurements

RECENT = 3
"""reports used for a judgement"""
PAST = 6
"""reports of a worker that define its initial speed: twelve steps"""
FORGET_BROKEN_EDGE_S = 600.0
"""training time (s) after which a broken edge is no longer counted"""

Found = TypeVar("Found")
DirectedPair = tuple[int, int]
"""nodes: from, to"""


@dataclass(frozen=True)
class NodeGauge:
    """The reports of one node's current worker."""

    worker: str
    past: tuple[WorkerMeasurements, ...]
    """the first ones"""
    recent: tuple[WorkerMeasurements, ...]
    """the latest ones, oldest first"""

    def with_report(self, fact: WorkerMeasurements) -> NodeGauge:
        past = self.past if len(self.past) == PAST else (*self.past, fact)
        return NodeGauge(self.worker, past, (*self.recent, fact)[-RECENT:])

    @property
    def last(self) -> WorkerMeasurements:
        return self.recent[-1]

    @property
    def pass_s(self) -> float:
        """Current duration of a microbatch's passes."""
        return median(fact.pass_s for fact in self.recent)

    @property
    def past_s(self) -> float:
        """Their initial duration."""
        return median(fact.pass_s for fact in self.past)

    @property
    def read_s(self) -> float:
        """Current time to read a step's batches."""
        return median(fact.read_s for fact in self.recent)

    @property
    def past_read_s(self) -> float:
        """Initial time to read a step's batches."""
        return median(fact.read_s for fact in self.past)

    @property
    def busy_s(self) -> float:
        return median(fact.busy_s for fact in self.recent)

    @property
    def step_s(self) -> float:
        return median(fact.seconds / fact.steps for fact in self.recent)


@dataclass(frozen=True)
class Gauges:
    """The gauges of all nodes."""

    nodes: Mapping[int, NodeGauge] = field(default_factory=dict)
    clock: float = 0.0
    """seconds of training, as measured by the workers of the ends stage"""
    breaks: Mapping[DirectedPair, Mapping[int, float]] = field(default_factory=dict)
    """(lower node, higher node) → generation in which their edge broke → time by ``clock``"""
    linking_s: float = 1.0
    """the longest time a worker has taken to link in a generation"""
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, find: Callable[..., Found], *given: Hashable) -> Found:
        """Return ``find(self, *given)``, cached."""
        key = (find, *given)
        if key not in self._known:
            self._known[key] = find(self, *given)
        return cast(Found, self._known[key])

    def with_measurements(self, fact: WorkerMeasurements) -> Gauges:
        """Return the gauges after a worker's measurement."""
        before = self.nodes.get(fact.node)
        new = (
            before.with_report(fact)
            if before and before.worker == fact.worker
            else NodeGauge(fact.worker, (fact,), (fact,))
        )
        clock = self.clock + (fact.seconds if fact.stage == 0 and fact.node == min(self._ends(fact)) else 0.0)
        return replace(self, nodes={**self.nodes, fact.node: new}, clock=clock)

    def _ends(self, fact: WorkerMeasurements) -> Iterable[int]:
        return [fact.node, *(node for node, gauge in self.nodes.items() if gauge.last.stage == 0)]

    def with_break(self, first: int, second: int, generation: int) -> Gauges:
        """Record that the edge between two nodes broke; both may report it."""
        pair = min(first, second), max(first, second)
        times = {g: t for g, t in self.breaks.get(pair, {}).items() if t > self.clock - FORGET_BROKEN_EDGE_S}
        times.setdefault(generation, self.clock)
        return replace(self, breaks={**self.breaks, pair: times})

    def with_linking(self, seconds: float) -> Gauges:
        """Record that a worker has linked."""
        return self if seconds <= self.linking_s else replace(self, linking_s=seconds)

    def of(self, nodes: Iterable[int]) -> dict[int, NodeGauge] | None:
        """Return the gauges of those nodes that have reported, if all of these reported the same step; else None."""
        gauges = {node: self.nodes[node] for node in nodes if node in self.nodes}
        return gauges if len({gauge.last.step for gauge in gauges.values()}) == 1 else None
