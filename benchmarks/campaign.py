"""A thousand random faults over all strategies and exchanges: no hangs, no sample lost or used twice.

Many small runs of `planaria train` are drawn from the seed: recovery strategy or exchange, routing, options, and a
trace of faults of all kinds at all moments, alone, in pairs, and at donors. Further faults hit workers and controllers
from outside; after a controller's end the run is resumed. Each run is judged by its log, with planaria's ledger and an
independent one (`Ledger`): every sample is used exactly once; it ended, and refusals are one line that the faults
explain; no process is left after 15 s; no traceback, no partial file; its checkpoints are readable and finite.

A campaign is kept in runs/benchmarks/campaign/seed-N. The same command continues it; the table counts all results so
far; failed runs are kept.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign_runs import SPECIES, Plain, Run, carry_out, draw
from benchmarks.harness import ROOT, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, start, write
from planaria.common.errors import UserError
from planaria.control.log.reader import read_run
from planaria.control.replay import replay
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.checkpoint.memory_folder import MemoryFolder
from planaria.runtime.checkpoint.store import CheckpointStore

Fact = dict[str, Any]


@dataclass
class Replica:
    first: int  # steps before this part of the log
    blocks: list[int] = field(default_factory=list)  # committed since, in order
    generation: int = -1
    holders: dict[int, str] = field(default_factory=dict)
    block: int | None = None  # under way
    ready: set[str] = field(default_factory=set)
    saved: int | None = None  # its steps at the last save, for sealing
    written: set[int] = field(default_factory=set)
    recalled: int = -1  # step of the in-memory snapshot at the start of this part of the log
    saves: Fact | None = None  # the order to save

    @property
    def step(self) -> int:
        return self.first + len(self.blocks)


class Ledger:
    """A second ledger, to check planaria's: was every sample of the final history used exactly once?

    It shares no code with planaria. It folds the facts of a log and follows what each worker *has*: how many of its
    replica's steps its state comprises. ``problems`` describes every violation.
    """

    def __init__(self, log: list[Fact]) -> None:
        self.problems, self.used = list[str](), set[int]()
        self.lost = self.repeated = self.total = 0
        self._history = list[int]()  # of a run of one replica: the block of each step that was not undone
        self._sealed: dict[str, list[tuple[set[int], int, dict[int, int]]]] = {}  # folder → blocks, their size, steps
        large = {"run_started": self._begin, "form": self._form, "commit": self._commit, "seal": self._seal}
        for f in log:
            (self._report if "worker" in f else large.get(f["kind"], self._decision))(f)

    def _begin(self, f: Fact) -> None:
        each, first, stands = f["samples_per_step"], f["first_step"], f["positions"]
        before = first * each if f["first_sample"] is None else f["first_sample"]
        self._size = each // f["replicas"]
        self.total = (before + (f["steps"] - first) * each) // self._size
        self.used = {*range(before // self._size if f["first_block"] is None else f["first_block"]), *f["blocks_ahead"]}
        self._has = dict[str, int]()  # worker → steps that its state comprises
        self._passed = dict[str, set[int]]()  # worker → steps of which it may remember its state
        self._copied = dict[str, object]()  # worker → the order to save for which it writes a copy
        self._coming = dict[str, tuple[int, int]]()  # worker → generation and steps of the state that it receives
        self._load, self._durable, self._last = (
            set(f["checkpoint_of_stage"].values()),
            dict[str, dict[int, int]](),
            set[int](),
        )
        places = range(max(f["replicas"], len(f["nodes_by_replica"])))
        self.replicas = {r: Replica(stands.get(str(r), {"step": first})["step"]) for r in places}
        if f.get("snapshot_step", -1) >= 0:
            self._begin_from_memory(f)
            return
        self._history = self._history[:first]
        alike = (
            used == self.used and all(self.replicas[r].first == step for r, step in steps.items())
            if size == self._size
            else len(used) * size == len(self.used) * self._size  # another number of replicas takes up
            for used, size, steps in self._sealed.get(max(self._load, default=""), [])
        )
        if (self.used or first) and not any(alike):
            self.problems.append(f"taken up at step {first} with samples that are not those of {sorted(self._load)}")

    def _begin_from_memory(self, f: Fact) -> None:
        """Check that the snapshot's step is in the history; a rollback may lead to the checkpoint before it."""
        first, before = f["first_step"], f["durable_step"]
        if len(self._history) < first or self.used != {*self._history[:first]}:
            self.problems.append(f"taken up from memory at step {first}; the history has {len(self._history)} steps")
            self._history += [-1] * (first - len(self._history))
        self._history = self._history[:first]
        self.replicas[0] = Replica(before, self._history[before:], recalled=f["snapshot_step"])

    def _form(self, f: Fact) -> None:
        r, step, generation = self.replicas[f["replica"]], f["step"], f["generation"]
        for m in f["members"]:
            if (has := self._from(f, m["worker"], m["source"])) != step:
                self.problems.append(f"generation {generation}: node {m['node']} has {has} steps, not {step}")
            self._coming[m["worker"]] = generation, step
            self._passed[m["worker"]] = {known for known in self._passed.get(m["worker"], ()) if known <= step}
        if len(self.replicas) == 1:
            self._history = self._history[:step]
        if not r.first <= step <= r.step:
            self.problems.append(f"generation {generation}: step {step} is not one of {r.first} to {r.step}")
        r.blocks, undone = r.blocks[: max(0, step - r.first)], r.blocks[max(0, step - r.first) :]
        self.used -= set(undone)
        for other in self.replicas.values() if undone else ():  # a checkpoint under way had some of it
            other.saved = None
        r.generation, r.holders, r.block = generation, {m["node"]: m["worker"] for m in f["members"]}, None

    def _from(self, f: Fact, worker: str, source: Fact) -> int | None:
        """Return the steps in a state from this source, or None if there is none."""
        r, origin = self.replicas[f["replica"]], source["origin"]
        if origin in ("keep", "handover"):
            return self._has.get(source.get("worker", worker))
        if origin in ("fresh", "load"):
            begun = r.first if origin == "fresh" or source["folder"] in self._load else -1
            return self._durable.get(source.get("folder", ""), {}).get(f["replica"], begun)
        if origin == "recall":  # what a worker remembers, or a file that another has left
            there = {r.recalled} if source.get("file") else self._passed.get(worker, ())
            return source["step"] if source["step"] in there else None
        others = {n: w for q in self.replicas.values() if q is not r for n, w in q.holders.items()}
        own = {m["node"]: m["source"]["origin"] for m in f["members"]}
        given = [own.get(n, others.get(n) in self._has) for n in source["donors"]]
        ill = ("rebuild", False) if source["by"] != "peer" else (False,)  # nodes of one stage may pass a state on
        return None if any(one in ill for one in given) else f["step"]

    def _report(self, f: Fact) -> None:
        worker, has = f["worker"], self._has.get(f["worker"])
        of = (r for r in self.replicas.values() if worker in r.holders.values() and r.generation == f.get("generation"))
        r = next(of, None)
        match f["kind"]:
            case "worker_joined" | "worker_lost" | "worker_failed":
                self._has.pop(worker, None)
                self._passed.pop(worker, None)
                self._copied.pop(worker, None)
            case "linked" if r and self._coming[worker][0] == r.generation:
                self._has[worker] = self._coming[worker][1]
                self._passed.setdefault(worker, set()).add(self._has[worker])
            case "stage_ready" if r and r.step == f["step"]:
                r.ready.add(worker)
            case "stage_committed" if r and r.step - 1 == f["step"] == has:
                self._has[worker] += 1
                self._passed[worker].add(self._has[worker])
            case "stage_copied" if r and r.saved is not None and r.saved == has:
                self._copied[worker] = r.saves
            case "stage_saved" if worker in self._copied:  # a worker at the same stage
                save = self._copied.pop(worker)
                for other in self.replicas.values():
                    other.written |= {f["stage"]} if other.saves is save and f["bytes"] else set()
            case "stage_saved" if r and r.saved is not None and r.saved == has and f["bytes"]:
                r.written.add(f["stage"])
            case "save_failed" if worker in self._copied:
                del self._copied[worker]
            case "save_failed" if worker == "controller":  # sealing failed
                self._sealed[self._newest].pop()
                self._last, self._durable = self._before

    def _decision(self, f: Fact) -> None:
        r = self.replicas[f.get("replica", 0)]
        match f["kind"]:
            case "run_step":
                r.block, r.ready = f["block"] if f["mode"] == "train" else None, set()
            case "save":
                r.saved, r.written, r.saves = r.step, set(), f
            case "adopt" | "disband":  # its states are void; committed samples stay used
                self._has = {worker: has for worker, has in self._has.items() if worker not in r.holders.values()}
                r.holders = {} if f["kind"] == "disband" else r.holders
            case "finish" if f["outcome"] == "finished":
                missing = set(range(self.total)) - self.used
                self.lost += len(missing)
                self.problems += [f"blocks {sorted(missing)} are not used"] if missing else []
                self.problems += [] if self._last == self.used else ["the last checkpoint is not of the end"]

    def _commit(self, f: Fact) -> None:
        r, step = self.replicas[f["replica"]], f["step"]
        unfit = [w for w in r.holders.values() if w not in r.ready or self._has.get(w) != step]
        if r.block is None or step != r.step or f["generation"] != r.generation or unfit:
            self.problems.append(f"replica {f['replica']} commits step {step} without {unfit or 'one under way'}")
        block, r.block = -1 if r.block is None else r.block, None
        if block in self.used:
            self.repeated += 1
            self.problems.append(f"block {block} is used again, in step {step} of replica {f['replica']}")
        r.blocks.append(block)
        self._history += [block] if len(self.replicas) == 1 else []
        self.used.add(block)

    def _seal(self, f: Fact) -> None:
        steps, held = {int(r): s["step"] for r, s in f["positions"].items()} or {0: f["step"]}, set(self.used)
        for r, step in ((self.replicas[number], step) for number, step in steps.items()):
            if r.saved != step or not set(f["stages"]) <= r.written:
                self.problems.append(f"{f['folder']}: stages {sorted(r.written)} of step {r.saved} saved, not {step}")
            held -= set(r.blocks[step - r.first :])
        if held != {*range(f["first_block"]), *f["blocks_ahead"]}:
            self.problems.append(f"{f['folder']}: names other samples than its writers had used")
        self._newest, self._before = f["folder"], (self._last, self._durable)
        self._sealed.setdefault(f["folder"], []).append((held, self._size, steps))
        self._last, self._durable = held, self._durable if f["partial"] else {f["folder"]: steps}


