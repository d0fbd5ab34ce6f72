"""One run of the campaign: `planaria train` in a process group of its own, struck from inside by its trace and from
outside by us, resumed when its controller has gone, and judged when it is over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.campaign_plan import Plain

ORPHANS_S = 15.0
"""how long after the end of a run's process its workers may still be there"""
RESUMES = 25
_LOOK_S = 0.05
_PROGRESS = ('"kind":"commit"', '"kind":"form"', '"kind":"run_started"', '"kind":"seal"')
"""lines of a log by which a run shows that it gets on"""


class Hang(Exception):
    """Nothing has got on for too long; what was seen of it lies in the run's folder."""


@dataclass
class Seen:
    """What is found out about a run while it lives."""

    outside: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    orphans: int = 0
    slowest_end_s: float = 0.0
    parts: int = 0


class Tail:
    """Reads what was appended to a run's events since the last look, also when older parts were moved away."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._torn = path, None, ""
        self.progress, self.moved = 0, time.monotonic()

    _file: TextIO | None

    def look(self) -> None:
        if self._file is None or (self._path.exists() and os.fstat(self._file.fileno()).st_ino != self._inode()):
            if not self._path.exists():
                return
            self._file, self._torn = self._path.open(), ""
        *lines, self._torn = (self._torn + self._file.read()).split("\n")
        for line in lines:
            if any(mark in line for mark in _PROGRESS):
                self.moved = time.monotonic()
            if '"kind":"commit"' in line:
                self.progress = max(self.progress, json.loads(line)["decision"]["progress"])

    def _inode(self) -> int:
        return self._path.stat().st_ino


class Run:
    """A run with a plan, in a folder of its own."""

    def __init__(self, folder: Path, plan: Plain, recipe: Path, hang_s: float, over: threading.Event) -> None:
        """``over`` is set when the campaign is to end at once."""
        self.base, self.folder, self.plan, self._recipe = folder, folder / "runs" / "run", plan, recipe
        self.seen, self._hang_s, self._over = Seen(), hang_s, over
        self._blows, self._steps = [dict(blow) for blow in plan["outside"]], plan["sections"]["train"]["steps"]
        self._tail = Tail(self.folder / "events.jsonl")
        self._thaws: list[tuple[float, int, int | None]] = []
        self._asked: set[str] = set()
        """what was done to the controller that now lives"""

    def live(self) -> str:
        """Start it and resume it until it is over: 'finished', 'refused' or 'hung'; with ``over``, 'interrupted'."""
        arguments = [str(self._recipe)]
        for _ in range(RESUMES):
            try:
                code, errors = self._one_part(arguments)
            except Hang as hang:
                self.seen.wrong.append(str(hang))
                return "hung"
            if self._over.is_set():
                return "interrupted"
            self.seen.parts += 1
            if self._is_over(code, errors):
                return "finished"
            if self.seen.wrong:
                return "refused"
            if (self.folder / "config.json").exists():
                arguments = ["--resume", str(self.folder)]
        self.seen.wrong.append(f"not over after {RESUMES} resumptions")
        return "refused"

    def _is_over(self, code: int, errors: str) -> bool:
        """Is it, by an exit code and one line that what was done to it explains?"""
        line = errors.strip()
        if "Traceback" in errors or "Error:" in errors or (code >= 0 and line.count("\n")):
            self.seen.wrong.append(f"exit code {code} with: {line[-600:]}")
        elif code == 0 or (code == 2 and "steps are done" in line):
            return True
        elif (code == -signal.SIGKILL and "controller" in self._asked) or (
            code == 1 and "stopped by" in line and {"stopped", "hangup"} & self._asked
        ):
            return False  # to be resumed
        elif code in (1, 2) and line.startswith("planaria: ") and self._explained(line):
            self.seen.refusals.append(line.removeprefix("planaria: "))
        else:
            self.seen.wrong.append(f"exit code {code}, unexplained: {line[-600:] or 'no word'}")
        return False

    def _explained(self, line: str) -> bool:
        """A chain that ends with a checkpoint answers everything; others say what they cannot do.

        A checkpoint of which a bit was turned is named; it is put away, as the line asks for.
        """
        strategy, struck = self.plan["sections"]["recovery"]["strategy"], {f["signal"] for f in self.plan["faults"]}
        named = re.search(r"checkpoints/([^/:]+)/", line)
        if "flip" in struck and named and ("has changed since" in line or "damaged" in line):
            (self.folder / "checkpoints" / named[1]).rename(self.base / f"damaged-{time.time_ns()}-{named[1]}")
            return True
        return ("checkpoint" not in strategy and " cannot, " in line) or (
            "disk_full" in struck and "the last save failed" in line
        )

    def _one_part(self, arguments: list[str]) -> tuple[int, str]:
        """One process from its start to its end: exit code and what it wrote to stderr."""
        self._asked, self._tail.moved = set(), time.monotonic()
        with (self.base / "stdout.txt").open("a") as out, (self.base / "stderr.txt").open("a+") as err:
            said = err.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "planaria", "train", *arguments, "--quiet"],
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
            try:
                self._accompany(process)
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
                self._thaws.clear()
                self._await_workers()
            err.seek(said)
            return code, err.read()

    def _accompany(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._over.is_set():
            self._tail.look()
            now = time.monotonic()
            for thaw in [thaw for thaw in self._thaws if thaw[0] <= now]:
                self._thaws.remove(thaw)
                _signal(thaw[1], signal.SIGCONT, thaw[2])
            if self._blows and self._tail.progress >= self._blows[0]["at"] * self._steps:
                blow = self._blows[0]
                due = blow.setdefault("due", now + blow["delay"])
                if now >= due and self._strike(process.pid, blow):
                    self._blows.pop(0)
                    self.seen.outside[blow["what"]] += 1 + blow["pair"]
            if now - self._tail.moved > self._hang_s:
                evidence(self.base / "hang.txt", self.folder, process.pid)
                raise Hang(f"nothing has got on for {self._hang_s:.0f} s; see {self.base / 'hang.txt'}")
            time.sleep(_LOOK_S)

    def _strike(self, controller: int, blow: Plain) -> bool:
        """Strike from outside; False when nobody is there just now."""
        what, seconds = blow["what"], blow["seconds"]
        if what in ("kill", "stop"):
            victims = self._workers(blow["pick"], 1 + blow["pair"])
            for pid, birth in victims:
                _signal(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP, birth)
                if what == "stop" and seconds is not None:
                    self._thaws.append((time.monotonic() + seconds, pid, birth))
            return len(victims) == 1 + bool(blow["pair"])
        if what == "server":
            server = _server(controller)
            if server is None:
                return False
            _signal(server, signal.SIGKILL if blow["pick"] < 0.5 else signal.SIGSTOP, born(server))
            self._thaws.append((time.monotonic() + seconds, server, born(server)))
            return True
        self._asked.add(what)
        if what == "pause":
            os.kill(controller, signal.SIGSTOP)
            self._thaws.append((time.monotonic() + seconds, controller, None))
        elif what == "stopped":
            stop = signal.SIGTERM if blow["pick"] < 0.5 else signal.SIGINT
            (os.killpg if seconds else os.kill)(controller, stop)
        else:
            os.kill(controller, signal.SIGKILL if what == "controller" else signal.SIGHUP)
        return True

    def _workers(self, pick: float, count: int) -> list[tuple[int, int]]:
        """Process ids and births of so many living workers, spares among them."""
        try:
            known = json.loads((self.folder / "state.json").read_text())["workers"]
        except FileNotFoundError:
            return []
        there = [(w["pid"], w["born"]) for w in known if w["born"] is not None and born(w["pid"]) == w["born"]]
        first = int(pick * len(there))
        return [*there[first:], *there[:first]][:count]

    def _await_workers(self) -> None:
        """No worker may outlive the run's process for long; those that do are counted, and killed."""
        began = time.monotonic()
        while (left := living(self.folder)) and time.monotonic() < began + ORPHANS_S:
            time.sleep(0.1)
        self.seen.slowest_end_s = max(self.seen.slowest_end_s, time.monotonic() - began)
        self.seen.orphans += len(left)
        for pid in left:
            self.seen.wrong.append(f"process {pid} is left {ORPHANS_S:.0f} s after the end: {_proc(pid, 'cmdline')}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# ---- processes


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
    stat = _proc(pid, "stat").rpartition(")")[2].split()
    return int(stat[19]) if stat else None


def _signal(pid: int, number: signal.Signals, birth: int | None) -> None:
    """Unless the process is gone and its number is another's."""
    if birth is None or born(pid) == birth:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _server(controller: int) -> int | None:
    """The fork server of a controller."""
    children = _proc(controller, f"task/{controller}/children").split()
    return next((int(pid) for pid in children if _proc(int(pid), "comm").strip() == "planaria births"), None)


def _proc(pid: int, name: str) -> str:
    try:
        return (Path("/proc") / str(pid) / name).read_text().replace("\0", " ")
    except OSError:
        return ""


def evidence(path: Path, folder: Path, controller: int) -> None:
    """Write down what can be seen of a run that hangs: its last events, and where its processes are."""
    said = [f"controller {controller}\n"]
    for pid in [controller, *sorted(living(folder))]:
        status = [line for line in _proc(pid, "status").splitlines() if line.startswith(("State", "Threads", "PPid"))]
        said.append(f"{pid}: {_proc(pid, 'cmdline')[:90]} {status} wchan {_proc(pid, 'wchan')}\n")
        for task in sorted((Path("/proc") / str(pid) / "task").glob("*")):
            said.append(f"   {task.name} {_proc(pid, f'task/{task.name}/wchan')}\n")
    with contextlib.suppress(OSError):
        said += [line[:600] + "\n" for line in (folder / "events.jsonl").read_text().splitlines()[-80:]]
        said.append((folder / "state.json").read_text())
    path.write_text("".join(said))


def carry_out(
    folder: Path, plan: Plain, data: Any, hang_s: float, over: threading.Event
) -> tuple[Run, str, float] | None:
    """Make the run of a plan in ``folder``, from nothing: how it ended, and the seconds that it took.

    None when the campaign ended before it.
    """
    from planaria import recipe
    from planaria.chaos.trace import Trace, write
    from planaria.config import RunConfig

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(Trace.model_validate({"faults": tuple(plan["faults"])}), folder / "faults.json")
    sections = {**plan["sections"], "data": data, "chaos": {"trace": str(folder / "faults.json")}}
    config = RunConfig.model_validate({"name": "run", "out": str(folder / "runs"), **sections})
    (folder / "run.toml").write_text(recipe.dump(config))
    run, began = Run(folder, plan, folder / "run.toml", hang_s, over), time.monotonic()
    outcome = run.live()
    return None if outcome == "interrupted" else (run, outcome, time.monotonic() - began)
