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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign_plan import Plain
from benchmarks.campaign_sight import Tail, born, evidence, fork_server, living, proc, send

ORPHANS_S = 15.0
"""how long after the end of a run's process its workers may still be there"""
RESUMES = 25
_LOOK_S, _CLOSE_S = 0.05, 0.002
"""between two looks at a run; where the next blow waits for a line of the log"""


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
    killed_last: bool = False
    """was the controller killed in the part before? Then it may have been done, but for its goodbye"""


class Run:
    """A run with a plan, in a folder of its own."""

    def __init__(self, folder: Path, plan: Plain, recipe: Path, hang_s: float, over: threading.Event) -> None:
        """``over`` is set when the campaign is to end at once."""
        self.base, self.folder, self.plan, self._recipe = folder, folder / "runs" / "run", plan, recipe
        self.seen, self._hang_s, self._over = Seen(), hang_s, over
        self._blows, self._steps = [dict(blow) for blow in plan["outside"]], plan["sections"]["train"]["steps"]
        self._faults = list(plan["faults"])
        self._tail = Tail(self.folder / "events.jsonl")
        self._thaws: list[tuple[float, int, int | None]] = []
        self._asked: Counter[str] = Counter()
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
                arguments = ["--resume", str(self.folder), "--chaos.trace", str(self._trace())]
        self.seen.wrong.append(f"not over after {RESUMES} resumptions")
        return "refused"

    def _trace(self) -> Path:
        """A trace of what has not struck yet: a bit that turns in every repeated step would let none of them pass."""
        self._tail.look()
        self._faults = [fault for number, fault in enumerate(self._faults) if number not in self._tail.struck]
        self._tail.struck.clear()
        return trace_of(self._faults, self.base / f"faults-{self.seen.parts}.json")

    def _is_over(self, code: int, errors: str) -> bool:
        """Is it, by an exit code and one line that what was done to it explains?"""
        line, stops = errors.strip(), self._asked["stopped"] + self._asked["hangup"]
        if "Traceback" in errors or "Error:" in errors or (code >= 0 and line.count("\n")):
            self.seen.wrong.append(f"exit code {code} with: {line[-600:]}")
        elif code == 0 or (code == 2 and "steps are done" in line and self.seen.killed_last):
            self.seen.killed_last = code != 0
            return True
        elif (code == -signal.SIGKILL and self._asked["controller"]) or (
            (code == 1 and "stopped by" in line and stops) or (code == 130 and stops > 1)
        ):
            pass  # to be resumed
        elif code in (1, 2) and line.startswith("planaria: ") and self._explained(line):
            self.seen.refusals.append(line.removeprefix("planaria: ").replace(f"{self.folder}/", ""))
        else:
            self.seen.wrong.append(f"exit code {code}, unexplained: {line[-600:] or 'no word'}")
        self.seen.killed_last = code == -signal.SIGKILL
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
        self._asked, self._tail.moved = Counter(), time.monotonic()
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
                send(thaw[1], signal.SIGCONT, thaw[2])
            if self._blows and self._tail.progress >= self._blows[0]["at"] * self._steps:
                blow = self._blows[0]
                due = blow.setdefault("due", now + blow["delay"])
                waits = now < due or (blow["upon"] and blow["upon"] not in self._tail.kinds)
                if not waits and self._strike(process.pid, blow):
                    self._struck(self._blows.pop(0))
            if now - self._tail.moved > self._hang_s:
                evidence(self.base / "hang.txt", self.folder, process.pid)
                raise Hang(f"nothing has got on for {self._hang_s:.0f} s; see {self.base / 'hang.txt'}")
            time.sleep(_CLOSE_S if self._blows and "due" in self._blows[0] else _LOOK_S)

    def _struck(self, blow: Plain) -> None:
        self.seen.outside[blow["what"]] += 1
        if blow["pair"] and blow["what"] == "kill":
            self.seen.outside["kill"] += 1
        elif blow["pair"]:  # the next controller too, as it starts
            again = {"at": 0.0, "delay": 12 * blow["pick"], "upon": None, "pair": False}
            self._blows.insert(0, {key: value for key, value in (blow | again).items() if key != "due"})

    def _strike(self, controller: int, blow: Plain) -> bool:
        """Strike from outside; False when nobody is there just now."""
        what, seconds = blow["what"], blow["seconds"]
        if what in ("kill", "stop"):
            victims = self._workers(blow["pick"], 1 + blow["pair"])
            for pid, birth in victims:
                send(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP, birth)
                if what == "stop" and seconds is not None:
                    self._thaws.append((time.monotonic() + seconds, pid, birth))
            return len(victims) == 1 + bool(blow["pair"])
        if what == "server":
            server = fork_server(controller)
            if server is None:
                return False
            send(server, signal.SIGKILL if blow["pick"] < 0.5 else signal.SIGSTOP, born(server))
            self._thaws.append((time.monotonic() + seconds, server, born(server)))
            return True
        self._asked[what] += 1
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
            self.seen.wrong.append(f"process {pid} is left {ORPHANS_S:.0f} s after the end: {proc(pid, 'cmdline')}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def trace_of(faults: Sequence[Plain], path: Path) -> Path:
    """The file of a trace with these faults."""
    from planaria.faults.trace import Trace, write

    write(Trace.model_validate({"faults": tuple(faults)}), path)
    return path


def carry_out(
    folder: Path, plan: Plain, data: Any, hang_s: float, over: threading.Event
) -> tuple[Run, str, float] | None:
    """Make the run of a plan in ``folder``, from nothing: how it ended, and the seconds that it took.

    None when the campaign ended before it.
    """
    from planaria.config import recipe
    from planaria.config.schema import RunConfig

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trace = trace_of(plan["faults"], folder / "faults-0.json")
    sections = {**plan["sections"], "data": data, "chaos": {"trace": str(trace)}}
    config = RunConfig.model_validate({"name": "run", "out": str(folder / "runs"), **sections})
    (folder / "run.toml").write_text(recipe.dump(config))
    run, began = Run(folder, plan, folder / "run.toml", hang_s, over), time.monotonic()
    outcome = run.live()
    return None if outcome == "interrupted" else (run, outcome, time.monotonic() - began)
