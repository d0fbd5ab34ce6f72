"""The state of a run, changed by ``apply`` and read by ``decide``."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from planaria.control.facts.events import ReplicaPosition, RunStarted
from planaria.control.facts.slowness import SlowPartFound
from planaria.control.state.base import State
from planaria.control.state.block_allocation import BlockAllocation, BlockSet
from planaria.control.state.gauges import Gauges
from planaria.control.state.replica import ReplicaGroup, ReplicaState
from planaria.control.state.rollback import RollbackPoint
from planaria.control.state.roster import MachineState, Roster, Status, WorkerState
from planaria.exchange.base import Exchange
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.suspicion import Suspicion


class Replicas(Mapping[int, ReplicaState]):
    """Replicas by number, in order; immutable. Replacing one copies the index of all, but no replica.

    ``troubled``: numbers of present ones that are incomplete (:attr:`ReplicaState.troubled`). ``left``: numbers of
    those that left or do not exist yet. ``generation``: the latest of all.
    """

    def __init__(self, replicas: Mapping[int, ReplicaState]) -> None:
        self._all = dict(replicas)
        self.numbers = frozenset(self._all)
        self.troubled = frozenset[int]()
        self.left = frozenset[int]()
        self.generation = max(replica.generation for replica in self._all.values())
        for replica in self._all.values():
            self._index(replica)

    def _index(self, replica: ReplicaState) -> None:
        only_this, ended = {replica.number}, replica.phase == "left"
        self.left = self.left | only_this if ended else self.left - only_this
        self.troubled = self.troubled | only_this if replica.troubled and not ended else self.troubled - only_this

    def with_replica(self, replica: ReplicaState) -> Replicas:
        """Return the replicas with this one's new state."""
        before, after = self._all[replica.number], object.__new__(Replicas)
        after.__dict__ = self.__dict__ | {"_all": self._all | {replica.number: replica}}
        after.generation = max(self.generation, replica.generation)
        if "left" in (before.phase, replica.phase) or _index_inputs(before) != _index_inputs(replica):
            after.__dict__.pop("replica_of_worker", None)
            after._index(replica)
        return after

    @property
    def live(self) -> Mapping[int, ReplicaState]:
        """Present replicas."""
        return {n: replica for n, replica in self._all.items() if n not in self.left} if self.left else self

    @cached_property
    def replica_of_worker(self) -> Mapping[str, int]:
        """Worker → number of its replica."""
        return {worker: number for number, replica in self._all.items() for worker in replica.holders.values()}

    def of(self, worker: str) -> ReplicaState | None:
        """Return the replica of a worker."""
        number = self.replica_of_worker.get(worker)
        return None if number is None else self._all[number]

    def __getitem__(self, number: int) -> ReplicaState:
        return self._all[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> ValuesView[ReplicaState]:  # the inherited method looks up each one
        return self._all.values()

    def items(self) -> ItemsView[int, ReplicaState]:
        return self._all.items()


_index_inputs = attrgetter(*sorted(ReplicaState.cache_inputs))


@dataclass(frozen=True)
class UnsavedCheckpoint:
    """The last checkpoint if it could not be saved."""

    step: int
    """its name"""
    detail: str
    tries: int
    """failed attempts under this name"""
    machines: frozenset[str]
    """machines at which saves failed since the last seal; "" is the run's own"""
    since: int
    """steps made at that time; the next interval starts there"""
    discarded: bool = False
    """whether its files are removed"""
    rested: bool = False
    """whether the pause after it is over"""


class BackgroundWrite(NamedTuple):
    """A background write of a worker: a part of the checkpoint ``step`` in a replica's generation."""

    replica: int
    generation: int
    step: int


@dataclass(frozen=True)
class RunState(State):
    """The state on which decisions depend: replicas, their shared workers, and global facts."""

    started: RunStarted
    replicas: Replicas
    allocation: BlockAllocation
    roster: Roster = field(default_factory=Roster)
    failed_starts: int = 0
    """consecutive workers that died on the run's own machines before they joined"""
    save_every: int = 0
    saving: int = -1
    """name (a step) of the checkpoint in progress; -1: none"""
    saved: int = -1
    """name of the last sealed checkpoint"""
    positions: Mapping[int, ReplicaPosition] = field(default_factory=dict)
    """positions of replicas saved for the checkpoint in progress"""
    writing: Mapping[str, BackgroundWrite] = field(default_factory=dict)
    """worker → its background write, also of a cancelled checkpoint"""
    unsaved: UnsavedCheckpoint | None = None
    """checkpoint that failed to save, until the next seal"""
    unsealed: RunState | None = None
    """state before the last seal, restored if the seal fails"""
    durable: RollbackPoint = field(default_factory=RollbackPoint)
    """the newest complete checkpoint of this run"""
    groups: Mapping[int, tuple[ReplicaGroup, ...]] = field(default_factory=dict)
    """round → its groups, drawn when the first replica reached it"""
    edges_with_open_prefetch: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """round → ids of the links over which prefetched parts may be sent"""
    suspicion: Suspicion = field(default_factory=Suspicion)
    """evidence against replicas from earlier steps and rounds"""
    accusers: frozenset[str] = frozenset()
    """machines, and workers of the first machine, on whose word a worker was excluded"""
    expired_round_waits: frozenset[tuple[int, int, bool]] = frozenset()
    """(replica, round, whether its round has begun) of expired waits"""
    unreachable_relays: Mapping[str, str] = field(default_factory=dict)
    """relay that does not answer → the error"""
    relays_given_up: bool = False
    """whether no relay answered for ``fleet.join_s``, so that the run stops waiting"""
    join_timed_out: bool = False
    """whether no machine joined for ``fleet.join_s``, so that the run stops waiting for workers"""
    gauges: Gauges = field(default_factory=Gauges)
    """measurements of workers"""
    blamed: Mapping[tuple[str, tuple[int, ...]], SlowPartFound] = field(default_factory=dict)
    """(fault, nodes) → the part that is currently slow"""
    last_handover_at: float | None = None
    """time, by the gauges' clock, at which a worker last had to hand over its stage because it was slow"""
    stopping: str = ""
    """reason for a requested stop"""
    stops_before_repair: bool = False
    """whether the stop precedes repairs"""
    overdue: str = ""
    """actions that have not ended within ``fleet.stop_s`` of the stop request"""
    failed: str = ""
    """a worker's own error that ends the run"""
    over: bool = False
    term: int = 1
    """number of the controller that leads this part of the run"""
    undecided: frozenset[int] = frozenset()
    """replicas that may need a decision; if there are none, the run needs none either"""

    cache_inputs = frozenset({"started"})

    @classmethod
    def start(cls, started: RunStarted) -> RunState:
        """Return the state of a run that is being started or resumed."""
        used, durable = BlockSet.of(*started.used), RollbackPoint.begin(started)
        allocation = BlockAllocation(started.replicas, started.last_block, used)
        if started.durable_step is not None:
            allocation = allocation.started_past_checkpoint(started.first_step - started.durable_step)
        replicas = Replicas({n: ReplicaState.start(started, n) for n in range(started.max_replicas)})
        return cls(
            started=started,
            replicas=replicas,
            allocation=allocation,
            save_every=started.save_every,
            saved=durable.step,
            durable=durable,
            undecided=replicas.numbers,
        )

    def changed(self, **changes: Any) -> RunState:
        """Return :meth:`updated` after a change that may affect any replica."""
        return self.updated(**changes, undecided=self.replicas.numbers)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange between replicas."""
        return make_exchange(self.started.exchange)

    def is_current_write(self, part: BackgroundWrite) -> bool:
        """Return whether this write still belongs to the checkpoint in progress. A replica is not saved again before it
        is written."""
        return part.replica in self.live and part.step == self.saving == self.replicas[part.replica].saved

    @property
    def cut_off(self) -> bool:
        """Whether no relay answers, so that no edge can be opened."""
        return bool(self.started.relays) and self.unreachable_relays.keys() >= self.started.relays.keys()

    def can_save(self, replica: ReplicaState) -> bool:
        """Return whether the replica can be saved now. A prompt stop needs every stage's state but no edges."""
        return not replica.broken or (self.stops_before_repair and replica.whole)

    @property
    def live(self) -> Mapping[int, ReplicaState]:
        """Present replicas."""
        return self.replicas.live

    @property
    def troubled(self) -> list[ReplicaState]:
        """Present replicas that are incomplete, in order."""
        return [self.replicas[number] for number in sorted(self.replicas.troubled)]

    @property
    def progress(self) -> int:
        """Steps of all replicas together, which determine learning rates and checkpoints."""
        return self.started.progress(len(self.allocation.used))

    @property
    def vacancies(self) -> int:
        """Nodes without a living worker, in all replicas."""
        return sum(len(replica.vacant) for replica in self.troubled)

    @property
    def holders(self) -> dict[int, str]:
        """Node → worker, in all replicas."""
        return {node: worker for replica in self.replicas.values() for node, worker in replica.holders.items()}

    def replica_of(self, worker: str) -> ReplicaState | None:
        """Return the replica of ``worker``."""
        return self.replicas.of(worker)

    @property
    def workers(self) -> Mapping[str, WorkerState]:
        return self.roster.workers

    @property
    def machines(self) -> Mapping[str, MachineState]:
        """Machines that have joined."""
        return self.roster.machines

    @property
    def spares(self) -> tuple[str, ...]:
        """Idle workers that stay, in order of identity."""
        return self.roster.spares

    def machine_or_worker(self, worker: str) -> str:
        """Return the machine of a worker that joined with one, or else the worker."""
        return self.workers[worker].host or worker

    def with_status(self, status: Status) -> tuple[str, ...]:
        """Return the workers in this status, in order of identity."""
        return self.roster.with_status(status)
