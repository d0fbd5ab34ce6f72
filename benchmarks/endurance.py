"""Long and hostile runs: 50,000 steps with 500 kills, and load, stopped controllers, strangers and stuck threads."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.fleet_run import bytes_data, finished, require_finished, small_run
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Result, Row, benchmark, start
from benchmarks.processes import cli, descendants
from planaria.common.errors import RunStopped, UserError
from planaria.config import recipe as recipes
from planaria.config.schema import FleetConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.control.log.state_file import StateFile, read_state
from planaria.control.replay import replay
from planaria.faults.trace import Fault, Trace, write
from planaria.report.run.recoveries import recoveries
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.checkpoint.stage_file import stage_file
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.fleet.joining import read_run_address

STAGES = 3
LONG = 10_000  # steps from which on growth is judged
CONTROLLER_KB, WORKER_KB, LOG_BYTES = 64.0, 256.0, 500.0
WARM = 0.2  # of the run, before growth is looked for
NOT_LOGS = ("checkpoints", "model", "report.html")


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    step: int
    pid: int
    role: str  # controller, worker (of those that the run's state names) or helper (all others below the controller)
    own_kb: float  # anonymous memory, swapped out or not
    descriptors: int
    threads: int


def recipe(args: Namespace, name: str, trace: Path) -> RunConfig:
    """Steps of milliseconds. A lost middle stage is averaged, any other rolls back."""
    return small_run(
        name,
        args.steps,
        STAGES,
        out=str(args.out),
        pipeline={"microbatches": 2},
        data=bytes_data(folder=args.out),
        optim={"lr": 1e-3},
        recovery={"strategy": "checkfree, checkpoint"},
        fleet={"spares": 1, "missed_heartbeats": 40},
        checkpoint={"every": 25},
        chaos={"trace": str(trace)},
    )


def kills(seed: int, steps: int, number: int) -> Trace:
    """Draw one kill in the middle half of each of ``number`` intervals, at a random moment and block stage."""
    rng = random.Random(f"endurance {seed}")
    every = steps / number if number else 0.0
    faults = tuple(
        Fault(
            step=int((place + rng.uniform(0.25, 0.75)) * every),
            stage=rng.randint(1, STAGES),
            moment=rng.choice(("any", "forward", "backward", "commit")),
            offset=rng.random(),
        )
        for place in range(number)
    )
    return Trace(faults=faults)


def trained(args: Namespace) -> tuple[Path, list[Sample], list[tuple[int, int]]]:
    """Train to the end; return the folder, samples of the processes, and (step, bytes of logs)."""
    args.out.mkdir(parents=True, exist_ok=True)
    name = next(made for n in count(1) if not (args.out / (made := f"endurance-{n}")).exists())
    trace, file = args.out / f"{name}.trace.json", args.out / f"{name}.toml"
    write(kills(args.seed, args.steps, args.kills), trace)
    file.write_text(recipes.dump(recipe(args, name, trace)))
    folder, samples, logs = args.out / name, [], []
    with (args.out / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(cli("train", file), stdout=out, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            time.sleep(args.every)
            state = state_of(folder)
            if state is not None:
                samples += looked_at(process.pid, {worker.pid for worker in state.workers}, state.step)
                logs.append((state.step, log_bytes(folder)))
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise RunStopped(f"{folder}: the run ended with exit code {process.returncode}; its output is in {out.name}")
    return folder, samples, [*logs, (args.steps, log_bytes(folder))]


def state_of(folder: Path) -> StateFile | None:
    try:
        state = read_state(folder)
    except UserError:
        return None
    return None if state.phase == "over" or not state.step else state


def looked_at(controller: int, workers: Set[int], step: int) -> Iterator[Sample]:
    """Sample the controller and all its descendants."""
    for pid in descendants(controller):
        role = "controller" if pid == controller else "worker" if pid in workers else "helper"
        try:
            descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "RssAnon" in fields:  # not of one that has just ended
            own = sum(float(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
            yield Sample(step, pid, role, own, descriptors, int(fields["Threads"]))


def log_bytes(folder: Path) -> int:
    """Return the bytes of the run's folder without checkpoints, model and report."""
    found = 0
    for path, folders, names in os.walk(folder):
        top = Path(path) == folder
        folders[:] = [name for name in folders if not (top and name in NOT_LOGS)]
        for name in names:
            if not (top and name in NOT_LOGS):
                try:
                    found += (Path(path) / name).stat().st_size
                except FileNotFoundError:  # compressed meanwhile
                    continue
    return found


