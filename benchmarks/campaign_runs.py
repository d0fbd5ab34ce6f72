"""Runs of the campaign: the faults drawn for each, what its processes did, and the evidence that it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from planaria.config.schema import RunConfig
from planaria.faults.trace import Trace, write
from planaria.recovery import RECOVERIES

Plain = dict[str, Any]

CHAINS = (
    "checkfree, checkpoint",
    "checkfree_plus, checkpoint",
    "echo, checkpoint",
    "redundant, checkpoint",
    "checkpoint",
    "copy, checkpoint",
    "checkfree_plus, echo, checkpoint",
    "redundant, checkfree, checkpoint",
    "uniform, checkpoint",
    "identity, checkpoint",
    "random, checkpoint",
    "snapshot, checkpoint",
    "whole_copies, checkpoint",
    "snapshot, checkfree, checkpoint",
    "checkfree",
    "checkfree_plus",
    "echo",
    "redundant",
)
"""the last four refuse some faults, save their state, and are resumed"""
EXCHANGES: dict[str, Plain] = {
    "allreduce": {},
    "noloco": {"every": 3},
    "diloco": {"every": 4, "alpha": 0.3, "momentum": "heavy_ball"},
    "streaming_diloco": {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.3, "momentum": "heavy_ball"},
    "pair_mean": {"every": 3},
    "gasloc": {"every": 3, "alpha": 0.5, "beta": 0.7, "gamma": 0.7},
    "local": {},
}
SPECIES = [*CHAINS, *EXCHANGES, *EXCHANGES]
"""kinds of runs: recovery strategies of one replica, exchanges of several (twice each)"""
REMEMBERING = [chain for chain in CHAINS if {"snapshot", "whole_copies"} & {*chain.split(", ")}]
"""chains whose snapshots may survive in the machine's memory, where a resumed run looks first"""

KINDS = {
    "kill": 40, "stop": 10, "stuck": 8, "slow": 6, "delay": 6, "reset": 9, "cut": 6, "disk_full": 3, "disk_slow": 4,
    "flip": 2, "corrupt_update": 4,
}  # fmt: skip
"""faults of traces with their weights"""
OUTSIDE = {"kill": 30, "stop": 20, "controller": 20, "stopped": 12, "pause": 10, "hangup": 6, "server": 6}
"""faults from outside: at a worker by process id; at the controller (SIGKILL, SIGTERM or SIGINT, a freeze of 1 to 5 s,
SIGHUP); at the fork server. A run whose controller ended is resumed"""
_MOMENTS = {
    "any": 3, "forward": 3, "backward": 3, "commit": 3, "transfer": 4, "save": 2, "settle": 3, "link": 2,
}  # fmt: skip
_WITHOUT_ROUNDS = ("allreduce", "local")


