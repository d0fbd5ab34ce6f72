"""The state of a run, changed by ``apply`` and read by ``decide``."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from planaria.control.allotment import Allotment, Used
from planaria.control.events import RunStarted, Standing
from planaria.control.gauges import Gauges
from planaria.control.replica import BUILT_OF, Group, ReplicaState
from planaria.control.rollback import RollbackPoint
from planaria.control.roster import Host, Roster, Status, WorkerState
from planaria.control.suspicion import Suspicion
from planaria.control.verdicts import Blamed
from planaria.exchange.base import Exchange
from planaria.exchange.kinds import exchange


class Replicas(Mapping[int, ReplicaState]):
    """Replicas by number, in order; immutable. One that changes costs the same however many there are.

    ``troubled``: numbers of those that are not whole (:attr:`ReplicaState.troubled`), of those that are there;
    ``gone``: of those that have left, or are yet to be founded; ``generation``: the latest of all.
    """

    def __init__(self, replicas: Mapping[int, ReplicaState]) -> None:
        self._all = dict(replicas)
        self.troubled = frozenset[int]()
        self.gone = frozenset[int]()
        self.generation = max(replica.generation for replica in self._all.values())
        for replica in self._all.values():
            self._note(replica)

    def _note(self, replica: ReplicaState) -> None:
        one, gone = {replica.number}, replica.phase == "left"
        self.gone = self.gone | one if gone else self.gone - one
        self.troubled = self.troubled | one if replica.troubled and not gone else self.troubled - one

    def having(self, replica: ReplicaState) -> Replicas:
        """The same with this replica as it now is."""
        before, after = self._all[replica.number], self.noting(replica)
        after.generation = max(self.generation, replica.generation)
        if "left" in (before.phase, replica.phase) or _built(before) != _built(replica):
            after.__dict__.pop("standing", None)
            after._note(replica)
        return after

    def noting(self, replica: ReplicaState) -> Replicas:
        """The same with this replica, of which nothing has changed that it is found by."""
        after = object.__new__(Replicas)
        after.__dict__ = self.__dict__ | {"_all": self._all | {replica.number: replica}}
        return after

    @property
    def live(self) -> Mapping[int, ReplicaState]:
        """Those that have not left."""
        return {n: replica for n, replica in self._all.items() if n not in self.gone} if self.gone else self

    @cached_property
    def standing(self) -> Mapping[str, int]:
        """Worker → the number of the replica in which it stands."""
        return {worker: number for number, replica in self._all.items() for worker in replica.holders.values()}

    def of(self, worker: str) -> ReplicaState | None:
        """The one in which a worker stands."""
        number = self.standing.get(worker)
        return None if number is None else self._all[number]

    def __getitem__(self, number: int) -> ReplicaState:
        return self._all[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> ValuesView[ReplicaState]:  # the inherited one looks each up
        return self._all.values()

    def items(self) -> ItemsView[int, ReplicaState]:
        return self._all.items()


_built = attrgetter(*sorted(BUILT_OF))


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


class Writing(NamedTuple):
    """What a worker writes while training goes on: a part of the checkpoint ``step``, of a replica's generation."""

    replica: int
    generation: int
    step: int


