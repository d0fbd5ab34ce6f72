"""Start, watch, kill and end one run of a system of ``benchmarks.field``."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.field_systems import Strike, System, Update, alive, next_steps, updates_of
from benchmarks.harness import RUNS
from benchmarks.trl import children, reap_children
from planaria.common.errors import RunStopped
from planaria.control.log.state_file import start_ticks

NAME = "field"
FIRST_S, END_S = 180.0, 40.0  # limits for the first update and for the end
LOOK_S, WEIGH_S = 0.05, 2.0  # polling intervals of kills and of memory
QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ran:
    """The result of a run."""

    updates: list[Update]  # all, including undone ones
    begin: float  # the first update; monotonic seconds
    end: float  # when its time was up
    kills: list[float]
    started: float  # seconds from the command to the first update
    memory: list[int]  # bytes of all processes together, shared pages once
    cpu: float  # processor seconds of the processes that lived throughout
    problems: list[str]


def ran(system: System, arm: str, planned: Sequence[Strike], seconds: float) -> Ran:
    """Train for ``seconds`` after the first update, with the ``planned`` kills.

    :raises RunStopped: if it never begins or exits early.
    """
    from planaria.runtime.fleet.process import adopt_orphans

    shutil.rmtree(folder := folder_of(system, arm), ignore_errors=True)
    folder.mkdir(parents=True)
    processes: list[subprocess.Popen[bytes]] = []
    others, launched = children(), time.monotonic()
    with adopt_orphans():
        try:
            _start(system, folder, processes)
            _await_first(system, folder, processes)
            watched = _watched(system, folder, processes, planned, seconds)
        finally:
            _end(processes, others)
    updates = updates_of(system.lines(folder))
    begin = updates[0].t
    return Ran(
        updates=updates,
        begin=begin,
        end=begin + seconds,
        kills=watched.kills,
        started=begin - launched,
        memory=watched.memory,
        cpu=watched.cpu,
        problems=system.problems(folder),
    )


def folder_of(system: System, arm: str) -> Path:
    return RUNS / NAME / f"{system.name}-{arm}".replace(" ", "-").replace(",", "")


def _start(system: System, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Start the system's commands and append their processes."""
    with (folder / "out.txt").open("w") as out:
        for command in system.commands(folder):
            env = {**os.environ, **QUIET, **command.env}
            processes.append(subprocess.Popen(command.line, stdout=out, stderr=out, env=env))


def _require_running(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        if (code := process.poll()) is not None:
            raise RunStopped(f"{folder.name}: exited early with code {code}; its output is in {folder / 'out.txt'}")


def _await_first(system: System, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + FIRST_S
    while not system.begun(folder):
        _require_running(processes, folder)
        if time.monotonic() > until:
            raise RunStopped(f"{folder.name}: no update within {FIRST_S:g} s; its output is in {folder / 'out.txt'}")
        time.sleep(LOOK_S)


@dataclass
class _Watched:
    kills: list[float]
    memory: list[int]
    cpu: float = 0.0


def _watched(
    system: System,
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    planned: Sequence[Strike],
    seconds: float,
) -> _Watched:
    """Kill the planned processes and sample memory until the time is up and the system continues after the last kill.

    A kill at an empty place waits until the place is taken.
    """
    found, due, began = _Watched([], []), list(planned), time.monotonic()
    before, weigh, over = _cpu(processes), began, began + seconds
    while (now := time.monotonic()) < over or due or not _training_continues(system, folder, found.kills):
        if now > over + FIRST_S:
            raise RunStopped(f"{folder.name}: does not continue; its output is in {folder / 'out.txt'}")
        if due and now >= began + due[0].at:
            pid = system.living(folder)[due[0].place(system.places)]
            if pid is not None:
                found.kills.append(time.monotonic())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                del due[0]
        if now >= weigh:
            weigh = now + WEIGH_S
            found.memory.append(sum(map(_memory, _family(processes))))
            _require_running(processes, folder)
        time.sleep(LOOK_S if now < over else 10 * LOOK_S)
    after = _cpu(processes)
    found.cpu = sum(after[pid] - before[pid] for pid in before.keys() & after.keys())
    return found


def _training_continues(system: System, folder: Path, kills: Sequence[float]) -> bool:
    """Return True after a new update since the last kill."""
    updates = updates_of(system.lines(folder)) if kills else []
    return all(seconds < math.inf for seconds in next_steps(updates, kills[-1:]))


def _end(processes: Sequence[subprocess.Popen[bytes]], others: frozenset[int]) -> None:
    """Terminate all processes, the first one last because others may need it; kill the remaining descendants."""
    family = {pid: start_ticks(pid) for pid in _family(processes)}
    until = time.monotonic() + END_S
    for process in reversed(processes):
        process.terminate()
    for process in reversed(processes):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
    for pid, started_ticks in family.items():
        if started_ticks is not None and start_ticks(pid) == started_ticks and alive(pid):
            os.kill(pid, signal.SIGKILL)
    if not reap_children(others):
        raise RunStopped("a process that was started does not end, not even killed; see `ps`")


def _family(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Return these processes and all their descendants."""
    found, ahead = [], [process.pid for process in processes]
    while ahead:
        pid = ahead.pop()
        found.append(pid)
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                ahead += map(int, file.read_text().split())
    return found


def _memory(pid: int) -> int:
    """Return the proportional set size in bytes (shared pages divided among processes)."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def _cpu(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, float]:
    """Return the processor seconds of each process and descendant."""
    found = {}
    for pid in _family(processes):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    return found
