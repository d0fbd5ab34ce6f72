"""What workers measure of their own work and of what reaches them, and the last and first of it. Pure.

In the log, so that whoever is found slow is found again when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field

from planaria.control.started import Fact

EVERY = 2
"""steps between two reports of a worker"""
RECENT = 3
"""reports that are judged by"""
PAST = 6
"""reports of a worker that are its past: twelve steps"""
BREAKS_S = 600.0
"""seconds of training for which a broken edge is remembered"""

Found = TypeVar("Found")
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Pair = tuple[int, int]
"""nodes: from, to"""


class Passes(Fact):
    """The passes of one kind."""

    count: Count
    median_s: Finite


class Flow(Fact):
    """The activations that came over one edge: seconds from being handed over by the sender until they were here, by
    the clocks of both."""

    frames: Count
    low_s: Finite
    """25th percentile: noise only makes them later"""
    high_s: Finite
    """95th percentile"""


class Gauged(Fact):
    """What a worker has measured in its last steps."""

    kind: Literal["gauged"] = "gauged"
    worker: str
    node: int
    stage: int
    generation: int
    step: int
    """the last of them"""
    steps: Annotated[int, Field(ge=1, lt=1 << 31)]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """of all of them, from the order to being ready, waiting included"""
    passes: dict[Literal["forward", "backward"], Passes]
    waited: dict[int, Finite]
    """node → seconds that its frames were waited for"""
    flows: dict[int, Flow]
    """node → what came from it"""
    read_s: Finite = 0.0
    """of a step: until its batches were read; of no pass"""

    @property
    def pass_s(self) -> float:
        """Seconds of a microbatch's passes, forward and backward."""
        return sum(passes.median_s for passes in self.passes.values())

    @property
    def busy_s(self) -> float:
        """Seconds of all passes of a step."""
        return sum(passes.median_s * passes.count for passes in self.passes.values()) / self.steps


class SlowLink(Fact):
    """A link that is slow, from one node to another."""

    source: int
    target: int
    seconds: Finite
    """that an activation takes"""


@dataclass(frozen=True)
class Gauge:
    """The reports of one node's present worker."""

    worker: str
    past: tuple[Gauged, ...]
    """the first"""
    recent: tuple[Gauged, ...]
    """the last, oldest first"""

    def then(self, fact: Gauged) -> Gauge:
        past = self.past if len(self.past) == PAST else (*self.past, fact)
        return Gauge(self.worker, past, (*self.recent, fact)[-RECENT:])

    @property
    def last(self) -> Gauged:
        return self.recent[-1]

    @property
    def pass_s(self) -> float:
        """What a microbatch's passes take now."""
        return median(fact.pass_s for fact in self.recent)

    @property
    def past_s(self) -> float:
        """What they took at first."""
        return median(fact.pass_s for fact in self.past)

    @property
    def read_s(self) -> float:
        """What a step's batches take to be read now."""
        return median(fact.read_s for fact in self.recent)

    @property
    def past_read_s(self) -> float:
        """What they took at first."""
        return median(fact.read_s for fact in self.past)

    @property
    def busy_s(self) -> float:
        return median(fact.busy_s for fact in self.recent)

    @property
    def step_s(self) -> float:
        return median(fact.seconds / fact.steps for fact in self.recent)


@dataclass(frozen=True)
class Gauges:
    """Those of all nodes."""

    nodes: Mapping[int, Gauge] = field(default_factory=lambda: MappingProxyType({}))
    clock: float = 0.0
    """seconds of training, as the workers of the ends have measured them"""
    breaks: Mapping[Pair, Mapping[int, float]] = field(default_factory=lambda: MappingProxyType({}))
    """(lower node, higher node) → generation in which the edge between them broke → when, by ``clock``"""
    linking_s: float = 1.0
    """the longest that a worker has taken to take its place in a generation"""
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, find: Callable[..., Found], *given: Hashable) -> Found:
        """What ``find`` makes of these and of what is ``given``, looked for only once."""
        key = (find, *given)
        if key not in self._known:
            self._known[key] = find(self, *given)
        return cast(Found, self._known[key])

    def heard(self, fact: Gauged) -> Gauges:
        before = self.nodes.get(fact.node)
        new = before.then(fact) if before and before.worker == fact.worker else Gauge(fact.worker, (fact,), (fact,))
        clock = self.clock + (fact.seconds if fact.stage == 0 and fact.node == min(self._ends(fact)) else 0.0)
        return replace(self, nodes=MappingProxyType({**self.nodes, fact.node: new}), clock=clock)

    def _ends(self, fact: Gauged) -> Iterable[int]:
        return [fact.node, *(node for node, gauge in self.nodes.items() if gauge.last.stage == 0)]

    def broken(self, one: int, other: int, generation: int) -> Gauges:
        """The edge between two nodes has broken; both may tell of it."""
        pair = min(one, other), max(one, other)
        times = {g: t for g, t in self.breaks.get(pair, {}).items() if t > self.clock - BREAKS_S}
        times.setdefault(generation, self.clock)
        return replace(self, breaks=MappingProxyType({**self.breaks, pair: MappingProxyType(times)}))

    def linked(self, seconds: float) -> Gauges:
        """A worker has taken its place."""
        return self if seconds <= self.linking_s else replace(self, linking_s=seconds)

    def of(self, nodes: Iterable[int]) -> dict[int, Gauge] | None:
        """Those of these nodes, if all have told of the same step."""
        found = {node: self.nodes[node] for node in nodes if node in self.nodes}
        return found if len({gauge.last.step for gauge in found.values()}) == 1 else None
