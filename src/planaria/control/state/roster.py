"""The workers of a run and the machines that joined, with derived facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

Status = Literal["starting", "spare", "member", "released", "dead"]
MAX_FAILED_STARTS = 3
"""consecutive workers that may die before they are ready"""


@dataclass(frozen=True)
class WorkerState:
    """A worker's latest incarnation."""

    incarnation: int
    status: Status
    pid: int = 0
    at: str = ""
    """address for edges to it"""
    host: str = ""
    """a joined machine; empty for the run's own"""
    leaving: bool = False
    """whether its machine is about to leave"""
    slow: bool = False
    """whether it was relieved of a stage because it was slow; then it is the last of the spares"""
    memory: int = 0
    """bytes of its CUDA device; 0: unknown"""
    layer_s: float = 0.0
    """seconds of a decoder layer's passes there; 0: not measured"""


@dataclass(frozen=True)
class MachineState:
    """A machine that has joined."""

    workers: int
    """number of workers it has room for; 0 if it takes no more"""
    failed_starts: int = 0
    """consecutive workers that died on it before they joined"""
    failure: str = ""
    """a worker's own error there"""

    @property
    def stays(self) -> bool:
        return self.workers > 0 and not self.failure

    @property
    def rejection(self) -> str:
        """Return why the machine is dismissed, or an empty string if it is not."""
        if self.failure or not self.workers or self.failed_starts < MAX_FAILED_STARTS:
            return self.failure
        return f"{self.failed_starts} workers in a row died there before they were ready"


@dataclass(frozen=True)
class Roster:
    """All workers and machines. Immutable; derived facts are cached."""

    workers: Mapping[str, WorkerState] = field(default_factory=dict)
    machines: Mapping[str, MachineState] = field(default_factory=dict)
    """machines that have joined"""

    def with_workers(self, changed: Mapping[str, WorkerState]) -> Roster:
        return replace(self, workers={**self.workers, **changed})

    def with_machine(self, name: str, machine: MachineState) -> Roster:
        return replace(self, machines={**self.machines, name: machine})

    def with_status(self, status: Status) -> tuple[str, ...]:
        """Return the workers in this status, in order of identity."""
        return self._by_status.get(status, ())

    def stays(self, worker: str) -> bool:
        """Return whether the worker is not leaving and its machine still takes workers."""
        state = self.workers[worker]
        return not state.leaving and (not state.host or self.machines[state.host].stays)

    def staying_on(self, machine: str) -> int:
        """Return the number of living, staying workers on a machine; "" is the run's own machines."""
        return self._staying[machine]

    def with_room(self, replacing: bool) -> tuple[str, ...]:
        """Return joined machines with room for one more worker; dead workers free room if ``replacing``."""
        return self._with_room[replacing]

    @cached_property
    def spares(self) -> tuple[str, ...]:
        """Idle workers that stay, in order of identity."""
        return tuple(worker for worker in self.with_status("spare") if self.stays(worker))

    @cached_property
    def starting(self) -> tuple[str, ...]:
        """Starting workers that stay, in order of identity."""
        return tuple(worker for worker in self.with_status("starting") if self.stays(worker))

    @cached_property
    def leaving(self) -> frozenset[str]:
        """Living workers whose machine is about to leave."""
        return frozenset(name for name, worker in self.workers.items() if worker.leaving and worker.status != "dead")

    @cached_property
    def rejected(self) -> tuple[str, ...]:
        """Machines to dismiss."""
        return tuple(name for name, machine in self.machines.items() if machine.rejection)

    @cached_property
    def _by_status(self) -> Mapping[Status, tuple[str, ...]]:
        names_of: dict[Status, list[str]] = {}
        for name, worker in self.workers.items():
            names_of.setdefault(worker.status, []).append(name)
        return {status: tuple(sorted(names, key=identity_order)) for status, names in names_of.items()}

    @cached_property
    def _staying(self) -> Counter[str]:
        return Counter(w.host for w in self.workers.values() if w.status != "dead" and not w.leaving)

    @cached_property
    def _with_room(self) -> Mapping[bool, tuple[str, ...]]:
        fit = {name: machine for name, machine in self.machines.items() if machine.failed_starts < MAX_FAILED_STARTS}
        ever = Counter(worker.host for worker in self.workers.values()) if fit else Counter[str]()
        return {
            True: tuple(name for name, machine in fit.items() if self.staying_on(name) < machine.workers),
            False: tuple(name for name, machine in fit.items() if ever[name] < machine.workers),
        }


def identity_order(worker: str) -> tuple[int, str]:
    """Return a key that sorts w2 before w10."""
    return (len(worker), worker)
