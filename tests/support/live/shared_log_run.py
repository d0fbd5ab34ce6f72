"""A run with a shared log, on emulated machines: processes with separate directories."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port

from planaria.config.schema import FleetConfig, RunConfig
from planaria.control.facts import events as e
from support.live.harness import Live, facts, in_one_process, live, losses, steps, tiny
from support.live.holders import written_key
from support.processes import Command

LEASE_S = 0.6

PACE: dict[str, Any] = {"emulate": "links", "latency_s": 0.004}
"""The network of a run that must not end while a test waits for a machine: a step takes about 0.1 s."""


def shared(folder: Path, standbys: int = 1, **sections: Any) -> RunConfig:
    """Return a run whose log is shared with ``standbys`` machines, and whose workers are all on machines that join."""
    key = written_key(folder / "key")
    standby_at = ", ".join(f"127.0.0.1:{free_port()}" for _ in range(standbys))
    fleet = {
        "local_workers": 0, "spares": 0, "port": free_port(), "key": str(key), "lease_s": LEASE_S, "orphan_s": 40.0,
        "shared_log": str(folder / "shared"), "standby_at": standby_at,
    }  # fmt: skip
    return tiny(folder, fleet=fleet | sections.pop("fleet", {}), **sections)


class Machines:
    """The other machines of a run: each has its own directory."""

    def __init__(self, config: RunConfig, folder: Path, running: ExitStack) -> None:
        self.config, self._folder, self._running = config, folder, running
        self.key = str(config.fleet.key)

    def start(self, name: str, *words: str) -> Command:
        (self._folder / name).mkdir()
        process = Command("join", *words, "--key-file", self.key, cwd=self._folder / name)
        self._running.callback(process.close)
        return process

    def standby(self, number: int = 0) -> tuple[Command, Path]:
        """Start a standby and wait until it is ready; return it and the folder from which it leads."""
        name, at = f"standby{number}", self.config.fleet.standby_addresses[number]
        log = f"{self.config.fleet.shared_log}/{self.config.name}"
        process = self.start(name, log, "--standby", "--at", at)
        line = process.line()
        assert "ready to lead" in line, (line, process.poll())
        return process, self._folder / name / "runs" / self.config.name

    def workers(self, name: str, count: int) -> Command:
        at = f"127.0.0.1:{self.config.fleet.port}"
        return self.start(name, at, "--workers", str(count), "--cache", str(self._folder / name / "cache"))


@contextmanager
def led(config: RunConfig, folder: Path) -> Iterator[tuple[Live, Machines]]:
    """Yield the run under its first controller, whose process group is its machine."""
    with live(config) as run, ExitStack() as running:
        run.wait_until(lambda record: bool(facts(record, e.RunStarted)))
        yield run, Machines(config, folder, running)


@contextmanager
def followed(config: RunConfig, folder: Path, workers: int = 5) -> Iterator[tuple[Live, Command, Path]]:
    """Yield the run under its first controller, a standby on another machine, and its folder; with joined workers."""
    with led(config, folder) as (run, machines):
        standby, there = machines.standby()
        machines.workers("worker", workers)
        yield run, standby, there


def lose_machine(run: Live) -> None:
    """Kill the first controller's machine after some steps."""
    run.wait_until(lambda record: steps(record) >= 8)
    os.killpg(run.process.pid, signal.SIGKILL)


def stop_until_replaced(run: Live, standby: Command, term: int) -> None:
    """Stop a controller's process group until the standby leads, then continue it."""
    os.killpg(run.process.pid, signal.SIGSTOP)
    while f"continuing as term {term}" not in standby.line():
        pass
    os.killpg(run.process.pid, signal.SIGCONT)


def undisturbed(config: RunConfig) -> dict[int, float]:
    """Return the losses of the same run in one process."""
    alone = FleetConfig(spares=config.fleet.spares)
    return losses(in_one_process(config.model_copy(update={"fleet": alone})))
