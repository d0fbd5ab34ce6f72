"""Names, assignments and progress of a run's workers, as far as reports and displays show them.

The controller's own state (``control/apply.py``) decides the run, so it needs strategies and complete logs; a reader of
a log has neither. ``tests/report/test_worker_assignments.py`` checks that both agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from planaria.control.facts.decisions import (
    Commit,
    Decision,
    Disband,
    ExcludeMember,
    Form,
    Release,
    ReplicaRestarted,
    RunStep,
    Spawn,
)
from planaria.control.facts.events import Event, HostLeft, RunStarted, WorkerJoined, WorkerLost
from planaria.control.state.roster import Status
from planaria.report.run.naming import Naming


class WorkerAssignments:
    """Current assignments of a run, updated with each fact in order; a resumed run starts again.

    A worker keeps its node until its replica is formed again or disbanded, or the worker is lost.
    """

    def __init__(self) -> None:
        self._reset(None)

    def _reset(self, started: RunStarted | None) -> None:
        self.started = started
        self.naming = Naming(started)
        self.alive: set[str] = set()
        """workers that have joined and are not lost"""
        self.lost: set[str] = set()
        """lost workers that have not been restarted"""
        self.released: set[str] = set()
        """workers that were ordered to leave"""
        self.unstarted: set[str] = set()
        """lost workers that were still starting when their machine left; they do not count as lost"""
        self._machines_left: set[str] = set()
        self.machine_of: dict[str, str] = {}
        """worker → machine that joined; empty for the run's own machines"""
        self.holders: dict[int, str] = {}
        """node → its worker, in all replicas"""
        self.node_of: dict[str, int] = {}
        """worker → its node"""
        self.generation: dict[int, int] = {}
        """replica → its current generation"""
        self.live = set(range(started.replicas if started else 1))
        """replicas that have not been disbanded"""
        self.steps = {replica: started.position_of(replica).step if started else 0 for replica in self.live}
        """replica → number of steps it has committed"""
        self._own_step_of: dict[int, int] = {}
        """replica → its own count of the last step or validation it started"""
        self._run_step_of: dict[int, int] = {}
        """replica → step of the run that it started last"""
        self._nodes: dict[int, set[int]] = {}
        for node, replica in started.replica_of.items() if started else ():
            self._nodes.setdefault(replica, set()).add(node)

    @property
    def spares(self) -> int:
        """Number of living workers without a node."""
        return len(self.alive - self.node_of.keys())

    def status(self, worker: str) -> Status:
        """Return the status of a worker that was started."""
        if worker in self.lost:
            return "dead"
        if worker in self.released:
            return "released"
        if worker in self.node_of:
            return "member"
        return "spare" if worker in self.alive else "starting"

    def replica(self, node: int) -> int:
        return self.naming.replica(node)

    def vacant(self, replica: int) -> set[int]:
        """Return the nodes of a replica without a worker."""
        return self._nodes.get(replica, set()) - self.holders.keys()

    def own_step(self, replica: int) -> int:
        """Return the replica's current or last step, by its own count."""
        return self._own_step_of.get(replica, self.steps.get(replica, 0))

    @property
    def progress(self) -> int:
        """Committed steps of the run; with several replicas, committed blocks divided by their number.

        Decreases only when a rollback undoes steps.
        """
        started = self.started
        if started is None or started.max_replicas == 1:
            return self.steps.get(0, 0)
        floor, beyond = started.used
        since_start = sum(step - started.position_of(replica).step for replica, step in self.steps.items())
        return started.progress(floor + len(beyond) + since_start)

    def run_step(self, replica: int | None = None) -> int:
        """Return a replica's current or last step of the run; without a replica, the progress of all."""
        return self.progress if replica is None else self._run_step_of.get(replica, self.progress)

    def apply(self, fact: Event | Decision) -> list[int]:
        """Process a fact; return the nodes whose holder changed or was lost."""
        match fact:
            case RunStarted():
                left = list(self.holders)
                self._reset(fact)
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
            case ExcludeMember():
                self.released.update(fact.workers)
            case Form():
                return self._form(fact)
            case Disband():
                self.live.discard(fact.replica)
                return self._vacate(self._nodes.get(fact.replica, ()))
            case ReplicaRestarted():
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
        self._own_step_of[fact.replica] = fact.step
        if self.started is None or self.started.max_replicas == 1:
            self._run_step_of[fact.replica] = fact.step
        elif fact.mode == "train":
            self._run_step_of[fact.replica] = self.started.progress(fact.block)
