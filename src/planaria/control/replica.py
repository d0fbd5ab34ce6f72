"""The state of one replica of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from planaria.control.copied import copied
from planaria.control.decisions import Recall, Source
from planaria.control.events import EdgeBroken, Replanned, RunStarted, Standing
from planaria.control.gauges import SlowLink
from planaria.control.memory import Memory
from planaria.control.rollback import first_origin
from planaria.pipeline.routing.arrangement import Arrangement, Pair


def after_commit(
    ages: Mapping[int, int], rested: frozenset[int], skipped: Collection[int], copies: Iterable[tuple[int, int]]
) -> tuple[Mapping[int, int], frozenset[int]]:
    """The ages, and the nodes that have rested, once a step is committed.

    Parameters
    ----------
    ages: node → commits of its present, or last, holder, through which it kept its copies of others up to date.
    rested: nodes that were skipped since the last commit of all nodes: their copies have missed steps.
    skipped: nodes without which this step was made. Copies from and at them rest; nobody's count grows by it.
    copies: pairs of nodes, one of which keeps a copy of the other.
    """
    rested = rested | frozenset(skipped)
    if skipped:
        return ages, rested
    # A copy that has missed steps may have been half renewed before: its keeper begins to count anew.
    anew = {node for pair in copies if rested & set(pair) for node in pair}
    return {node: 1 if node in anew else age + 1 for node, age in ages.items()}, frozenset()


class Waiting(Set[str]):
    """An immutable set. One worker less costs a bit for each that there was, however many have reported."""

    __slots__ = ("_missing", "_places")

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self._places: Mapping[str, int] = {worker: place for place, worker in enumerate(dict.fromkeys(workers))}
        self._missing = (1 << len(self._places)) - 1

    def without(self, worker: str) -> Waiting:
        """The same less ``worker``."""
        place = self._places.get(worker)
        if place is None or not self._missing >> place & 1:
            return self
        less = object.__new__(Waiting)
        less._places, less._missing = self._places, self._missing ^ 1 << place
        return less

    def __contains__(self, worker: object) -> bool:
        place = self._places.get(worker)  # type: ignore[call-overload]
        return place is not None and bool(self._missing >> place & 1)

    def __bool__(self) -> bool:
        return bool(self._missing)

    def __len__(self) -> int:
        return self._missing.bit_count()

    def __iter__(self) -> Iterator[str]:
        return (worker for worker, place in self._places.items() if self._missing >> place & 1)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"Waiting({list(self)})"


NOBODY = Waiting()


Phase = Literal["idle", "replan", "link", "run", "evaluate", "commit", "settle", "save", "left"]
Routes = list[list[int]]
Group = tuple[int, ...]


@dataclass(frozen=True)
class OpenRound:
    """A round of the exchange that is under way at one replica."""

    round: int
    members: Group
    """replicas, itself among them"""
    settle_at: int
    """its own step by which it waits for the others"""
    heard: Mapping[tuple[int, int], str] = field(default_factory=lambda: MappingProxyType({}))
    """(own node, replica) whose offer has come, or was made there → its digest, empty where nobody compares them"""
    refused: frozenset[tuple[int, int]] = frozenset()
    """the same, whose offer was of no use"""
    products: Mapping[tuple[int, int], Mapping[int, float]] = field(default_factory=lambda: MappingProxyType({}))
    """the same as those heard → inner products, where offers are judged over all stages"""

    def told(self, node: int) -> dict[int, Mapping[int, float]]:
        """Replica → inner products of its offer, as ``node`` has told them."""
        return {replica: found for (at, replica), found in self.products.items() if at == node}

    def having_heard(self, node: int, replica: int, digest: str, products: Mapping[int, float]) -> OpenRound:
        """The same once ``node`` has told that it has heard an offer, and what of that."""
        heard = MappingProxyType({**self.heard, (node, replica): digest})
        if not products:
            return copied(self, heard=heard)
        return copied(self, heard=heard, products=MappingProxyType({**self.products, (node, replica): products}))


@dataclass(frozen=True)
class ReplicaState:
    """One complete set of stages. ``step`` counts its committed steps, so it is also the step to run next.

    Who, where and with whom goes by node: where every stage has one worker, that is the stage's number.
    """

    settings: RunStarted
    """what the run was started with"""
    number: int = 0
    phase: Phase = "idle"
    step: int = 0
    generation: int = 0
    formed: int = -1
    """``step`` when the present generation was formed"""
    holders: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """node → the living worker that stands there, or is about to"""
    origins: Mapping[int, Source] = field(default_factory=lambda: MappingProxyType({}))
    """nodes whose state does not exist in any worker yet and comes from the seed or from disk"""
    lost: frozenset[int] = frozenset()
    """nodes whose state died with their worker and is not rebuilt yet"""
    lenders: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """nodes of other replicas that the present generation gets lost states from → workers"""
    leavers: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """node → the living worker that was to hand its stage over, and has it still until all is in place"""
    ages: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """node → commits of its present, or last, holder, through which it kept its copies of others up to date"""
    rested: frozenset[int] = frozenset()
    """nodes that were skipped since the last commit of the whole replica: their copies have missed steps"""
    skipped: frozenset[int] = frozenset()
    """nodes that the present generation does without"""
    detour: Replanned | None = None
    """the last plan for nodes that were left, or around links that are slow"""
    offered: Replanned | None = None
    """a plan around slow links, which is to be taken if that pays"""
    ways: tuple[SlowLink, ...] = ()
    """slow links that plans reckon with, as they were measured"""
    routes: Routes = field(default_factory=list)
    """those of the present generation, on a schedule"""
    links: Mapping[Pair, str] = field(default_factory=lambda: MappingProxyType({}))
    over: Mapping[Pair, str] = field(default_factory=lambda: MappingProxyType({}))
    """edges that go over a relay → its name"""
    shunned: frozenset[str] = frozenset()
    """relays over which an edge has broken and nobody was dead: others are taken while there are any"""
    suspects: frozenset[Pair] = frozenset()
    """edges that broke in this generation"""
    stalled: tuple[EdgeBroken, ...] = ()
    """what those tell that wait for a message in vain, in this generation"""
    waiting: Waiting = NOBODY
    """workers that have not yet reported what the present phase waits for"""
    attempts: int = 0
    """generations formed since the last committed step"""
    trouble: str = ""
    """the latest broken edge since then, with its cause"""
    evaluated: int = -1
    saved: int = -1
    """name (a step) of the last checkpoint that it was saved for"""
    saved_in: int = -1
    """generation in which it was"""
    digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """file that was written of it then → its SHA-256"""
    weights: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """node → digest of its weights then, where nodes of a stage are to be equal"""
    rounds: int = 0
    """of the exchange, settled or given up"""
    inner: int = 0
    """steps since the last of them"""
    meeting: OpenRound | None = None
    progress: Any = None
    """a feature's state of the current step (``feature_state.py``)"""
    heard: Mapping[str, Mapping[int, str]] = field(default_factory=lambda: MappingProxyType({}))
    """worker → what it has heard in the step under way, where all-reduced replicas compare that: replica → digest"""
    refused: Mapping[int, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    """which of those replicas has refused whose offers in that step"""
    memory: Memory | None = None
    """what its workers remember together; None where no strategy has them do so"""
    cannot: str = ""
    """why the strategy cannot go on"""

    @classmethod
    def start(cls, settings: RunStarted, number: int = 0) -> ReplicaState:
        """A replica when its run is just being started or resumed."""
        standing = settings.standing(number)
        if number >= settings.replicas:  # there will be one when machines have joined
            state = cls(settings=settings, number=number, phase="left", step=standing.step, memory=settings.memory)
            return replace(state, lost=frozenset(state.arrangement.stage))
        state = cls(
            settings=settings,
            number=number,
            step=standing.step,
            generation=settings.first_generation,
            evaluated=standing.step or -1,
            rounds=standing.rounds,
            inner=standing.inner,
            memory=settings.memory,
        )
        nodes, memory = state.arrangement.stage, settings.memory
        if settings.recalled >= 0 and memory is not None:
            recall = Recall(by=memory.by, step=settings.recalled, file=settings.recalled_from)
            there = settings.remembering
            memory = memory.resumed(settings.recalled, there)
            lost = frozenset(nodes.keys() - set(there))
            return replace(state, origins=MappingProxyType(dict.fromkeys(there, recall)), lost=lost, memory=memory)
        origins = {node: first_origin(settings, stage) for node, stage in nodes.items()}
        return replace(state, origins=MappingProxyType(origins))

    @cached_property
    def arrangement(self) -> Arrangement:
        """All nodes of the replica, whether anybody stands there or not."""
        return Arrangement(dict(enumerate(self.settings.nodes(self.number))))

    @cached_property
    def held(self) -> Arrangement:
        """The nodes at which a worker stands."""
        return self.arrangement.of(self.holders)

    @cached_property
    def stateful(self) -> Arrangement:
        """The nodes whose worker has its stage's state."""
        return self.arrangement.of(self.holders.keys() - self.lost - self.origins.keys())

    def routes_over(self, present: Collection[int]) -> Routes | None:
        """The ways of microbatches when these nodes are there; None if they have to be planned yet."""
        missing = self.arrangement.stage.keys() - set(present)
        if self.detour and set(self.detour.nodes) == set(present):
            return self.detour.routes
        if not missing or not self.settings.arrangement:
            return [[node for node in route if node not in missing] for route in self.settings.routes_of(self.number)]
        return None

    def pairs_of(self, present: Collection[int]) -> set[Pair]:
        """The edges of a replica that has these nodes only."""
        copies = {pair for pair in self.settings.pairs_of(self.number) if set(pair) <= set(present)}
        there = self.arrangement.of(present)
        return copies | there.pairs(self.routes_over(present) or ()) if there.stages else copies

    @property
    def vacant(self) -> tuple[int, ...]:
        """Nodes without a living worker."""
        if self.phase == "left":
            return ()
        return tuple(node for node in self.arrangement.stage if node not in self.holders)

    @cached_property
    def broken(self) -> bool:
        """Does a node lack a worker or a state, or a pair of them an edge? What is skipped may lack a worker."""
        stateless = any(node in self.holders for nodes in (self.lost, self.origins) for node in nodes)
        unfilled = any(node not in self.skipped for node in self.vacant)
        if unfilled or stateless or self.pairs_of(self.holders) - self.links.keys():
            return True
        return bool(self.routes) and self.routes_over(self.holders) != self.routes

    @cached_property
    def troubled(self) -> bool:
        """Is it not whole, or about to change? Then what others do may concern it."""
        return bool(self.lost or self.origins or self.skipped or self.leavers or self.cannot) or self.broken

    @property
    def whole(self) -> bool:
        """Does a living worker hold the state of every stage? Then the replica can be saved, edges or not."""
        return len(self.stateful.stages) > self.settings.stages

    @property
    def hollow(self) -> bool:
        """Has it no state of its own any more, and none to begin from?"""
        return self.lost - self.leavers.keys() >= self.arrangement.stage.keys()

    def has_heard(self, other: int) -> bool:
        """Has the offer of another replica in the round under way come to every node?"""
        assert self.meeting is not None
        return all((node, other) in self.meeting.heard for node in self.arrangement.stage)

    @property
    def standing(self) -> Standing:
        return Standing(step=self.step, rounds=self.rounds, inner=self.inner)


BUILT_OF = frozenset({"holders", "origins", "lost", "skipped", "leavers", "links", "detour", "routes", "cannot"})
"""fields from which the others of a replica follow (what is a ``cached_property`` above)"""
_STEADY = frozenset(ReplicaState.__dataclass_fields__) - BUILT_OF


def go_on(replica: ReplicaState, **changes: Any) -> ReplicaState:
    """``dataclasses.replace`` for what changes in every step: a tenth of its time, and what follows from the other
    fields stays known.

    :raises TypeError: when a field is named that is none, or one from which others follow.
    """
    if not changes.keys() <= _STEADY:
        raise TypeError(f"{sorted(changes.keys() - _STEADY)}: use dataclasses.replace")
    return copied(replica, **changes)
