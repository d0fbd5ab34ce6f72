"""The state of a run as the controller knows it: what ``apply`` folds and ``decide`` looks at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from planaria.record.allotment import Allotment, Used
from planaria.record.decisions import Source
from planaria.record.events import Replanned, RunStarted, Standing
from planaria.record.rollback import RollbackPoint, first_origin
from planaria.recovery.base import RollbackTo
from planaria.routing.arrangement import Arrangement, Pair

Phase = Literal["idle", "replan", "link", "run", "evaluate", "commit", "settle", "save", "left"]
Routes = list[list[int]]
Group = tuple[int, ...]


@dataclass(frozen=True)
class WorkerState:
    """One worker identity in its latest incarnation."""

    incarnation: int
    status: Literal["starting", "spare", "member", "released", "dead"]
    pid: int = 0
    at: str = ""
    """where others call for edges to it"""
    host: str = ""
    """a machine that has joined; empty for the run's own"""
    leaving: bool = False
    """is its machine about to go?"""


@dataclass(frozen=True)
class Host:
    """A machine that has joined."""

    workers: int
    """that it has room for; 0 when it takes no more"""
    stillborn: int = 0
    """workers in a row that died on it before they had joined"""
    failure: str = ""
    """a worker's own error there"""

    @property
    def stays(self) -> bool:
        return self.workers > 0 and not self.failure


@dataclass(frozen=True)
class OpenRound:
    """A round of the exchange that is under way at one replica."""

    round: int
    members: Group
    """replicas, itself among them"""
    settle_at: int
    """its own step by which it waits for the others"""
    heard: frozenset[tuple[int, int]] = frozenset()
    """(own node, other replica) whose offer has come"""
    refused: frozenset[tuple[int, int]] = frozenset()
    """the same, whose offer was of no use"""


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
    """the last plan for nodes that were left"""
    links: Mapping[Pair, str] = field(default_factory=lambda: MappingProxyType({}))
    suspects: frozenset[Pair] = frozenset()
    """edges that broke in this generation"""
    waiting: frozenset[str] = frozenset()
    """workers that have not yet reported what the present phase waits for"""
    attempts: int = 0
    """generations formed since the last committed step"""
    evaluated: int = -1
    saved: int = -1
    """name (a step) of the last checkpoint that it was saved for"""
    saved_in: int = -1
    """generation in which it was"""
    digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """file that was written of it then → its SHA-256"""
    rounds: int = 0
    """of the exchange, settled or given up"""
    inner: int = 0
    """steps since the last of them"""
    meeting: OpenRound | None = None
    cannot: str = ""
    """why the strategy cannot go on"""

    @classmethod
    def start(cls, settings: RunStarted, number: int = 0) -> ReplicaState:
        """A replica when its run is just being started or resumed."""
        standing = settings.standing(number)
        if number >= settings.replicas:  # there will be one when machines have joined
            state = cls(settings=settings, number=number, phase="left", step=standing.step)
            return replace(state, lost=frozenset(state.arrangement.stage))
        state = cls(
            settings=settings,
            number=number,
            step=standing.step,
            generation=settings.first_generation,
            evaluated=standing.step or -1,
            rounds=standing.rounds,
            inner=standing.inner,
        )
        origins = {node: first_origin(settings, stage) for node, stage in state.arrangement.stage.items()}
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
        if not missing or not self.settings.arrangement:
            return [[node for node in route if node not in missing] for route in self.settings.routes_of(self.number)]
        return self.detour.routes if self.detour and set(self.detour.nodes) == set(present) else None

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
        """Does a node lack a worker or a state, or a pair of them an edge? What is skipped may lack a worker.

        Asked at every turn for every replica, of which most have not changed.
        """
        stateless = (self.lost | self.origins.keys()) & self.holders.keys()
        unfilled = set(self.vacant) - self.skipped
        return bool(unfilled or stateless or self.pairs_of(self.holders) - self.links.keys())

    @property
    def hollow(self) -> bool:
        """Has it no state of its own any more, and none to begin from?"""
        return self.lost - self.leavers.keys() >= self.arrangement.stage.keys()

    @property
    def standing(self) -> Standing:
        return Standing(step=self.step, rounds=self.rounds, inner=self.inner)