def validate(run: Run, outcome: str, seconds: float) -> Plain:
    """Judge a finished run; return its verdict for JSON."""
    seen, folder = run.seen, run.folder
    log = facts(folder) if (folder / "events.jsonl").exists() else []
    ledger = Ledger(log)
    injected = Counter(f"{f['signal']} {f['moment']}" for f in log if f["kind"] == "fault_injected")
    flipped = any(f["kind"] == "fault_injected" and f["signal"] == "flip" for f in log)
    seen.wrong += [*(f"second ledger: {problem}" for problem in ledger.problems), *leftovers(run, outcome, flipped)]
    seen.wrong += [f"ledger or replay: {problem}" for problem in first_opinion(folder)]
    if outcome == "finished" and len(ledger.used) < ledger.total:
        seen.wrong.append(f"finished with {len(ledger.used)} of {ledger.total} blocks")
    if not seen.wrong:
        for heavy in ("checkpoints", "tensorboard", "model"):
            shutil.rmtree(folder / heavy, ignore_errors=True)
        (folder / "report.html").unlink(missing_ok=True)
    return {
        "number": run.plan["number"],
        "species": run.plan["species"],
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "parts": seen.parts,
        "faults": dict(sorted(injected.items())),
        "outside": dict(sorted(seen.outside.items())),
        "from_memory": sum(f["kind"] == "run_started" and f.get("snapshot_step", -1) >= 0 for f in log),
        "formed": dict(Counter(f["outcome"] for f in log if f["kind"] == "form")),
        "deaths": dict(Counter(f["cause"] for f in log if f["kind"] == "worker_lost")),
        "refusals": seen.refusals,
        "blocks": len(ledger.used),
        "lost": ledger.lost,
        "repeated": ledger.repeated,
        "orphans": seen.orphans,
        "slowest_end_s": round(seen.slowest_end_s, 2),
        "wrong": seen.wrong,
    }