def draw(seed: int, number: int, faults: int = 28, species_of: Collection[str] = SPECIES) -> Plain:
    """Draw the plan of one run: recipe sections, about ``faults`` faults of a trace, and faults from outside."""
    order = list(species_of)
    random.Random(f"campaign {seed} order").shuffle(order)
    rng = random.Random(f"campaign {seed} run {number}")
    species = order[number % len(order)]
    sections = _replicas(rng, species, faults) if species in EXCHANGES else _one(rng, species, faults)
    drawn = _faults(rng, sections, faults)
    wanted = rng.randint(max(1, faults // 8), max(1, faults // 4))
    outside = sorted((_outside(rng) for _ in range(wanted)), key=lambda blow: blow["at"])
    return {"number": number, "species": species, "sections": sections, "faults": drawn, "outside": outside}


def _one(rng: random.Random, chain: str, faults: int) -> Plain:
    swapped = "checkfree_plus" in chain
    offered: dict[str, Any] = {
        "meanwhile": "skip" if rng.random() < 0.25 else "wait",
        "moments": rng.choice(("fresh", "mean", "copy")),
        "bits": rng.choice((2, 4, 8)),
        "every": rng.randint(1, 4),
        "distance": rng.choice((1, 1, 2)),
        "mirror_every": rng.choice((1, 1, 3)),
        "mirror_moments": rng.random() < 0.5,
        "forward": rng.random() < 0.5,
    }
    if chain in REMEMBERING:
        every = rng.randint(2, 5)
        offered |= {"meanwhile": "wait", "every": every, "slices": rng.randint(1, every), "persist": rng.random() < 0.8}
        offered |= {"tolerate": rng.choice((1, 1, 2)), "code": rng.choice(("auto", "local"))}
    meanwhile = offered.pop("meanwhile")
    if "checkfree" not in chain:
        offered.pop("moments")
    chosen = [name.strip() for name in chain.split(",")]
    recovery = {"strategy": chain, "meanwhile": meanwhile, "options": RECOVERIES.declared(chosen, offered)}
    kind = "swapped" if swapped else rng.choice(("full", "full", "skipping"))
    routing = {"kind": kind, **({"skip": 0.25} if kind == "skipping" else {})}
    return {
        **_common(rng, 4 if swapped else rng.randint(3, 4), 2 * faults + rng.randint(4, 24)),
        "recovery": recovery,
        "routing": routing,
    }


def _replicas(rng: random.Random, kind: str, faults: int) -> Plain:
    replicas = rng.randint(2, 3)
    options = dict(EXCHANGES[kind])
    exchange = {"replicas": replicas, "kind": kind, "patience_s": rng.choice((0.5, 2.0)), "options": options}
    if kind not in _WITHOUT_ROUNDS:
        options["bits"] = rng.choice((4, 8, 16, 32))
    if kind in ("noloco", "pair_mean", "gasloc"):
        options |= {"prefetch": rng.random() < 0.5, "group": rng.randint(2, replicas)}
    stages = 2 if kind == "streaming_diloco" else rng.randint(1, 2)
    sections = _common(rng, stages, 5 * faults // (replicas * (stages + 1)) + 12)
    if kind == "streaming_diloco":
        sections["model"] = {**sections["model"], "layers": 2 * stages}
    strategy = rng.choice(("checkpoint", "checkfree, checkpoint"))
    return {**sections, "exchange": exchange, "recovery": {"strategy": strategy}}


def _common(rng: random.Random, stages: int, steps: int) -> Plain:
    return {
        "seed": rng.randrange(10**6),
        "model": {"vocab": 260, "dim": 32, "layers": stages, "heads": 2, "hidden": 64, "context": 32},
        "pipeline": {
            "stages": stages,
            "microbatches": rng.randint(2, 4),
            "microbatch_size": rng.randint(1, 2),
            "order": rng.choice(("1f1b", "1f1b", "gpipe")),
        },
        "optim": {"lr": 3e-3, "schedule": rng.choice(("constant", "cosine")), "warmup": rng.choice((0, 5))},
        "train": {"steps": steps, "eval_every": rng.choice((0, 10)), "eval_microbatches": 2},
        "fleet": {"spares": rng.randint(0, 2), "missed_heartbeats": 12, "timeout_s": 4.0, "disk_timeout_s": 4.0},
        "checkpoint": {"every": rng.randint(3, 15), "keep": rng.randint(1, 3)},
    }


def nodes(sections: Plain) -> int:
    replicas: int = sections.get("exchange", {}).get("replicas", 1)
    stages: int = sections["pipeline"]["stages"]
    return replicas * (stages + 1)


def _faults(rng: random.Random, sections: Plain, count: int) -> list[Plain]:
    """Draw single faults, simultaneous pairs, and faults of donors and receivers during recovery."""
    rounds = sections.get("exchange", {}).get("kind", "allreduce") not in _WITHOUT_ROUNDS
    kinds = {k: w for k, w in KINDS.items() if rounds or k != "corrupt_update"}
    moments = {m: w for m, w in _MOMENTS.items() if rounds or m != "settle"}
    places, steps, found = nodes(sections), sections["train"]["steps"], list[Plain]()
    while len(found) < count and kinds:
        fault: Plain = {"step": rng.randrange(1, steps - 1), "stage": _place(rng, sections, places)}
        fault |= {"signal": _one_of(rng, kinds), "moment": _one_of(rng, moments), "offset": rng.randrange(1000) / 1000}
        found.append(fault | _lasting(rng, fault["signal"]))
        more, others = rng.random(), [place for place in range(places) if place != fault["stage"]]
        if fault["signal"] == "kill" and more < 0.15:
            found.append({**found[-1], "stage": rng.choice(others)})
        elif fault["signal"] == "kill" and more < 0.35 and {"kill", "stop", "stuck"} & kinds.keys():
            signal = rng.choice(sorted({"kill", "stop", "stuck"} & kinds.keys()))
            later = {"step": fault["step"], "stage": rng.choice(others), "moment": rng.choice(("transfer", "link"))}
            found.append({**later, "signal": signal, "offset": 0.0, **_lasting(rng, signal)})
    return sorted(found, key=lambda fault: fault["step"])


def _place(rng: random.Random, sections: Plain, places: int) -> int:
    """Draw a node; mostly middle stages for pure CheckFree, which refuses others."""
    if sections["recovery"]["strategy"] == "checkfree" and rng.random() < 0.9:
        return rng.randrange(2, places - 1)
    return rng.randrange(places)


def _lasting(rng: random.Random, signal: str) -> Plain:
    """Draw a fault's duration and strength; half of stuck and stopped workers never resume."""
    for_ever = rng.random() < 0.5
    match signal:
        case "stop":
            return {} if for_ever else {"resume_after_s": round(rng.uniform(0.2, 5.0), 2)}
        case "stuck":
            return {} if for_ever else {"resume_after_s": round(rng.uniform(0.5, 6.0), 2)}
        case "slow":
            return {"strength": rng.choice((2.0, 5.0, 20.0)), "resume_after_s": round(rng.uniform(0.3, 2.0), 2)}
        case "delay":
            return {"strength": round(rng.uniform(0.02, 0.3), 3), "resume_after_s": round(rng.uniform(0.3, 1.5), 2)}
        case "cut" | "disk_full" | "disk_slow":
            return {"resume_after_s": round(rng.uniform(0.3, 4.0), 2)}
    return {}


def _outside(rng: random.Random) -> Plain:
    """Draw a fault ``at`` a share of the steps plus ``delay`` s, then ``upon`` a line of this kind in the log.

    ``pick`` chooses the victim. A ``pair`` hits two workers, or also the next controller as it starts.
    """
    what = _one_of(rng, OUTSIDE)
    return {
        "at": round(rng.uniform(0.03, 0.95), 3),
        "delay": round(rng.uniform(0.0, 0.5), 3),
        "upon": rng.choice((None, None, "form", "save", "seal", "commit")),
        "what": what,
        "pick": round(rng.random(), 4),
        "pair": what in ("kill", "controller") and rng.random() < 0.25,
        "seconds": round(rng.uniform(1.0, 5.0), 2) if what in ("pause", "server") or rng.random() < 0.6 else None,
    }


def _one_of(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


_PROGRESS = ("commit", "form", "run_started", "seal")  # kinds of log lines that show progress
_KIND = re.compile(r'"kind":"(\w+)"')


class Tail:
    """Reads new lines of a run's event log, also after older segments were moved."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._torn = path, None, ""
        self.progress, self.moved = 0, time.monotonic()
        self.kinds: set[str] = set()  # of the lines new at the last look
        self.injected: set[int] = set()  # numbers of trace faults injected in this process

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
                self.injected.add(json.loads(line)["event"]["number"])

    def _inode(self) -> int:
        return self._path.stat().st_ino


def living(folder: Path) -> set[int]:
    """Return the processes that write to a worker's log of this run."""
    logs, found = str(folder.absolute() / "workers"), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # exited, or another user's
            if (process / "fd" / "1").readlink().is_relative_to(logs):
                found.add(int(process.name))
    return found


def start_ticks(pid: int) -> int | None:
    stat = proc(pid, "stat").rpartition(")")[2].split()
    return int(stat[19]) if stat else None


def send(pid: int, number: signal.Signals, started_ticks: int | None) -> None:
    """Send a signal unless the process has exited and its number was reused."""
    if started_ticks is None or start_ticks(pid) == started_ticks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def fork_server(controller: int) -> int | None:
    children = proc(controller, f"task/{controller}/children").split()
    return next((int(pid) for pid in children if proc(int(pid), "comm").strip() == "planaria forks"), None)


def proc(pid: int, name: str) -> str:
    try:
        return (Path("/proc") / str(pid) / name).read_text().replace("\0", " ")
    except OSError:
        return ""


def evidence(path: Path, folder: Path, controller: int) -> None:
    """Record the last events and the process states of a hanging run."""
    lines = [f"controller {controller}\n"]
    for pid in [controller, *sorted(living(folder))]:
        status = [line for line in proc(pid, "status").splitlines() if line.startswith(("State", "Threads", "PPid"))]
        lines.append(f"{pid}: {proc(pid, 'cmdline')[:90]} {status} wchan {proc(pid, 'wchan')}\n")
        for task in sorted((Path("/proc") / str(pid) / "task").glob("*")):
            lines.append(f"   {task.name} {proc(pid, f'task/{task.name}/wchan')}\n")
    with contextlib.suppress(OSError):
        lines += [line[:600] + "\n" for line in (folder / "events.jsonl").read_text().splitlines()[-80:]]
        lines.append((folder / "state.json").read_text())
    path.write_text("".join(lines))


EXIT_TIMEOUT_S = 15.0  # time limit for workers to exit after the run's process
RESUMES = 25
_LOOK_S, _CLOSE_S = 0.05, 0.002  # polling intervals, normally and while a fault waits for a log line


class Hang(Exception):
    """No progress for too long; evidence is in the run's folder."""


@dataclass
class Seen:
    """Observations of a run."""

    outside: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    orphans: int = 0
    slowest_end_s: float = 0.0
    parts: int = 0
    killed_last: bool = False  # the controller was killed in the part before, possibly after its last step


class Run:
    """A planned run in its own folder."""

    def __init__(self, folder: Path, plan: Plain, recipe: Path, hang_s: float, over: threading.Event) -> None:
        """``over`` is set to end the campaign at once."""
        self.base, self.folder, self.plan, self._recipe = folder, folder / "runs" / "run", plan, recipe
        self.seen, self._hang_s, self._over = Seen(), hang_s, over
        self._blows, self._steps = [dict(blow) for blow in plan["outside"]], plan["sections"]["train"]["steps"]
        self._faults = list(plan["faults"])
        self._tail = Tail(self.folder / "events.jsonl")
        self._thaws: list[tuple[float, int, int | None]] = []
        self._asked: Counter[str] = Counter()  # faults of the current controller

    def live(self) -> str:
        """Start and resume the run; return 'finished', 'refused', 'hung' or, with ``over``, 'interrupted'."""
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
        """Write the trace of faults not yet injected; a repeated bit flip would block every step."""
        self._tail.look()
        self._faults = [fault for number, fault in enumerate(self._faults) if number not in self._tail.injected]
        self._tail.injected.clear()
        return trace_of(self._faults, self.base / f"faults-{self.seen.parts}.json")

    def _is_over(self, code: int, errors: str) -> bool:
        """Return True if the run is over; record exit codes and messages that no fault explains."""
        line, stops = errors.strip(), self._asked["stopped"] + self._asked["hangup"]
        if "Traceback" in errors or "Error:" in errors or (code >= 0 and line.count("\n")):
            self.seen.wrong.append(f"exit code {code} with: {line[-600:]}")
        elif code == 0 or (code == 2 and "steps are done" in line and self.seen.killed_last):
            self.seen.killed_last = code != 0
            return True
        elif (code == -signal.SIGKILL and self._asked["controller"]) or (
            (code == 1 and "stopped by" in line and stops) or (code == 130 and stops > 1)
        ):
            pass  # resumed next
        elif code in (1, 2) and line.startswith("planaria: ") and self._explained(line):
            self.seen.refusals.append(line.removeprefix("planaria: ").replace(f"{self.folder}/", ""))
        else:
            self.seen.wrong.append(f"exit code {code}, unexplained: {line[-600:] or 'no word'}")
        self.seen.killed_last = code == -signal.SIGKILL
        return False

    def _explained(self, line: str) -> bool:
        """Return True if the faults explain a refusal: chains with a checkpoint never refuse, others name the reason.

        A checkpoint with a flipped bit is named and moved away.
        """
        strategy, injected = self.plan["sections"]["recovery"]["strategy"], {f["signal"] for f in self.plan["faults"]}
        named = re.search(r"checkpoints/([^/:]+)/", line)
        if "flip" in injected and named and ("has changed since" in line or "damaged" in line):
            (self.folder / "checkpoints" / named[1]).rename(self.base / f"damaged-{time.time_ns()}-{named[1]}")
            return True
        return ("checkpoint" not in strategy and " cannot rebuild it: " in line) or (
            "disk_full" in injected and "the last save failed" in line
        )

    def _one_part(self, arguments: list[str]) -> tuple[int, str]:
        """Run one process; return its exit code and stderr."""
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
        elif blow["pair"]:  # also the next controller, as it starts
            again = {"at": 0.0, "delay": 12 * blow["pick"], "upon": None, "pair": False}
            self._blows.insert(0, {key: value for key, value in (blow | again).items() if key != "due"})

    def _strike(self, controller: int, blow: Plain) -> bool:
        """Inject a fault from outside; return False without a victim."""
        what, seconds = blow["what"], blow["seconds"]
        if what in ("kill", "stop"):
            victims = self._workers(blow["pick"], 1 + blow["pair"])
            for pid, started_ticks in victims:
                send(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP, started_ticks)
                if what == "stop" and seconds is not None:
                    self._thaws.append((time.monotonic() + seconds, pid, started_ticks))
            return len(victims) == 1 + bool(blow["pair"])
        if what == "server":
            server = fork_server(controller)
            if server is None:
                return False
            send(server, signal.SIGKILL if blow["pick"] < 0.5 else signal.SIGSTOP, start_ticks(server))
            self._thaws.append((time.monotonic() + seconds, server, start_ticks(server)))
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
        """Return process ids and start times of ``count`` living workers, spares included."""
        try:
            known = json.loads((self.folder / "state.json").read_text())["workers"]
        except FileNotFoundError:
            return []
        there = [
            (w["pid"], w["start_ticks"])
            for w in known
            if w["start_ticks"] is not None and start_ticks(w["pid"]) == w["start_ticks"]
        ]
        first = int(pick * len(there))
        return [*there[first:], *there[:first]][:count]

    def _await_workers(self) -> None:
        """Count and kill workers that outlive the run's process."""
        began = time.monotonic()
        while (left := living(self.folder)) and time.monotonic() < began + EXIT_TIMEOUT_S:
            time.sleep(0.1)
        self.seen.slowest_end_s = max(self.seen.slowest_end_s, time.monotonic() - began)
        self.seen.orphans += len(left)
        for pid in left:
            self.seen.wrong.append(
                f"process {pid} is left {EXIT_TIMEOUT_S:.0f} s after the end: {proc(pid, 'cmdline')}"
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def trace_of(faults: Sequence[Plain], path: Path) -> Path:
    write(Trace.model_validate({"faults": tuple(faults)}), path)
    return path


def carry_out(
    folder: Path, plan: Plain, data: Any, hang_s: float, over: threading.Event
) -> tuple[Run, str, float] | None:
    """Run a plan in ``folder``; return the run, its outcome and seconds, or None if the campaign ended first."""
    from planaria.config import recipe

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trace = trace_of(plan["faults"], folder / "faults-0.json")
    sections = {**plan["sections"], "data": data, "chaos": {"trace": str(trace)}}
    config = RunConfig.model_validate({"name": "run", "out": str(folder / "runs"), **sections})
    (folder / "run.toml").write_text(recipe.dump(config))
    run, began = Run(folder, plan, folder / "run.toml", hang_s, over), time.monotonic()
    outcome = run.live()
    return None if outcome == "interrupted" else (run, outcome, time.monotonic() - began)