@dataclass(frozen=True)
class Unsaved:
    """The last checkpoint, which could not be saved."""

    step: int
    """its name"""
    detail: str
    tries: int
    """that failed under this name"""
    hosts: frozenset[str]
    """machines at which saves have failed since one was sealed; the run's own are one, without a name"""
    since: int
    """steps made by then: the next interval begins there"""
    discarded: bool = False
    """is what was written of it removed?"""
    rested: bool = False
    """has it been long enough since then?"""


@dataclass(frozen=True)
class RunState:
    """Everything a decision depends on: the replicas, the workers that they share, and what holds for all."""

    settings: RunStarted
    replicas: Mapping[int, ReplicaState]
    allotment: Allotment
    workers: Mapping[str, WorkerState] = field(default_factory=lambda: MappingProxyType({}))
    hosts: Mapping[str, Host] = field(default_factory=lambda: MappingProxyType({}))
    """machines that have joined"""
    stillborn: int = 0
    """workers in a row that died before they had joined, on the run's own machines"""
    save_every: int = 0
    saving: int = -1
    """name (a step) of the checkpoint that replicas are being saved for; -1: none"""
    saved: int = -1
    """that of the last one sealed"""
    standings: Mapping[int, Standing] = field(default_factory=lambda: MappingProxyType({}))
    """where replicas were when they were saved for the one under way"""
    unsaved: Unsaved | None = None
    """since a save has failed, until one is sealed"""
    unsealed: RunState | None = None
    """what was before the last checkpoint was sealed: should that fail, nothing has come of it"""
    durable: RollbackPoint = field(default_factory=RollbackPoint)
    """the newest complete checkpoint of this run"""
    groups: Mapping[int, tuple[Group, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """round → who meets whom in it, drawn when somebody first came to it"""
    introduced: Mapping[int, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    """round → ids of the links over which its members know of each other"""
    late: frozenset[tuple[int, int, bool]] = frozenset()
    """(replica, round, is it meeting already?): it has waited for others long enough"""
    stopping: str = ""
    """why the run was asked to stop"""
    failed: str = ""
    """a worker's own error that ends the run"""
    over: bool = False

    @classmethod
    def start(cls, settings: RunStarted) -> RunState:
        """The state of a run that is just being started or resumed."""
        used, durable = Used(*settings.used), RollbackPoint.begin(settings)
        return cls(
            settings=settings,
            replicas=MappingProxyType({n: ReplicaState.start(settings, n) for n in range(settings.most_replicas)}),
            allotment=Allotment(settings.replicas, settings.last_block, used),
            save_every=settings.save_every,
            saved=durable.step,
            durable=durable,
        )

    def rollback_point(self, to: RollbackTo) -> RollbackPoint:
        """Where a rollback of this kind leads."""
        return {"disk": self.durable}[to]

    @property
    def live(self) -> dict[int, ReplicaState]:
        """The replicas that have not left."""
        return {number: replica for number, replica in self.replicas.items() if replica.phase != "left"}

    @property
    def progress(self) -> int:
        """Steps that the replicas have come, taken together: what learning rates and checkpoints go by."""
        return self.settings.progress(len(self.allotment.used))

    @property
    def vacancies(self) -> int:
        """Nodes without a living worker, in all replicas."""
        return sum(len(replica.vacant) for replica in self.replicas.values())

    @property
    def holders(self) -> dict[int, str]:
        """Node → worker, in all replicas."""
        return {node: worker for replica in self.replicas.values() for node, worker in replica.holders.items()}

    def replica_at(self, node: int) -> ReplicaState | None:
        """The replica to which ``node`` belongs."""
        return next((r for r in self.replicas.values() if node in r.arrangement.stage), None)

    @property
    def spares(self) -> tuple[str, ...]:
        """Idle workers that stay, in order of identity."""
        return tuple(worker for worker in self.with_status("spare") if self.stays(worker))

    def stays(self, worker: str) -> bool:
        """Is it neither to leave, nor on a machine that takes no more workers? Such a one is about to go."""
        known = self.workers[worker]
        return not known.leaving and (not known.host or self.hosts[known.host].stays)

    def with_status(self, status: str) -> tuple[str, ...]:
        """Identities of the workers in this status, in order of identity."""
        return tuple(sorted((w for w, s in self.workers.items() if s.status == status), key=identity_order))


def identity_order(worker: str) -> tuple[int, str]:
    """Sorts w2 before w10."""
    return (len(worker), worker)
