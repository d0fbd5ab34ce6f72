"""Workers as processes of this machine, forked from a server that has imported torch.

A worker exits when its control connection closes, and the kernel kills it with this process, even if it is stopped.
:func:`worker_host` returns this machine or a Ray cluster, by ``fleet.kind``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Literal

from planaria.config.names import WorkerId
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.base import (
    MAX_REPORT_BYTES,
    THAW_LIMIT_S,
    Entry,
    Fleet,
    FleetWork,
    Notice,
    Reported,
    WorkerEnded,
    WorkerHost,
)
from planaria.runtime.fleet.devices import (
    NO_INVENTORY,
    Device,
    DeviceNeeds,
    Inventory,
    device_of,
    inventory,
    require_devices,
    use_only,
)
from planaria.runtime.fleet.heartbeats import HeartbeatMonitor
from planaria.runtime.fleet.process import WorkerProcess, activity
from planaria.runtime.fleet.spawner import spawner


@dataclass(eq=False)
class _Process:
    worker: str
    incarnation: int
    process: WorkerProcess
    connection: Connection
    device: str = ""
    """empty on CPUs"""
    last_seen: float = field(default_factory=time.monotonic)
    awaited: bool = False
    """whether it was forked or has reported: from then on silence counts"""
    ended: bool = False


class LocalFleet:
    """The fleet protocol on one machine. ``entry`` must be importable."""

    def __init__(
        self,
        entry: Entry,
        preload: list[str],
        config: FleetConfig,
        devices: Sequence[Device] = (),
    ) -> None:
        """``devices``: one is visible to each worker."""
        self._entry, self._preload, self._devices = entry, preload, devices
        self._start_s = config.start_timeout_s
        self._silence = HeartbeatMonitor[_Process].of(config)
        self._spawner = spawner()
        self._spawner.prepare(preload)
        self._workers: dict[str, _Process] = {}
        self._everyone: list[_Process] = []

    def spawn(self, worker: str, incarnation: int) -> None:
        self._reap()
        ours, theirs = Pipe()
        device = self._device(worker)
        use_device = partial(use_only, device, self._devices)
        run, fd = partial(_enter, self._entry, use_device, worker, incarnation), os.dup(theirs.fileno())
        theirs.close()
        name = f"planaria {worker}.{incarnation}"
        process = self._spawner.spawn(name, run, self._preload, [fd], start_s=self._start_s)
        self._workers[worker] = _Process(worker, incarnation, process, ours, device)
        self._everyone.append(self._workers[worker])

    def _device(self, worker: str) -> str:
        """Return the device for a worker, or an empty string without devices."""
        living = [p for p in self._everyone if p.process.exitcode is None]
        homes = {WorkerId(p.worker, p.incarnation): p.device for p in living}
        return device_of(worker, self._devices, homes) if self._devices else ""

    def send(self, worker: str, text: bytes) -> None:
        with contextlib.suppress(OSError):  # poll reports the closed connection once
            self._workers[worker].connection.send_bytes(text)

    def waitables(self) -> list[Connection]:
        return [p.connection for p in self._everyone if not p.connection.closed]

    def poll(self, timeout_s: float) -> list[Notice]:
        listening = {p.connection: p for p in self._everyone if not p.connection.closed}
        notices: list[Notice] = []
        wait(list(listening), timeout_s)
        self._silence.look(timeout_s)
        for ready in wait(list(listening), 0.0):
            notices += self._read(listening[ready])  # type: ignore[index]
        for process in self._everyone:
            if not (process.awaited or process.ended or process.process.pid is None):
                process.awaited = True
                self._silence.expect(process)
        for process, seconds in self._silence.silent_too_long(lambda process: activity(process.process.pid)):
            notices += self._lose(process, "heartbeat", f"silent for {seconds:.2f} s")
        return notices

    def _read(self, process: _Process) -> list[Reported | WorkerEnded]:
        """Read all reports from a connection."""
        notices: list[Reported | WorkerEnded] = []
        try:
            while process.connection.poll():
                text = process.connection.recv_bytes(MAX_REPORT_BYTES)
                notices.append(Reported(process.worker, process.incarnation, text))
                process.last_seen = time.monotonic()
                if not process.ended:
                    process.awaited = True
                    self._silence.receive(process)
        except (EOFError, OSError):
            process.connection.close()
            if failure := process.process.failure:
                notices += self._lose(process, "exit", f"could not be started: {failure}")
            else:
                notices += self._lose(process, "connection", f"pid {process.process.pid}")
        return notices

    def _lose(
        self, process: _Process, cause: Literal["connection", "exit", "heartbeat"], detail: str
    ) -> list[WorkerEnded]:
        """Return a notice unless the process was reported before."""
        if process.ended:
            return []
        process.ended = True
        self._silence.forget(process)
        return [WorkerEnded(process.worker, process.incarnation, cause, detail)]

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        process = self._find(worker, incarnation)
        if process is not None and not process.connection.closed:
            with contextlib.suppress(OSError):
                process.connection.send_bytes(text)

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        process = self._find(worker, incarnation)
        if process is not None:
            process.process.signal(number)

    def _reap(self) -> None:
        """Release resources of dead incarnations, and kill those that have been stopped for long."""
        for process in [p for p in self._everyone if p.ended]:
            if not process.connection.closed and time.monotonic() - process.last_seen > THAW_LIMIT_S:
                process.process.signal(signal.SIGKILL)
                process.connection.close()
            if process.connection.closed and process.process.exitcode is not None:
                self._everyone.remove(process)

    def _find(self, worker: str, incarnation: int) -> _Process | None:
        return next((p for p in self._everyone if (p.worker, p.incarnation) == (worker, incarnation)), None)

    def close(self, patience_s: float = 2.0) -> None:
        deadline = time.monotonic() + patience_s
        for process in self._everyone:
            if not process.ended and process.process.pid is not None:  # otherwise kill it immediately
                process.process.join(max(0.0, deadline - time.monotonic()))
            process.process.signal(signal.SIGKILL)
            process.connection.close()
        for process in self._everyone:
            process.process.kill(1.0)


def _enter(entry: Entry, use_device: Callable[[], None], worker: str, incarnation: int, fd: int) -> None:
    """Run a worker in a new process."""
    use_device()
    entry(Connection(fd), worker, incarnation)


@dataclass(frozen=True)
class _LocalHost:
    config: FleetConfig

    @property
    def host(self) -> str:
        return self.config.host

    def fleet(self, work: FleetWork) -> Fleet:
        devices = devices_here(work.needs, work.workers).devices
        return LocalFleet(work.entry, work.preload, self.config, devices)


def devices_here(needs: DeviceNeeds, workers: int) -> Inventory:
    """Return this machine's CUDA devices, if a run needs them.

    :raises UserError: if they are insufficient for that many workers.
    """
    devices = inventory() if needs.cuda else NO_INVENTORY
    advice = "use 'cpu', machines that join (fleet.local_workers = 0), or fleet.kind = 'ray' with nodes that have more"
    require_devices("this machine", needs, devices, workers, advice)
    return devices


@contextmanager
def worker_host(config: FleetConfig, workers: int) -> Iterator[WorkerHost]:
    """Yield the host for ``workers`` workers that ``config`` names; UserError if it is unavailable or unsuitable."""
    if config.kind == "local":
        yield _LocalHost(config)
        return
    from planaria.runtime.fleet.ray import Cluster  # slow to import, and may not be installed

    cluster = Cluster(config, workers)
    try:
        yield cluster
    finally:
        cluster.leave()
