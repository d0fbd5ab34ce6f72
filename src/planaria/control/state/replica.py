"""The state of one replica of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from planaria.control.facts.decisions import Recall, Source
from planaria.control.facts.events import EdgeBroken, Replanned, ReplicaPosition, RunStarted
from planaria.control.facts.measurements import SlowLink
from planaria.control.state.base import State
from planaria.control.state.memory_snapshots import MemorySnapshot
from planaria.control.state.rollback import first_origin
from planaria.exchange.coded.coded_facts import CodedStep
from planaria.pipeline.routing.arrangement import Arrangement, Pair


def after_commit(
    staleness: Mapping[int, int],
    missed_steps: frozenset[int],
    skipped: Collection[int],
    copies: Iterable[tuple[int, int]],
) -> tuple[Mapping[int, int], frozenset[int]]:
    """Return ``staleness`` and ``missed_steps`` after a step is committed.

    :param staleness: node → commits during which its current or last holder kept its copies of others up to date.
    :param missed_steps: nodes skipped since the last commit of all nodes: their copies have missed steps.
    :param skipped: nodes skipped in this step; copies of them, and copies that they hold, do not age.
    :param copies: pairs of nodes, one of which keeps a copy of the other.
    """
    missed_steps = missed_steps | frozenset(skipped)
    if skipped:
        return staleness, missed_steps
    # A copy that missed steps may be partly renewed: its holder's count restarts.
    restarted = {node for pair in copies if missed_steps & set(pair) for node in pair}
    return {node: 1 if node in restarted else age + 1 for node, age in staleness.items()}, frozenset()


class WorkerSet(Set[str]):
    """An immutable set, stored as bits: removing a worker costs one bit per initial member."""

    __slots__ = ("_index_of", "_present")

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self._index_of: Mapping[str, int] = {worker: index for index, worker in enumerate(dict.fromkeys(workers))}
        self._present = (1 << len(self._index_of)) - 1

    def without(self, worker: str) -> WorkerSet:
        """Return the set without ``worker``."""
        index = self._index_of.get(worker)
        if index is None or not self._present >> index & 1:
            return self
        remaining = object.__new__(WorkerSet)
        remaining._index_of = self._index_of
        remaining._present = self._present ^ 1 << index
        return remaining

    def __contains__(self, worker: object) -> bool:
        index = self._index_of.get(worker)  # type: ignore[call-overload]
        return index is not None and bool(self._present >> index & 1)

    def __bool__(self) -> bool:
        return bool(self._present)

    def __len__(self) -> int:
        return self._present.bit_count()

    def __iter__(self) -> Iterator[str]:
        return (worker for worker, index in self._index_of.items() if self._present >> index & 1)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"WorkerSet({list(self)})"


NO_WORKERS = WorkerSet()


Phase = Literal["idle", "replan", "link", "run", "evaluate", "commit", "settle", "save", "left"]
Routes = list[list[int]]
ReplicaGroup = tuple[int, ...]


@dataclass(frozen=True)
class OpenRound(State):
    """A round of the exchange in progress at one replica."""

    round: int
    members: ReplicaGroup
    """replicas, itself included"""
    settle_at: int
    """the replica's own step at which it waits for the others"""
    received: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """(own node, replica) of updates received or made there → digest, empty if not compared"""
    rejected: frozenset[tuple[int, int]] = frozenset()
    """those of them that were invalid"""
    inner: int = 0
    """steps of a decoupled replica since it received the weights of this round"""
    contributors: Mapping[int, float] = field(default_factory=dict)
    """replica → weight of its update, once others have settled a decoupled round"""
    products: Mapping[tuple[int, int], Mapping[int, float]] = field(default_factory=dict)
    """the same keys → inner products, if updates are weighted over all stages"""

    def products_at(self, node: int) -> dict[int, Mapping[int, float]]:
        """Return replica → inner products of its update, as ``node`` reported them."""
        return {replica: products for (at, replica), products in self.products.items() if at == node}

    def having_received(self, node: int, replica: int, digest: str, products: Mapping[int, float]) -> OpenRound:
        """Return the round after ``node`` reported a received update, with its products."""
        received = {**self.received, (node, replica): digest}
        if not products:
            return self.updated(received=received)
        return self.updated(received=received, products={**self.products, (node, replica): products})