def first_opinion(folder: Path) -> list[str]:
    try:
        record = read_run(folder)
        return [*prove_exactly_once(record), *replay(fact for _, fact in record.history).problems]
    except (UserError, ValueError) as error:
        return [str(error)]


def leftovers(run: Run, outcome: str, flipped: bool) -> list[str]:
    """Return leftovers of a finished run: tracebacks, partial files, unreadable checkpoints."""
    folder = run.folder
    logs = [log for log in folder.glob("workers/*.log") if "Traceback" in log.read_text(errors="replace")]
    found = [f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs]
    if outcome != "finished" or run.seen.killed_last:  # no process was left to clean up
        return found
    if (memory := MemoryFolder(folder).folder).exists():
        found.append(f"{memory}: snapshots are left in memory")
    halves = [
        p for p in folder.rglob("*") if p.name.startswith(".") or "unfinished" in p.name or p.name == "address.json"
    ]
    found += [f"{path.relative_to(folder)} is left" for path in halves]
    saved = CheckpointStore(folder / "checkpoints").list()
    for one in saved:
        try:
            weights = load_model(one).global_state() if one.whole else {}
            found += [f"{one.folder.name}: {n} is not finite" for n, w in weights.items() if not w.isfinite().all()]
        except UserError as error:  # a flipped bit is detected
            found += [] if flipped else [str(error)]
    return [*found, *([] if saved and saved[-1].whole else ["no complete checkpoint of the end"])]


