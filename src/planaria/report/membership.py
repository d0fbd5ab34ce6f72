"""Who stands where, and how far they have come: what a reader of a run's log must know at each of its lines.

``control/apply.py`` folds the same facts into everything that decisions depend on. This is the part that needs neither
strategies nor torch; ``tests/control/test_membership.py`` holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable

from planaria.control.decisions import Commit, Decision, Disband, Form, Found, Release, RunStep, SendAway, Spawn
from planaria.control.events import Event, HostLeft, RunStarted, WorkerJoined, WorkerLost
from planaria.control.roster import Status


class Membership:
    """Takes in a run's facts in order; in between, it answers. A run that is resumed begins anew.

    A log is believed: a worker stands where it was formed until its replica is formed anew or disbanded, or it is lost.
    """

    def __init__(self) -> None:
        self._begin_anew(None)

    def _begin_anew(self, started: RunStarted | None) -> None:
        self.started = started
        self.alive: set[str] = set()
        """workers that have joined and are not lost"""
        self.lost: set[str] = set()
        """workers that are lost, unless they were started anew since"""
        self.released: set[str] = set()
        """workers that were told to go"""
        self.unstarted: set[str] = set()
        """lost workers that were still being started on a machine when that left: the machine's loss covers theirs"""
        self._machines_left: set[str] = set()
        self.machine_of: dict[str, str] = {}
        """worker → the machine on which it was started, if that has joined; empty for the run's own"""
        self.holders: dict[int, str] = {}
        """node → the worker that stands there, in all replicas"""
        self.node_of: dict[str, int] = {}
        """the same the other way round"""
        self.generation: dict[int, int] = {}
        """replica → its present generation"""
        self.live = set(range(started.replicas if started else 1))
        """replicas that have not left"""
        self.steps = {replica: started.standing(replica).step if started else 0 for replica in self.live}
        """replica → steps of its own that are committed"""
        self._begun: dict[int, int] = {}
        """replica → the step of its own that it began last, be it a validation's"""
        self._under_way: dict[int, int] = {}
        """replica → the step of the run that it began last"""
        self._replica_of = started.replica_of if started else {}
        self._nodes: dict[int, set[int]] = {}
        for node, replica in self._replica_of.items():
            self._nodes.setdefault(replica, set()).add(node)

    @property
    def spares(self) -> int:
        """Living workers that stand nowhere."""
        return len(self.alive - self.node_of.keys())

    def status(self, worker: str) -> Status:
        """What a worker that was started is."""
        if worker in self.lost:
            return "dead"
        if worker in self.released:
            return "released"
        if worker in self.node_of:
            return "member"
        return "spare" if worker in self.alive else "starting"

    def replica(self, node: int) -> int:
        """The replica to which a node belongs."""
        return self._replica_of.get(node, 0)

    def vacant(self, replica: int) -> set[int]:
        """The nodes of a replica at which nobody stands."""
        return self._nodes.get(replica, set()) - self.holders.keys()

    def own_step(self, replica: int) -> int:
        """The step that a replica has under way, or had last, by its own count."""
        return self._begun.get(replica, self.steps.get(replica, 0))

    @property
    def progress(self) -> int:
        """Steps of the run that are committed: of several replicas, committed blocks over their number.

        It goes back only where something is undone, never because one replica is behind another.
        """
        started = self.started
        if started is None or started.replicas == 1:
            return self.steps.get(0, 0)
        floor, beyond = started.used
        own = sum(step - started.standing(replica).step for replica, step in self.steps.items())
        return started.progress(floor + len(beyond) + own)

    def run_step(self, replica: int | None = None) -> int:
        """The run's step that a replica has under way, or had last; without one, the step that all together are in."""
        return self.progress if replica is None else self._under_way.get(replica, self.progress)

    def take(self, fact: Event | Decision) -> list[int]:
        """The nodes at which another stands now, or nobody: of a worker that is lost, where it stood."""
        match fact:
            case RunStarted():
                left = list(self.holders)
                self._begin_anew(fact)
                return left
            case WorkerJoined():
                self.alive.add(fact.worker)
                self.lost.discard(fact.worker)
            case WorkerLost():
                if fact.worker not in self.alive and self.machine_of.get(fact.worker) in self._machines_left:
                    self.unstarted.add(fact.worker)
                self.alive.discard(fact.worker)
                self.lost.add(fact.worker)
                return self._vacate([self.node_of[fact.worker]] if fact.worker in self.node_of else [])
            case HostLeft():
                self._machines_left.add(fact.host)
            case Spawn():
                self.unstarted.discard(fact.worker)
                self.machine_of[fact.worker] = fact.host
                self.released.discard(fact.worker)
                self.lost.discard(fact.worker)
            case Release():
                self.released.add(fact.worker)
            case SendAway():
                self.released.update(fact.workers)
            case Form():
                return self._form(fact)
            case Disband():
                self.live.discard(fact.replica)
                return self._vacate(self._nodes.get(fact.replica, ()))
            case Found():
                self.live.add(fact.replica)
            case RunStep():
                self._begin(fact)
            case Commit():
                self.steps[fact.replica] = fact.step + 1
        return []

    def _form(self, form: Form) -> list[int]:
        self.generation[form.replica], self.steps[form.replica] = form.generation, form.step
        now, nodes = form.holders, self._nodes.setdefault(form.replica, set())
        nodes |= now.keys()
        changed = [node for node in sorted(nodes) if self.holders.get(node) != now.get(node)]
        self._vacate(changed)
        for node in now.keys() & set(changed):
            self.holders[node], self.node_of[now[node]] = now[node], node
        return changed

    def _vacate(self, nodes: Iterable[int]) -> list[int]:
        left = [node for node in nodes if node in self.holders]
        for node in left:
            del self.node_of[self.holders.pop(node)]
        return left

    def _begin(self, fact: RunStep) -> None:
        self._begun[fact.replica] = fact.step
        if self.started is None or self.started.replicas == 1:
            self._under_way[fact.replica] = fact.step
        elif fact.mode == "train":
            self._under_way[fact.replica] = self.started.progress(fact.block)
