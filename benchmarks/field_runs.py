"""One run of one system of ``benchmarks.field``: started, struck, watched and ended from outside."""

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

from benchmarks.common import RUNS
from benchmarks.field_systems import Strike, System, Update, alive, next_steps, updates_of
from benchmarks.trl import bury, children
from planaria.common.errors import RunStopped
from planaria.control.statefile import born

NAME = "field"
FIRST_S, END_S = 180.0, 40.0
"""patience for the first update, and for the end"""
LOOK_S, WEIGH_S = 0.05, 2.0
"""from one look at what is due to the next, and from one look at memory to the next"""
QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ran:
    """What came of a run."""

    updates: list[Update]
    """all, undone ones among them"""
    begin: float
    """the first update; monotonic seconds"""
    end: float
    """when its time was up; it may have gone on a little"""
    kills: list[float]
    started: float
    """seconds from the command to the first update"""
    memory: list[int]
    """bytes of all processes together, shared pages once"""
    cpu: float
    """processor seconds of those that lived from the beginning to the end"""
    problems: list[str]


def ran(system: System, arm: str, planned: Sequence[Strike], seconds: float) -> Ran:
    """Train for ``seconds`` from the first update on, and kill as ``planned``.

    :raises RunStopped: when it never begins, or ends by itself.
    """
    from planaria.runtime.fleet.process import adopting

    shutil.rmtree(folder := folder_of(system, arm), ignore_errors=True)
    folder.mkdir(parents=True)
    processes: list[subprocess.Popen[bytes]] = []
    others, launched = children(), time.monotonic()
    with adopting():
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
    """Start what the system consists of; each is in ``processes`` once it runs."""
    with (folder / "out.txt").open("w") as out:
        for command in system.commands(folder):
            env = {**os.environ, **QUIET, **command.env}
            processes.append(subprocess.Popen(command.line, stdout=out, stderr=out, env=env))


def _require_running(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        if (code := process.poll()) is not None:
            raise RunStopped(f"{folder.name}: ended by itself with {code}; what it said is in {folder / 'out.txt'}")


def _await_first(system: System, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + FIRST_S
    while not system.begun(folder):
        _require_running(processes, folder)
        if time.monotonic() > until:
            raise RunStopped(f"{folder.name}: no update within {FIRST_S:g} s; what it said is in {folder / 'out.txt'}")
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
    """Kill whoever is due, and look at memory. Whose place is empty is killed once it is taken again.

    It ends when the time is up, all kills are done and the system has gone on after the last.
    """
    found, due, began = _Watched([], []), list(planned), time.monotonic()
    before, weigh, over = _cpu(processes), began, began + seconds
    while (now := time.monotonic()) < over or due or not _went_on(system, folder, found.kills):
        if now > over + FIRST_S:
            raise RunStopped(f"{folder.name}: does not go on; what it said is in {folder / 'out.txt'}")
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


def _went_on(system: System, folder: Path, kills: Sequence[float]) -> bool:
    """Has there been a new update since the last kill?"""
    updates = updates_of(system.lines(folder)) if kills else []
    return all(seconds < math.inf for seconds in next_steps(updates, kills[-1:]))


def _end(processes: Sequence[subprocess.Popen[bytes]], others: frozenset[int]) -> None:
    """Ask all to stop, the first one last: others may need it. Whoever does not is killed, with all that they bore."""
    family = {pid: born(pid) for pid in _family(processes)}
    until = time.monotonic() + END_S
    for process in reversed(processes):
        process.terminate()
    for process in reversed(processes):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
    for pid, birth in family.items():
        if birth is not None and born(pid) == birth and alive(pid):
            os.kill(pid, signal.SIGKILL)
    if not bury(others):
        raise RunStopped("a process that was started does not end, not even killed; see `ps`")


def _family(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """These processes and all that descend from them."""
    found, ahead = [], [process.pid for process in processes]
    while ahead:
        pid = ahead.pop()
        found.append(pid)
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                ahead += map(int, file.read_text().split())
    return found


def _memory(pid: int) -> int:
    """Proportional set size in bytes: pages that several processes share are divided among them."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def _cpu(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, float]:
    """Processor seconds that each of the family has used."""
    found = {}
    for pid in _family(processes):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    return found