def facts(folder: Path) -> list[Fact]:
    """Return the facts of a run's log, segments first, without an incomplete last line.

    The plain copy of a segment that is being compressed is complete.
    """
    parts = {p.name.removesuffix(".gz"): p for p in sorted(folder.glob("segments/events-*.jsonl*"), reverse=True)}
    raw = b"".join(
        gzip.decompress(part.read_bytes()) if part.suffix == ".gz" else part.read_bytes()
        for _, part in sorted(parts.items())
    )
    lines = map(json.loads, (raw + (folder / "events.jsonl").read_bytes()).split(b"\n")[:-1])
    return [line.get("event") or line["decision"] for line in lines]


NAME = "campaign"


class Campaign:
    """One seed's runs."""

    def __init__(self, args: Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self._next, self._drawing = 0, threading.Lock()
        self.over = threading.Event()
        self.text = folder / "lines.txt"
        write(self.text, "".join(f"line {n} of many; its square is {n * n}\n" for n in range(1000)))

    def plan(self, number: int) -> Plain:
        args = self.args
        return draw(args.seed, number, args.faults_a_run, args.only or SPECIES)

    def verdict(self, number: int) -> Plain | None:
        path = self.folder / f"run-{number:04d}" / "verdict.json"
        verdict: Plain | None = json.loads(path.read_text()) if path.exists() else None
        return verdict if verdict is not None and verdict["plan"] == digest(self.plan(number)) else None

    def weigh_members(self) -> list[Plain]:
        numbers = sorted(int(path.parent.name[4:]) for path in self.folder.glob("run-*/verdict.json"))
        return [verdict for number in numbers if (verdict := self.verdict(number)) is not None]

    def injected(self) -> int:
        return sum(map(faults_of, self.weigh_members()))

    def sit(self) -> float:
        """Make runs until there are enough faults or the time is over; return the seconds."""
        began = time.monotonic()
        with ThreadPoolExecutor(self.args.runs_at_a_time) as pool:
            sitting = [pool.submit(self._work, began) for _ in range(self.args.runs_at_a_time)]
            try:
                for one in sitting:
                    one.result()
            finally:
                self.over.set()  # Ctrl-C: runs under way end and are repeated next time
        return time.monotonic() - began

    def _work(self, began: float) -> None:
        while not self.over.is_set() and time.monotonic() - began < 60 * self.args.minutes:
            number = self._draw_number()
            if number is None:
                return
            if (verdict := self._make(number)) is not None:
                print(summary_line(verdict), flush=True)

    def _draw_number(self) -> int | None:
        with self._drawing:
            if self.injected() >= self.args.faults:
                return None
            while self.verdict(self._next) is not None:
                self._next += 1
            self._next += 1
            return self._next - 1

    def _make(self, number: int) -> Plain | None:
        plan, folder = self.plan(number), self.folder / f"run-{number:04d}"
        data = {"source": str(self.text), "tokenizer": "bytes", "cache": str(self.folder / "cache")}
        made = carry_out(folder, plan, data, self.args.hang_s, self.over)
        if made is None:
            return None
        verdict = validate(*made) | {"plan": digest(plan)}
        write(folder / "verdict.json", json.dumps(verdict, indent=1) + "\n")
        return verdict


def digest(plan: Plain) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def faults_of(verdict: Plain) -> int:
    return sum(Counter[str](verdict["faults"]).values()) + sum(Counter[str](verdict["outside"]).values())


def summary_line(verdict: Plain) -> str:
    line = (
        f"run {verdict['number']}, {verdict['species']}: {verdict['outcome']}, {faults_of(verdict)} faults, "
        f"{verdict['parts']} parts, {len(verdict['refusals'])} refusals, {verdict['blocks']} blocks, "
        f"{verdict['seconds']:.0f} s"
    )
    return "\n   WRONG: ".join([line, *verdict["wrong"]])


def summed(verdicts: Sequence[Plain], key: str) -> Counter[str]:
    return sum((Counter(verdict[key]) for verdict in verdicts), Counter())


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


def rows_of(args: Namespace, verdicts: Sequence[Plain], minutes: float) -> list[Row]:
    total, blocks = sum(map(faults_of, verdicts)), sum(verdict["blocks"] for verdict in verdicts)
    met = len({verdict["species"] for verdict in verdicts})
    unexplained = [verdict for verdict in verdicts if verdict["wrong"]]

    def number(key: str) -> list[float]:
        return [float(sum(verdict[key] for verdict in verdicts))]

    hangs = float(sum(verdict["outcome"] == "hung" for verdict in verdicts))
    return [
        Row("faults injected", [total], f"{len(verdicts)} runs", Claim(low=args.faults)),
        Row("strategies and exchanges met", [met], f"{len(set(SPECIES))} there are", None),
        Row("hangs", [hangs], "0", Claim(high=0)),
        Row("blocks of samples lost", number("lost"), f"0 of {blocks}", Claim(high=0)),
        Row("blocks used twice", number("repeated"), f"0 of {blocks}", Claim(high=0)),
        Row("processes left 15 s after an end", number("orphans"), "0", Claim(high=0)),
        Row("runs of which anything is wrong", [len(unexplained)], "0, unexplained ends among them", Claim(high=0)),
        Row("longest until no process was left, s", [v["slowest_end_s"] for v in verdicts], "0", None, {}, "worst"),
        Row("minutes in all", [minutes], f"{args.runs_at_a_time} runs at a time", Claim(high=90.0)),
    ]


def notes_of(verdicts: Sequence[Plain], folder: Path) -> list[str]:
    by_moment: dict[str, Counter[str]] = {}
    for what, count in summed(verdicts, "faults").items():
        signal, _, moment = what.partition(" ")
        by_moment.setdefault(signal, Counter())[moment] += count
    refusals = Counter(reason.replace("\n", " ")[:160] for verdict in verdicts for reason in verdict["refusals"])
    return [
        *(f"{signal}: {listed(moments)}" for signal, moments in sorted(by_moment.items())),
        f"from outside: {listed(summed(verdicts, 'outside'))}",
        f"formations: {listed(summed(verdicts, 'formed'))}",
        f"deaths by: {listed(summed(verdicts, 'deaths'))}",
        f"runs: {listed(Counter(verdict['species'] for verdict in verdicts))}",
        f"processes of controllers: {sum(verdict['parts'] for verdict in verdicts)}, "
        f"{sum(verdict.get('from_memory', 0) for verdict in verdicts)} of them resumed from memory",
        f"refusals, each with its reason: {sum(refusals.values())}",
        *(f"   {count} × {reason}" for reason, count in refusals.most_common(12)),
        *(f"WRONG in run {verdict['number']}: {what[:300]}" for verdict in verdicts for what in verdict["wrong"]),
        f"kept in {folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name}",
    ]


@benchmark(
    NAME,
    seed=1,
    faults=Flag(1000, "to inject, earlier sessions included"),
    minutes=Flag(90.0, "of this session, without runs under way"),
    runs_at_a_time=2,
    faults_a_run=Flag(28, "approximate number per trace"),
    hang_s=Flag(240.0, "seconds without progress after which a run hangs"),
    only=Flag([], "a strategy or exchange", nargs="*", choices=sorted(set(SPECIES)), metavar="RUN"),
    folder=Flag(RUNS / NAME, "where campaigns are kept"),
)
def main(args: Namespace) -> Measurement:
    campaign = Campaign(args, (args.folder / f"seed-{args.seed}").absolute())
    sittings = campaign.folder / "minutes.json"
    before = json.loads(sittings.read_text()) if sittings.exists() else []
    before.append(campaign.sit() / 60)
    write(sittings, json.dumps(before))
    verdicts = campaign.weigh_members()
    return Result(rows_of(args, verdicts, sum(before)), notes_of(verdicts, campaign.folder))


if __name__ == "__main__":
    start(main)