@dataclass(frozen=True)
class ReplicaState(State):
    """One complete set of stages. ``step`` counts its committed steps, so it is also the next step.

    Assignments go by node; with one worker per stage, node n is stage n.
    """

    started: RunStarted
    """the first event of the run, with its settings"""
    number: int = 0
    phase: Phase = "idle"
    step: int = 0
    generation: int = 0
    formed_at_step: int = -1
    """``step`` when the current generation was formed"""
    holders: Mapping[int, str] = field(default_factory=dict)
    """node → its living worker, present or assigned"""
    origins: Mapping[int, Source] = field(default_factory=dict)
    """nodes whose state no worker has yet: it comes from the seed or from disk"""
    lost: frozenset[int] = frozenset()
    """nodes whose state died with their worker and is not rebuilt yet"""
    donor_workers: Mapping[int, str] = field(default_factory=dict)
    """nodes of other replicas that send lost states to the current generation → workers"""
    handover_from: Mapping[int, str] = field(default_factory=dict)
    """node → the living worker from which its new holder takes the state; kept until the generation is linked"""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """node → commits during which its current or last holder kept its copies of others up to date"""
    missed_steps: frozenset[int] = frozenset()
    """nodes skipped since the last commit of the whole replica: their copies have missed steps"""
    skipped: frozenset[int] = frozenset()
    """nodes that the current generation does without"""
    plan_override: Replanned | None = None
    """the last plan for the remaining nodes, or around slow links"""
    candidate_plan: Replanned | None = None
    """a plan around slow links, to be used if it pays"""
    slow_links: tuple[SlowLink, ...] = ()
    """slow links considered by plans, as measured"""
    routes: Routes = field(default_factory=list)
    """routes of the current generation, if the recipe has a schedule"""
    links: Mapping[Pair, str] = field(default_factory=dict)
    relay_of_edge: Mapping[Pair, str] = field(default_factory=dict)
    """edges that use a relay → its name"""
    avoided_relays: frozenset[str] = frozenset()
    """relays over which an edge broke without a dead worker; avoided while there are others"""
    broken_edges: frozenset[Pair] = frozenset()
    """edges that broke in this generation"""
    stalled: tuple[EdgeBroken, ...] = ()
    """reports of messages that did not arrive in this generation"""
    waiting: WorkerSet = NO_WORKERS
    """workers that have not reported the current phase yet"""
    attempts: int = 0
    """generations formed since the last committed step, except planned handovers"""
    last_edge_failure: str = ""
    """the latest broken edge or failed worker since then, with its cause"""
    explained: int = -1
    """generation whose first cause is known; edges that break later in it only follow from it"""
    rejections: frozenset[tuple[str, str, str]] = frozenset()
    """(link, receiving worker, sending worker) of invalid messages since then"""
    evaluated: int = -1
    saved: int = -1
    """step of the last checkpoint that contains this replica; −1: none"""
    saved_generation: int = -1
    """generation of that save"""
    digests: Mapping[str, str] = field(default_factory=dict)
    """file of that save → SHA-256"""
    weight_digests: Mapping[int, str] = field(default_factory=dict)
    """node → digest of its weights then, if nodes of a stage must be equal"""
    rounds: int = 0
    """rounds of the exchange, settled or cancelled"""
    steps_since_round: int = 0
    """steps since the last round"""
    open_round: OpenRound | None = None
    behind: Mapping[int, str] = field(default_factory=dict)
    """nodes that lack only missed rounds of a decoupled exchange → their workers"""
    settled_at: Mapping[int, int] = field(default_factory=dict)
    """round → ``step`` when its weights were received, for the last rounds of a decoupled exchange"""
    coded: CodedStep | None = None
    """rounds of the current step, if replicas' gradients are coded"""
    received: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """worker → digests of updates it received in the current step, by replica, if all-reduced replicas compare them"""
    rejected: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """replica → replicas whose updates it rejected in the current step"""
    memory: MemorySnapshot | None = None
    """snapshots in its workers' memory, or None if no strategy keeps them"""
    unrecoverable_reason: str = ""
    """why the strategy cannot continue"""

    cache_inputs = frozenset(
        {
            "started",
            "number",
            "holders",
            "origins",
            "lost",
            "skipped",
            "handover_from",
            "links",
            "plan_override",
            "routes",
            "unrecoverable_reason",
        }
    )

    @classmethod
    def start(cls, started: RunStarted, number: int = 0) -> ReplicaState:
        """Return a replica of a run that is being started or resumed."""
        position, memory = started.position_of(number), MemorySnapshot.start(started.chain)
        if number >= started.replicas:  # starts when machines join
            state = cls(started=started, number=number, phase="left", step=position.step, memory=memory)
            return replace(state, lost=frozenset(state.arrangement.stage))
        state = cls(
            started=started,
            number=number,
            step=position.step,
            generation=started.first_generation,
            evaluated=position.step or -1,
            rounds=position.rounds,
            steps_since_round=position.inner,
            settled_at=position.settled_rounds,
            memory=memory,
        )
        nodes = state.arrangement.stage
        if started.snapshot_step >= 0 and memory is not None:
            recall = Recall(by=memory.strategy, step=started.snapshot_step, file=started.recalled_from)
            recalled = started.snapshot_nodes
            memory = memory.resume(started.snapshot_step, recalled)
            lost = frozenset(nodes.keys() - set(recalled))
            return replace(state, origins=dict.fromkeys(recalled, recall), lost=lost, memory=memory)
        if started.start_from_first_worker and number:
            return replace(state, lost=frozenset(nodes))
        origins = {node: first_origin(started, stage) for node, stage in nodes.items()}
        return replace(state, origins=origins)

    @cached_property
    def arrangement(self) -> Arrangement:
        """All nodes of the replica, with or without worker."""
        return Arrangement(dict(enumerate(self.started.nodes(self.number))))

    @cached_property
    def held(self) -> Arrangement:
        """Nodes with a worker."""
        return self.arrangement.of(self.holders)

    @cached_property
    def stateful(self) -> Arrangement:
        """Nodes whose worker has its stage's state."""
        return self.arrangement.of(self.holders.keys() - self.lost - self.origins.keys())

    def routes_over(self, present: Collection[int]) -> Routes | None:
        """Return the routes of microbatches over the present nodes, or None if they need planning."""
        missing = self.arrangement.stage.keys() - set(present)
        if self.plan_override and set(self.plan_override.nodes) == set(present):
            return self.plan_override.routes
        if missing and not self.started.stages:
            return [route for route in self.started.routes if not missing & set(route)]
        if not missing or not self.started.arrangement:
            return [[node for node in route if node not in missing] for route in self.started.routes_of(self.number)]
        return None

    def pairs_of(self, present: Collection[int]) -> set[Pair]:
        """Return the edges of a replica with only these nodes."""
        copies = {pair for pair in self.started.pairs_of(self.number) if set(pair) <= set(present)}
        arrangement = self.arrangement.of(present)
        return copies | arrangement.pairs(self.routes_over(present) or ()) if arrangement.stages else copies

    @property
    def vacant(self) -> tuple[int, ...]:
        """Nodes without a living worker; all of a replica that has left."""
        return tuple(node for node in self.arrangement.stage if node not in self.holders)

    @cached_property
    def broken(self) -> bool:
        """Whether a node lacks a worker or a state, or a pair of nodes an edge. Skipped nodes may lack a worker."""
        stateless = any(node in self.holders for nodes in (self.lost, self.origins) for node in nodes)
        unfilled = any(node not in self.skipped for node in self.vacant)
        if unfilled or stateless or self.pairs_of(self.holders) - self.links.keys():
            return True
        return bool(self.routes) and self.routes_over(self.holders) != self.routes

    @cached_property
    def troubled(self) -> bool:
        """Whether it is incomplete or about to change, so that changes of other replicas may affect it."""
        return (
            bool(self.lost or self.origins or self.skipped or self.handover_from or self.unrecoverable_reason)
            or self.broken
        )

    @property
    def whole(self) -> bool:
        """Whether living workers hold the state of every stage; then the replica can be saved even without edges."""
        return len(self.stateful.stages) > self.started.stages

    @property
    def missing_stages(self) -> list[int]:
        """Stages whose state no living worker holds."""
        return sorted(set(self.arrangement.stages) - set(self.stateful.stages))

    @property
    def is_stateless(self) -> bool:
        """Whether it has no state and none to start from."""
        return self.lost - self.handover_from.keys() >= self.arrangement.stage.keys()

    @property
    def settled_rounds(self) -> int:
        """The rounds of the exchange that its state includes."""
        return self.open_round.round if self.open_round else self.rounds

    @property
    def can_be_copied(self) -> bool:
        """Whether it is complete and in no round."""
        return not (self.broken or self.open_round or self.origins or self.phase == "link")

    def received_at(self, round: int) -> int:
        """Return ``step`` when the replica received the weights of a decoupled ``round``, or its initial weights."""
        start = self.started.position_of(self.number)
        return self.settled_at.get(round, start.step - start.inner)

    def has_received(self, other: int) -> bool:
        """Return whether every node has received another replica's update in the current round."""
        assert self.open_round is not None
        return all((node, other) in self.open_round.received for node in self.arrangement.stage)

    @property
    def position(self) -> ReplicaPosition:
        settled = [self.settled_at[round] for round in sorted(self.settled_at)]
        return ReplicaPosition(step=self.step, rounds=self.rounds, inner=self.steps_since_round, settled_at=settled)
