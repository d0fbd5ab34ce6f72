"""A long life with many deaths: does anything grow that should not?

``planaria train`` leads a tiny model through its steps while a trace made from a seed kills workers of block stages;
the ends are spared, so that one worker lives through all recoveries. Beside it, memory, descriptors, threads and
processes of the controller and of everybody that it started are counted, and the bytes of the run's logs (everything in
its folder but checkpoints, model and report).

The claims: a controller's memory grows by ≤ 64 KB in a thousand steps and a worker's by ≤ 256 KB; descriptors, threads
and processes are as many at the end as at the beginning; logs take ≤ 500 bytes a step; every kill is a recovery that
the log tells of to its end; each sample was used once; the log explains every decision. Growth, bytes and what
workers have are judged from ten thousand steps on: before, beginnings outweigh them.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished
from planaria.common.errors import RunStopped
from planaria.config.schema import (
    ChaosConfig,
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord
    from planaria.control.statefile import StateFile
    from planaria.faults.trace import Trace

NAME = "endurance"
STAGES = 3
LONG = 10_000
"""steps from which on growth is judged"""
CONTROLLER_KB, WORKER_KB, LOG_BYTES = 64.0, 256.0, 500.0
WARM = 0.2
"""of the run, before growth is looked for"""
NOT_LOGS = ("checkpoints", "model", "report.html")


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    step: int
    pid: int
    role: str
    """controller, worker (of those that the run's state names) or helper (all others below the controller)"""
    own_kb: float
    """memory of its own, swapped out or not; what it shares with files comes and goes as the machine likes"""
    descriptors: int
    threads: int


def recipe(given: argparse.Namespace, name: str, trace: Path) -> RunConfig:
    """Steps of milliseconds. A lost middle stage is averaged, any other rolls back."""
    return RunConfig(
        name=name,
        out=str(given.out),
        model=ModelConfig(vocab=VOCAB, dim=32, layers=STAGES, heads=2, hidden=64, context=16),
        pipeline=PipelineConfig(stages=STAGES, microbatches=2, microbatch_size=1),
        data=bytes_data(folder=given.out),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=given.steps, eval_every=0),
        recovery=RecoveryConfig(strategy="checkfree, checkpoint"),
        fleet=FleetConfig(spares=1, missed=40),
        checkpoint=CheckpointConfig(every=25),
        chaos=ChaosConfig(trace=str(trace)),
    )


def kills(seed: int, steps: int, number: int) -> Trace:
    """One in each of so many stretches of the steps, in its middle half: at a random moment, to some block stage."""
    from planaria.faults.trace import Fault, Trace

    rng = random.Random(f"{NAME} {seed}")
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


def trained(given: argparse.Namespace) -> tuple[Path, list[Sample], list[tuple[int, int]]]:
    """Train to the end, looking on: the run's folder, samples of its processes, (step, bytes of its logs)."""
    from planaria.config import recipe as recipes
    from planaria.faults.trace import write

    given.out.mkdir(parents=True, exist_ok=True)
    name = next(made for n in count(1) if not (given.out / (made := f"{NAME}-{n}")).exists())
    trace, file = given.out / f"{name}.trace.json", given.out / f"{name}.toml"
    write(kills(given.seed, given.steps, given.kills), trace)
    file.write_text(recipes.dump(recipe(given, name, trace)))
    folder, samples, logs = given.out / name, [], []
    with (given.out / f"{name}.out").open("wb") as out:
        command = [sys.executable, "-m", "planaria", "train", str(file)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            time.sleep(given.every)
            state = state_of(folder)
            if state is not None:
                samples += looked_at(process.pid, {worker.pid for worker in state.workers}, state.step)
                logs.append((state.step, log_bytes(folder)))
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise RunStopped(f"{folder}: the run ended with exit code {process.returncode}; it said why in {out.name}")
    return folder, samples, [*logs, (given.steps, log_bytes(folder))]


def state_of(folder: Path) -> StateFile | None:
    """What the run says of itself; None before its first step and after it is over."""
    from planaria.common.errors import UserError
    from planaria.control.statefile import read_state

    try:
        state = read_state(folder)
    except UserError:
        return None
    return None if state.phase == "over" or not state.step else state


def looked_at(controller: int, workers: Set[int], step: int) -> Iterator[Sample]:
    """The controller, and everybody below it."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    below, seen = [controller], {controller}
    for pid in below:  # grows as it is gone through
        below += (child for child in children[pid] if child not in seen)
        seen.update(children[pid])
    for pid in below:
        role = "controller" if pid == controller else "worker" if pid in workers else "helper"
        try:
            descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            told = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
        if "RssAnon" in fields:  # not of one that has just ended
            own = sum(float(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
            yield Sample(step, pid, role, own, descriptors, int(fields["Threads"]))


def log_bytes(folder: Path) -> int:
    """Bytes of everything in the run's folder that grows with its log."""
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


def growth(samples: Iterable[Sample]) -> list[float]:
    """KB of memory in a thousand steps: the slope over the lives of those that were there for half of the run or more.

    Each one's first fifth is left out. Whoever is young, or was a spare until lately, is still growing up. Nothing
    where nobody lived so long.
    """
    samples = list(samples)
    most = max((sample.step for sample in samples), default=0)
    lives: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.pid].append(sample)
    above = below = 0.0
    for life in lives.values():
        if life[-1].step - life[0].step < most / 2:
            continue
        life = life[max(2, int(WARM * len(life))) :]
        step, own = statistics.fmean(s.step for s in life), statistics.fmean(s.own_kb for s in life)
        above += sum((s.step - step) * (s.own_kb - own) for s in life)
        below += sum((s.step - step) ** 2 for s in life)
    return [1000 * above / below] if below else []