def growth(samples: Sequence[Sample]) -> list[float]:
    """Return the growth of memory in KB per 1,000 steps: the common slope of processes that lived half of the run.

    The first fifth of each life is ignored, because young processes and former spares still grow.
    """
    most = max((sample.step for sample in samples), default=0)
    lives: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.pid].append(sample)
    above = below = 0.0
    for life in lives.values():
        if life[-1].step - life[0].step < most / 2:
            continue
        life = life[max(2, int(WARM * len(life))) :]
        step, own = fmean(s.step for s in life), fmean(s.own_kb for s in life)
        above += sum((s.step - step) * (s.own_kb - own) for s in life)
        below += sum((s.step - step) ** 2 for s in life)
    return [1000 * above / below] if below else []


def more(numbers: Sequence[float]) -> float:
    """Return the median of the last fifth minus that of the second fifth."""
    fifth = max(1, len(numbers) // 5)
    late = numbers[fifth:]
    return median(late[-fifth:]) - median(late[:fifth]) if late else 0.0


def counts(samples: Sequence[Sample], step_order: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """Yield the counts that should stay constant, by moment: of the controller, and per worker."""
    moments: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        moments[sample.step].append(sample)
    alone = [next((s for s in moments[step] if s.role == "controller"), None) for step in step_order]
    yield "controller: descriptors", [s.descriptors for s in alone if s]
    yield "controller: threads", [s.threads for s in alone if s]
    workers = [[s for s in moments[step] if s.role == "worker"] for step in step_order]
    yield "workers: descriptors of each", [fmean(s.descriptors for s in own) for own in workers if own]
    yield "workers: threads of each", [fmean(s.threads for s in own) for own in workers if own]
    yield "processes", [len(moments[step]) for step in step_order if moments[step]]


def grown(args: Namespace, samples: Sequence[Sample], logs: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Rows from the samples."""
    long = args.steps >= LONG
    for role, most in (("controller", CONTROLLER_KB), ("worker", WORKER_KB)):
        own = [sample for sample in samples if sample.role == role]
        columns = {
            "peak": f"{max((s.own_kb for s in own), default=0.0) / 1024:.0f} MB",
            "samples": len(own),
        }
        claim = Claim(high=most) if long else None
        yield Row(f"{role}: memory, KB more in 1,000 steps", growth(own), "0", claim, columns)
    order = list(dict.fromkeys(sample.step for sample in samples))
    for what, numbers in counts(samples, order):
        limit = f"0; there were {min(numbers, default=0):g} to {max(numbers, default=0):g}"
        claim = Claim(high=2.0) if long or what.startswith("controller") else None
        yield Row(f"{what}, more at the end", [more(numbers)] if numbers else [], limit, claim)
    peak = {"peak": f"{max(size for _, size in logs) / 1e6:.1f} MB"}
    claim = Claim(high=LOG_BYTES) if long else None
    yield Row("logs, bytes a step", [logs[-1][1] / args.steps], "a million steps in 500 MB", claim, peak)


def logged(args: Namespace, record: RunRecord) -> Iterator[Row]:
    """Rows from the run's log."""
    timings = recoveries(record)
    deaths = sum(len(timing.workers) for timing in timings if timing.total is not None)
    totals = [timing.total for timing in timings if timing.total is not None]
    outcomes = sorted({timing.outcome for timing in timings})
    middle = f"median {median(totals):.2f} s" if totals else "–"
    columns = {"recovery": middle, "outcomes": ", ".join(outcomes)}
    what, claim = "deaths with a recovery that was timed to its end", Claim(args.kills, args.kills)
    yield Row(what, [deaths], f"{args.kills} kills", claim, columns)
    yield Row("things wrong with the ledger", [len(prove_exactly_once(record))], "0", Claim(high=0))
    again = replay(fact for _, fact in record.history)
    what = "decisions that the log does not explain"
    yield Row(what, [len(again.problems)], f"of {again.decisions}", Claim(high=0))


@benchmark(
    "endurance",
    steps=50_000,
    kills=500,
    seed=1,
    every=Flag(2.0, "seconds between two looks at the processes"),
    out=Flag(RUNS, "folder for the run"),
)
def run_endurance(args: Namespace) -> Measurement:
    """Measure growth over 50,000 steps with 500 kills.

    ``planaria train`` trains a tiny model while a seeded trace kills workers of block stages. The ends are spared, so
    one worker lives through all recoveries. Memory, descriptors, threads and processes of the controller and its
    children are sampled, and the bytes of the run's logs (its folder without checkpoints, model and report).

    Claims: per 1,000 steps a controller grows by <= 64 KB and a worker by <= 256 KB; descriptors, threads and processes
    do not grow; logs take <= 500 bytes per step; every kill is a complete recovery in the log; each sample was used
    once; the log explains every decision. Growth, bytes and workers' counts are judged from 10,000 steps on.
    """
    began = time.monotonic()
    folder, samples, logs = trained(args)
    took = time.monotonic() - began
    record = read_run(folder)
    require_finished(record)
    rows = [*grown(args, samples, logs), *logged(args, record)]
    notes = [f"{args.steps} steps, {args.kills} kills in {took:.0f} s; planaria report {folder.name} tells more."]
    return Result(rows, notes)


class Training:
    """A run trained by its own process."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder

    def history(self) -> Sequence[tuple[float, Any]]:
        return read_run(self.folder).history

    def facts(self) -> list[Any]:
        return [fact for _, fact in self.history()]

    def commits(self) -> int:
        return sum(isinstance(fact, d.Commit) for fact in self.facts())

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 120.0, every: float = 0.2) -> None:
        """Poll ``condition`` every ``every`` s; RuntimeError after ``seconds`` or when the run ends."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"{self.folder}: no {what} in {seconds:g} s")
            time.sleep(every)

    def steps_more(self, steps: int) -> None:
        wanted = self.commits() + steps
        self.wait(lambda: self.commits() >= wanted, f"{steps} steps")

    def pace(self, seconds: float) -> float:
        before, began = self.commits(), time.monotonic()
        time.sleep(seconds)
        return (self.commits() - before) / (time.monotonic() - began)


@contextmanager
def training(config: RunConfig) -> Iterator[Training]:
    """Train until the block ends."""
    folder = RUNS / config.name
    shutil.rmtree(folder, ignore_errors=True)
    file = RUNS / f"{config.name}.toml"
    file.write_text(recipes.dump(config))
    process = subprocess.Popen(cli("train", file, "--quiet"))
    run = Training(process, folder)
    try:
        run.wait(lambda: (folder / "events.jsonl").exists() and run.commits() >= 20, "20 steps")
        yield run
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


PARTS = ("busy", "paused", "strangers", "stuck", "disk")
PAUSES_S = (1.0, 3.0, 8.0)
LIMIT_S = 3.0
PLACES = ("forward", "commit", "save", "transfer", "link", "settle")
SAVED_EVERY = 50
NOTICED, REPLACED, NOBODY, PACE = Claim(high=1.0), Claim(high=LIMIT_S + 3.0), Claim(high=0), Claim(low=0.95)


def hardships_recipe(name: str, steps: int, **sections: dict[str, Any]) -> RunConfig:
    """A model of four small block stages; ``sections`` change single fields."""
    plain: dict[str, Any] = {
        "model": {"dim": 64, "heads": 4, "hidden": 176, "context": 64},
        "pipeline": {"microbatches": 4},
        "fleet": {"spares": FleetConfig().spares},
    }
    changed = plain | {key: plain.get(key, {}) | given for key, given in sections.items()}
    return small_run(name, steps, 4, recovery={"strategy": "checkfree, checkpoint"}, **changed)


def busy(args: Namespace) -> list[Row]:
    """Stages of the 135M-parameter shape (width 576, 30 layers in 6 stages), two microbatches of 32 tokens."""
    shape = {"vocab": 512, "dim": 576, "layers": 30, "heads": 9, "kv_heads": 3, "hidden": 1536, "context": 32}
    config = hardships_recipe(
        "hardships-busy",
        args.steps,
        model=shape,
        pipeline={"stages": 6, "microbatches": 2, "microbatch_size": 1},
    )
    with ExitStack() as ending:
        for _ in range(args.load):
            loop = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            ending.callback(loop.kill)
        record = finished(config, (Fault(step=args.steps * 3 // 4, stage=3, moment="forward", offset=0.5),))
    killed = next(fact.worker for _, fact in record.history if isinstance(fact, e.FaultInjected))
    lost = [fact for _, fact in record.history if isinstance(fact, e.WorkerLost)]
    false = [fact for fact in lost if fact.worker != killed]
    broken = sum(isinstance(fact, e.EdgeBroken) for _, fact in record.history)
    columns = {"load": os.getloadavg()[0], "edges broken": broken, "steps": args.steps}
    return [
        Row(f"load {args.load}: workers lost that were well", [len(false)], "none: 0", NOBODY, columns),
        Row(f"load {args.load}: SIGKILL noticed after, s", noticed(record), "a closed connection: 0", NOTICED),
    ]


def noticed(record: RunRecord, stuck: bool = False) -> list[float]:
    """Return the seconds from each fault to the loss of its worker; with ``stuck``, of stuck main threads only."""
    injected, found = {}, []
    for t, fact in record.history:
        if isinstance(fact, e.FaultInjected) and (not stuck or fact.signal == "stuck"):
            injected[fact.worker] = t
        elif isinstance(fact, e.WorkerLost) and fact.worker in injected and (not stuck or fact.cause == "stuck"):
            found.append(t - injected.pop(fact.worker))
    return found


def paused(args: Namespace) -> list[Row]:
    """Stop the controller of ``planaria train`` repeatedly."""
    found = dict.fromkeys(PAUSES_S, 0)
    with training(hardships_recipe("hardships-paused", 10**6)) as run:
        for seconds in PAUSES_S:
            for _ in range(args.pauses):
                before = sum(isinstance(fact, e.WorkerLost) for fact in run.facts())
                os.kill(run.process.pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(run.process.pid, signal.SIGCONT)
                run.steps_more(5)
                found[seconds] += sum(isinstance(fact, e.WorkerLost) for fact in run.facts()) - before
    return [
        Row(f"controller stopped {seconds:g} s, {args.pauses} times: workers lost", [lost], "none: 0", NOBODY)
        for seconds, lost in found.items()
    ]


def strangers(args: Namespace) -> list[Row]:
    """Alternate windows with and without strangers in one run."""
    ratios, lost = [], 0
    with training(hardships_recipe("hardships-strangers", 10**6)) as run:
        ports = [read_run_address(run.folder).at, *(f.at for f in run.facts() if isinstance(f, e.WorkerJoined))]
        for _ in range(args.windows):
            alone = run.pace(args.seconds)
            with ExitStack() as ending:
                for number in range(1100):
                    host, _, port = ports[number % len(ports)].rpartition(":")
                    caller = ending.enter_context(socket.create_connection((host, int(port)), 10))
                    with suppress(OSError):
                        caller.sendall(os.urandom(512) if number % 11 == 0 else b"")
                ratios.append(run.pace(args.seconds) / alone)
        lost = sum(isinstance(fact, e.WorkerLost) for fact in run.facts())
    return [
        Row("pace with 1,100 strangers / alone", ratios, "no strangers: 1", PACE),
        Row("workers lost with strangers", [lost], "none: 0", NOBODY),
    ]


def stuck(args: Namespace) -> list[Row]:
    """Let main threads hang at each place, several times per run."""
    rows = []
    for place in PLACES:
        faults = []
        for number in range(args.stuck):
            step = 4 + 6 * number
            if place in ("transfer", "link"):  # needs a lost stage
                faults.append(Fault(step=step, stage=3))
            faults.append(Fault.model_validate({"step": step, "stage": 2, "signal": "stuck", "moment": place}))
        config = hardships_recipe(
            f"hardships-stuck-{place}",
            8 + 6 * args.stuck,
            fleet={"timeout_s": LIMIT_S, "disk_timeout_s": LIMIT_S, "spares": 2},
            checkpoint={"every": 3},
            exchange={"replicas": 2, "kind": "noloco", "options": {"every": 3}} if place == "settle" else {},
        )
        record = finished(config, tuple(faults))
        found = noticed(record, stuck=True)
        what = f"stuck in {place}, {len(found)} of {args.stuck} replaced: s until lost"
        rows.append(Row(what, found, f"the limit: {LIMIT_S:g} s", REPLACED, judged="worst"))
        rows.append(Row(f"stuck in {place}: replaced", [len(found) / args.stuck], "all: 1", Claim(low=1)))
    return rows


def disk(args: Namespace) -> list[Row]:
    """Replace the stage file that a worker is about to write by a pipe, repeatedly."""
    found: list[float] = []
    fleet = {"timeout_s": LIMIT_S, "disk_timeout_s": LIMIT_S, "spares": 2}
    with training(hardships_recipe("hardships-disk", 10**6, fleet=fleet, checkpoint={"every": SAVED_EVERY})) as run:
        store = CheckpointStore(run.folder / "checkpoints")
        for _ in range(args.stuck):
            state = read_state(run.folder)
            holder = next(worker for worker in state.workers if worker.stage == 2)
            before = store.newest_step_by_name()
            run.wait(lambda before=before: store.newest_step_by_name() != before, "a checkpoint", every=0.02)  # type: ignore[misc]
            time.sleep(0.3)  # sealing removes leftovers of other checkpoints after the new one has appeared
            step = store.newest_step_by_name() + SAVED_EVERY
            folder = store.unfinished(step, state.generation)
            folder.mkdir(parents=True)
            os.mkfifo(stage_file(folder, 2).with_suffix(f".{holder.pid}.unfinished"))
            who = holder.worker, holder.incarnation
            run.wait(lambda who=who: any(_is_lost(fact, *who) for fact in run.facts()), "a loss")  # type: ignore[misc]
            lost = [t for t, fact in run.history() if _is_lost(fact, *who)]
            asked = [t for t, fact in run.history() if isinstance(fact, d.Save) and fact.step == step]
            found.append(lost[0] - asked[0])
            run.steps_more(2 * SAVED_EVERY)
        stuck = [fact for fact in run.facts() if isinstance(fact, e.WorkerLost)]
    others = sum(fact.cause != "stuck" for fact in stuck) + abs(len(stuck) - args.stuck)
    what = f"disk hangs in a save, {len(found)} of {args.stuck} replaced: s until lost"
    return [
        Row(what, found, f"the limit: {LIMIT_S:g} s", REPLACED, judged="worst"),
        Row("disk hangs: workers lost for another reason", [others], "none: 0", NOBODY),
    ]


def _is_lost(fact: object, worker: str, incarnation: int) -> bool:
    return isinstance(fact, e.WorkerLost) and (fact.worker, fact.incarnation) == (worker, incarnation)


@benchmark(
    "hardships",
    parts=Flag(list(PARTS), choices=PARTS),
    load=Flag(40, "busy loops"),
    steps=Flag(200, "during the hardships; the kill comes at three quarters"),
    pauses=Flag(10, "of each length"),
    windows=Flag(7, "with strangers, and as many without"),
    seconds=Flag(10.0, "of a window"),
    stuck=Flag(5, "main threads that hang at each place"),
)
def run_hardships(args: Namespace) -> Measurement:
    """Measure false alarms under load, pauses and strangers, and the replacement of stuck workers.

    busy: stages of 135M-parameter shapes train next to 40 busy loops; only the killed worker is lost, within 1 s.
    paused: the controller of a small run is stopped (SIGSTOP) for 1, 3 and 8 s; no worker is lost. strangers: 1,000
    idle connections and 100 that send garbage are opened to all ports; the run keeps 95 % of its pace. stuck: main
    threads hang in a step, a commit, a save, a transfer, a link and a round between replicas; disk: a worker saves to a
    pipe that nobody reads; both are replaced within their limit and 3 s.
    """
    rows: list[Row] = []
    for part in args.parts:
        rows += {"busy": busy, "paused": paused, "strangers": strangers, "stuck": stuck, "disk": disk}[part](args)
    notes = [f"recipe: fleet.timeout_s = fleet.disk_timeout_s = {LIMIT_S:g} where main threads hang, else as usual"]
    return Result(rows, notes)


if __name__ == "__main__":
    start(endurance=run_endurance, hardships=run_hardships)
