"""What the campaign sees of a run that lives: the lines that its log gains, and its processes, by the kernel's word."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import TextIO

_PROGRESS = ("commit", "form", "run_started", "seal")
"""kinds of lines in a log by which a run shows that it gets on"""
_KIND = re.compile(r'"kind":"(\w+)"')


class Tail:
    """Reads what was appended to a run's events since the last look, also when older parts were moved away."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._torn = path, None, ""
        self.progress, self.moved = 0, time.monotonic()
        self.kinds: set[str] = set()
        """of the lines that were new at the last look"""
        self.struck: set[int] = set()
        """faults of the trace, by number, that have struck this process of the run"""

    _file: TextIO | None

    def look(self) -> None:
        if self._file is None or (self._path.exists() and os.fstat(self._file.fileno()).st_ino != self._inode()):
            if not self._path.exists():
                return
            self._file, self._torn = self._path.open(), ""
        *lines, self._torn = (self._torn + self._file.read()).split("\n")
        self.kinds = {found[1] for line in lines if (found := _KIND.search(line))}
        if self.kinds.intersection(_PROGRESS):
            self.moved = time.monotonic()
        for line in lines:
            if '"kind":"commit"' in line:
                self.progress = max(self.progress, json.loads(line)["decision"]["progress"])
            elif '"kind":"fault_injected"' in line:
                self.struck.add(json.loads(line)["event"]["number"])

    def _inode(self) -> int:
        return self._path.stat().st_ino


def living(folder: Path) -> set[int]:
    """Processes that write to a worker's log of this run, whether they ever joined or not."""
    logs, found = str(folder.absolute() / "workers"), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            if (process / "fd" / "1").readlink().is_relative_to(logs):
                found.add(int(process.name))
    return found


def born(pid: int) -> int | None:
    """Start of a process, in clock ticks after boot: tells it from a later one with the same number."""
    stat = proc(pid, "stat").rpartition(")")[2].split()
    return int(stat[19]) if stat else None


def send(pid: int, number: signal.Signals, birth: int | None) -> None:
    """Unless the process is gone and its number is another's."""
    if birth is None or born(pid) == birth:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def fork_server(controller: int) -> int | None:
    """The fork server of a controller."""
    children = proc(controller, f"task/{controller}/children").split()
    return next((int(pid) for pid in children if proc(int(pid), "comm").strip() == "planaria births"), None)


def proc(pid: int, name: str) -> str:
    try:
        return (Path("/proc") / str(pid) / name).read_text().replace("\0", " ")
    except OSError:
        return ""


def evidence(path: Path, folder: Path, controller: int) -> None:
    """Write down what can be seen of a run that hangs: its last events, and where its processes are."""
    said = [f"controller {controller}\n"]
    for pid in [controller, *sorted(living(folder))]:
        status = [line for line in proc(pid, "status").splitlines() if line.startswith(("State", "Threads", "PPid"))]
        said.append(f"{pid}: {proc(pid, 'cmdline')[:90]} {status} wchan {proc(pid, 'wchan')}\n")
        for task in sorted((Path("/proc") / str(pid) / "task").glob("*")):
            said.append(f"   {task.name} {proc(pid, f'task/{task.name}/wchan')}\n")
    with contextlib.suppress(OSError):
        said += [line[:600] + "\n" for line in (folder / "events.jsonl").read_text().splitlines()[-80:]]
        said.append((folder / "state.json").read_text())
    path.write_text("".join(said))