def more(numbers: Sequence[float]) -> float:
    """How much larger a number is at the end than after the beginning: medians of fifths."""
    fifth = max(1, len(numbers) // 5)
    late = numbers[fifth:]
    return statistics.median(late[-fifth:]) - statistics.median(late[:fifth]) if late else 0.0


def counts(samples: Sequence[Sample], step_order: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """What should stay as it is, moment by moment: of the controller, and of all together per process."""
    moments: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        moments[sample.step].append(sample)
    alone = [next((s for s in moments[step] if s.role == "controller"), None) for step in step_order]
    yield "controller: descriptors", [s.descriptors for s in alone if s]
    yield "controller: threads", [s.threads for s in alone if s]
    workers = [[s for s in moments[step] if s.role == "worker"] for step in step_order]
    yield "workers: descriptors of each", [statistics.fmean(s.descriptors for s in own) for own in workers if own]
    yield "workers: threads of each", [statistics.fmean(s.threads for s in own) for own in workers if own]
    yield "processes", [len(moments[step]) for step in step_order if moments[step]]


def grown(given: argparse.Namespace, samples: Sequence[Sample], logs: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """What was counted while the run went on."""
    long = given.steps >= LONG
    for role, most in (("controller", CONTROLLER_KB), ("worker", WORKER_KB)):
        own = [sample for sample in samples if sample.role == role]
        peak = max((sample.own_kb for sample in own), default=0.0) / 1024
        yield Row(
            what=f"{role}: memory, KB more in 1,000 steps",
            values=growth(own),
            limit="0",
            claim=Claim(high=most) if long else None,
            beside={"peak": f"{peak:.0f} MB", "samples": len(own)},
        )
    order = list(dict.fromkeys(sample.step for sample in samples))
    for what, numbers in counts(samples, order):
        least, most = min(numbers, default=0), max(numbers, default=0)
        yield Row(
            what=f"{what}, more at the end",
            values=[more(numbers)] if numbers else [],
            limit=f"0; there were {least:g} to {most:g}",
            claim=Claim(high=2.0) if long or what.startswith("controller") else None,
        )
    yield Row(
        what="logs, bytes a step",
        values=[logs[-1][1] / given.steps],
        limit="a million steps in 500 MB",
        claim=Claim(high=LOG_BYTES) if long else None,
        beside={"peak": f"{max(size for _, size in logs) / 1e6:.1f} MB"},
    )


def told(given: argparse.Namespace, record: RunRecord) -> Iterator[Row]:
    """What the run's log says of it."""
    from planaria.control.replay import replay
    from planaria.report.run.ledger import prove_exactly_once
    from planaria.report.run.recovery_timeline import recoveries

    timings = recoveries(record)
    deaths = sum(len(timing.workers) for timing in timings if timing.total is not None)
    totals = [timing.total for timing in timings if timing.total is not None]
    outcomes = sorted({timing.outcome for timing in timings})
    median = f"median {statistics.median(totals):.2f} s" if totals else "–"
    yield Row(
        what="deaths with a recovery that was timed to its end",
        values=[deaths],
        limit=f"{given.kills} kills",
        claim=Claim(low=given.kills, high=given.kills),
        beside={"recovery": median, "outcomes": ", ".join(outcomes)},
    )
    yield Row("things wrong with the ledger", [len(prove_exactly_once(record))], "0", Claim(high=0))
    again = replay(fact for _, fact in record.history)
    yield Row(
        "decisions that the log does not explain",
        [len(again.problems)],
        f"of {again.decisions}",
        Claim(high=0),
    )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--steps", type=int, default=50_000)
    flags.add_argument("--kills", type=int, default=500)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--every", type=float, default=2.0, help="seconds between two looks at the processes")
    flags.add_argument("--out", type=Path, default=RUNS, help="folder for the run")
    given = flags.parse_args()
    from planaria.control.logs import read_run

    began = time.monotonic()
    folder, samples, logs = trained(given)
    took = time.monotonic() - began
    record = read_run(folder)
    require_finished(record)
    rows = [*grown(given, samples, logs), *told(given, record)]
    notes = [f"{given.steps} steps, {given.kills} kills in {took:.0f} s; planaria report {folder.name} tells more."]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
