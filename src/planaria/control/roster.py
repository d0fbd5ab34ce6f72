"""The workers of a run and the machines that have joined, and what follows from who is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

Status = Literal["starting", "spare", "member", "released", "dead"]
MAX_STILLBORN = 3
"""workers in a row that may die before they are ready"""


@dataclass(frozen=True)
class WorkerState:
    """One worker identity in its latest incarnation."""

    incarnation: int
    status: Status
    pid: int = 0
    at: str = ""
    """where others call for edges to it"""
    host: str = ""
    """a machine that has joined; empty for the run's own"""
    leaving: bool = False
    """is its machine about to go?"""
    slow: bool = False
    """has it been relieved of a stage because it was slow? Then it is the last of the spares"""
    memory: int = 0
    """bytes of its CUDA device; 0: not known"""
    layer_s: float = 0.0
    """seconds of a decoder layer's passes there; 0: not timed"""


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

    @property
    def unfit(self) -> str:
        """Why it is to be sent away; empty unless so."""
        if self.failure or not self.workers or self.stillborn < MAX_STILLBORN:
            return self.failure
        return f"{self.stillborn} workers in a row died there before they were ready"


@dataclass(frozen=True)
class Roster:
    """All workers and machines. It changes only when one comes, goes or gets another status; what follows from it is
    found when it is first asked for."""

    workers: Mapping[str, WorkerState] = field(default_factory=lambda: MappingProxyType({}))
    hosts: Mapping[str, Host] = field(default_factory=lambda: MappingProxyType({}))
    """machines that have joined"""

    def with_workers(self, changed: Mapping[str, WorkerState]) -> Roster:
        return replace(self, workers=MappingProxyType({**self.workers, **changed}))

    def with_host(self, name: str, host: Host) -> Roster:
        return replace(self, hosts=MappingProxyType({**self.hosts, name: host}))

    def with_status(self, status: Status) -> tuple[str, ...]:
        """Identities of the workers in this status, in order of identity."""
        return self._by_status.get(status, ())

    def stays(self, worker: str) -> bool:
        """Is it neither to leave, nor on a machine that takes no more workers? Such a one is about to go."""
        known = self.workers[worker]
        return not known.leaving and (not known.host or self.hosts[known.host].stays)

    def staying_on(self, host: str) -> int:
        """Living workers on a host that are not to leave; "" is the run's own machines."""
        return self._staying[host]

    def with_room(self, replace: bool) -> tuple[str, ...]:
        """Machines that have joined, and have room for one worker more; dead ones leave room if they are replaced."""
        return self._with_room[replace]

    @cached_property
    def spares(self) -> tuple[str, ...]:
        """Idle workers that stay, in order of identity."""
        return tuple(worker for worker in self.with_status("spare") if self.stays(worker))

    @cached_property
    def starting(self) -> tuple[str, ...]:
        """Workers that are being started, and stay, in order of identity."""
        return tuple(worker for worker in self.with_status("starting") if self.stays(worker))

    @cached_property
    def leaving(self) -> frozenset[str]:
        """Living workers whose machine is about to go."""
        return frozenset(name for name, worker in self.workers.items() if worker.leaving and worker.status != "dead")

    @cached_property
    def unfit(self) -> tuple[str, ...]:
        """Machines that are to be sent away."""
        return tuple(name for name, host in self.hosts.items() if host.unfit)

    @cached_property
    def _by_status(self) -> Mapping[Status, tuple[str, ...]]:
        found: dict[Status, list[str]] = {}
        for name, worker in self.workers.items():
            found.setdefault(worker.status, []).append(name)
        return {status: tuple(sorted(names, key=identity_order)) for status, names in found.items()}

    @cached_property
    def _staying(self) -> Counter[str]:
        return Counter(w.host for w in self.workers.values() if w.status != "dead" and not w.leaving)

    @cached_property
    def _with_room(self) -> Mapping[bool, tuple[str, ...]]:
        fit = {name: host for name, host in self.hosts.items() if host.stillborn < MAX_STILLBORN}
        ever = Counter(worker.host for worker in self.workers.values()) if fit else Counter[str]()
        return {
            True: tuple(name for name, host in fit.items() if self.staying_on(name) < host.workers),
            False: tuple(name for name, host in fit.items() if ever[name] < host.workers),
        }


def identity_order(worker: str) -> tuple[int, str]:
    """Sorts w2 before w10."""
    return (len(worker), worker)