@dataclass(frozen=True)
class RunState:
    """Everything a decision depends on: the replicas, the workers that they share, and what holds for all."""

    settings: RunStarted
    replicas: Replicas
    allotment: Allotment
    roster: Roster = field(default_factory=Roster)
    stillborn: int = 0
    """workers in a row that died before they had joined, on the run's own machines"""
    save_every: int = 0
    saving: int = -1
    """name (a step) of the checkpoint that replicas are being saved for; -1: none"""
    saved: int = -1
    """that of the last one sealed"""
    standings: Mapping[int, Standing] = field(default_factory=lambda: MappingProxyType({}))
    """where replicas were when they were saved for the one under way"""
    writing: Mapping[str, Writing] = field(default_factory=lambda: MappingProxyType({}))
    """worker → what it writes while training goes on, even if that checkpoint has been given up meanwhile"""
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
    suspicion: Suspicion = field(default_factory=Suspicion)
    """of replicas, by what was found in steps and rounds before"""
    late: frozenset[tuple[int, int, bool]] = frozenset()
    """(replica, round, is it meeting already?): it has waited for others long enough"""
    silent: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """relay that does not answer → the error"""
    relays_given_up: bool = False
    """has no relay answered for ``fleet.join_s``? Then the run waits for none any longer"""
    deserted: bool = False
    """has nobody joined for so long that the run waits no longer for the workers it lacks?"""
    gauges: Gauges = field(default_factory=Gauges)
    """what workers have measured"""
    blamed: Mapping[tuple[str, tuple[int, ...]], Blamed] = field(default_factory=lambda: MappingProxyType({}))
    """(fault, nodes) → what is slow at present"""
    relieved: float | None = None
    """when, by the clock of the gauges, a worker was last to hand its stage over because it was slow"""
    stopping: str = ""
    """why the run was asked to stop"""
    prompt: bool = False
    """does the stop come before repairs?"""
    overdue: str = ""
    """what has not ended within ``fleet.stop_s`` of the stop request"""
    failed: str = ""
    """a worker's own error that ends the run"""
    over: bool = False
    undecided: frozenset[int] | None = None
    """replicas about which there may be something to decide; None: about anything"""

    @classmethod
    def start(cls, settings: RunStarted) -> RunState:
        """The state of a run that is just being started or resumed."""
        used, durable = Used.of(*settings.used), RollbackPoint.begin(settings)
        allotment = Allotment(settings.replicas, settings.last_block, used)
        if settings.durable_step is not None:
            allotment = allotment.begun_after(settings.first_step - settings.durable_step)
        return cls(
            settings=settings,
            replicas=Replicas({n: ReplicaState.start(settings, n) for n in range(settings.most_replicas)}),
            allotment=allotment,
            save_every=settings.save_every,
            saved=durable.step,
            durable=durable,
        )

    @cached_property
    def rule(self) -> Exchange:
        """How replicas agree."""
        return exchange(self.settings.exchange)

    def wants(self, part: Writing) -> bool:
        """Is this still a part of the checkpoint under way? A replica is not saved again before it is written."""
        return part.replica in self.live and part.step == self.saving == self.replicas[part.replica].saved

    @property
    def cut_off(self) -> bool:
        """Does no relay answer, so that no edge can be opened?"""
        return bool(self.settings.relays) and self.silent.keys() >= self.settings.relays.keys()

    def can_save(self, replica: ReplicaState) -> bool:
        """Can the replica be saved as it is? A prompt stop needs every stage's state, but no edges."""
        return not replica.broken or (self.prompt and replica.whole)

    @property
    def live(self) -> Mapping[int, ReplicaState]:
        """The replicas that have not left."""
        return self.replicas.live

    @property
    def troubled(self) -> list[ReplicaState]:
        """Those of them that are not whole, in order."""
        return [self.replicas[number] for number in sorted(self.replicas.troubled)]

    @property
    def progress(self) -> int:
        """Steps that the replicas have come, taken together: what learning rates and checkpoints go by."""
        return self.settings.progress(len(self.allotment.used))

    @property
    def vacancies(self) -> int:
        """Nodes without a living worker, in all replicas."""
        return sum(len(replica.vacant) for replica in self.troubled)

    @property
    def holders(self) -> dict[int, str]:
        """Node → worker, in all replicas."""
        return {node: worker for replica in self.replicas.values() for node, worker in replica.holders.items()}

    def replica_at(self, node: int) -> ReplicaState | None:
        """The replica to which ``node`` belongs."""
        return next((r for r in self.replicas.values() if node in r.arrangement.stage), None)

    def replica_of(self, worker: str) -> ReplicaState | None:
        """The replica in which ``worker`` stands."""
        return self.replicas.of(worker)

    @property
    def workers(self) -> Mapping[str, WorkerState]:
        return self.roster.workers

    @property
    def hosts(self) -> Mapping[str, Host]:
        """Machines that have joined."""
        return self.roster.hosts

    @property
    def spares(self) -> tuple[str, ...]:
        """Idle workers that stay, in order of identity."""
        return self.roster.spares

    def with_status(self, status: Status) -> tuple[str, ...]:
        """Identities of the workers in this status, in order of identity."""
        return self.roster.with_status(status)
