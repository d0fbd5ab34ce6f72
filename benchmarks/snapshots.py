"""Copies of a stage's state: cost of snapshots, and sets of stages killed in a live fleet."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import tempfile
import time
from argparse import Namespace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.endurance import training
from benchmarks.fleet_run import ending, finished, require_finished, run_fleet, small_run, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Result, Row, benchmark, ratios, start
from benchmarks.processes import cli
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.models.optimizers.adamw import KEYS
from planaria.models.packing import pack
from planaria.models.state import StageState
from planaria.recovery.parity import stream
from planaria.runtime.checkpoint.memory_folder import MemoryFolder
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.prediction.copy_costs import costs_of_copies, resolve_best_options
from planaria.runtime.resolved_run import ResolvedRun

STAGES, SKIP, STEPS = 4, 3, 12
LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}


@benchmark(
    "snapshots",
    mb=Flag(256, "of the state that is copied and saved"),
    repeats=5,
    pass_s=Flag(0.04, "a stage's forward; its backward takes twice as long"),
    skip_runs=Flag(False, "only what needs no processes"),
)
def run_snapshots(args: Namespace) -> Measurement:
    """Measure snapshots in other workers' memory: cost without failures, and recovery after all processes die.

    - Blocked: a stage's state (256 MB) is copied into a warm buffer; compared with saving it with fsync.
    - A step on links: sleeping stages, links of 100 Mbit/s and 1 Gbit/s, steps with snapshots at the best interval over
      steps without; a slice may take a quarter of a link's time.
    - A large slice: one per step, about a quarter of the slower link's step.
    - Back: the controller and all workers are killed. The run is resumed from memory, and from a checkpoint without it.
    """
    rows = [_blocked(args)]
    if not args.skip_runs:
        for link, bandwidth in LINKS.items():
            rows += _steps(args, link, bandwidth)
        rows += _back(args)
    return rows


# ---- blocked


def _blocked(args: Namespace) -> Row:
    copies, saves = [], []
    held = [stream(_state(args.mb)) for _ in range(2)]  # both buffers are warm, as in any run
    with tempfile.TemporaryDirectory(dir=RUNS if RUNS.exists() else None) as folder:
        for repeat in range(args.repeats):
            state = _state(args.mb)
            del held[0]
            began = time.perf_counter()
            held.append(stream(state))
            copied = time.perf_counter() - began
            began = time.perf_counter()
            write_stage(Path(folder), 1, repeat, state)
            saved = time.perf_counter() - began
            copies.append(copied)
            saves.append(saved)
    columns = {"copy": f"{1e3 * median(copies):.0f} ms", "save": f"{1e3 * median(saves):.0f} ms"}
    return Row(
        f"blocked: copy of {args.mb} MB / save and sync",
        ratios(copies, saves),
        "memory / disk",
        Claim(high=1 / 20),
        columns,
    )


def _state(megabytes: int) -> StageState:
    side = 512
    count = max(1, megabytes * 10**6 // (3 * 4 * side * side))
    weights = {f"layers.{n}.weight": torch.randn(side, side) for n in range(count)}
    moments = {
        name: dict(zip(KEYS, (torch.randn_like(w), torch.rand_like(w)), strict=True)) for name, w in weights.items()
    }
    return StageState(weights, moments, dict.fromkeys(weights, 7))


# ---- steps on emulated links


def _config(
    name: str, model: tuple[int, int, int], stages: int, microbatches: int, steps: int, **more: Any
) -> RunConfig:
    dim, hidden, context = model
    shape = {"dim": dim, "heads": 2 if dim == 32 else 4, "hidden": hidden, "context": context}
    return small_run(name, max(1, steps), stages, model=shape, pipeline={"microbatches": microbatches}, **more)


def _recipe(args: Namespace, name: str, bandwidth: float, options: dict[str, object] | None, steps: int) -> RunConfig:
    recovery: dict[str, Any] = {"strategy": "checkfree"}
    if options is not None:
        recovery = {"strategy": "snapshot, checkpoint", "options": options}
    passes = {"forward_s": [0.0] + [args.pass_s] * STAGES, "backward_s": [0.0] + [2 * args.pass_s] * STAGES}
    network = {**passes, "bandwidth": bandwidth, "emulate": True, "hourly": 0.1}
    config = _config(f"snapshots-{name}", (384, 1056, 32), STAGES, 8, steps, network=network, recovery=recovery)
    return resolve_best_options(config)


def _steps(args: Namespace, link: str, bandwidth: float) -> list[Row]:
    best, plain, large, share, bound = [], [], [], [], []
    for repeat in range(args.repeats):
        alone = run_fleet(_recipe(args, f"plain-{repeat}", bandwidth, None, SKIP + STEPS))
        config = _recipe(args, f"best-{repeat}", bandwidth, {"every": "best"}, 0)
        every, slices = ({**config.recovery.options}[name] for name in ("every", "slices"))
        warm = 3 * every  # before that, snapshots go to fresh memory
        with_snapshots = run_fleet(_recipe(args, f"best-{repeat}", bandwidth, {"every": "best"}, warm + 2 * every))
        for record in (alone, with_snapshots):
            require_finished(record)
        step_s = fmean(step_seconds(alone, SKIP))
        plain.append(step_s)
        best.append(fmean(step_seconds(with_snapshots, warm)) / step_s)
        sent = max(cost.step_bytes for _, cost in costs_of_copies(ResolvedRun(config))) * every
        bound.append(sent / slices / (bandwidth * step_s))
        full = _recipe(args, f"large-{repeat}", bandwidth, {"every": 1}, SKIP + STEPS)
        large.append(fmean(step_seconds(run_fleet(full), SKIP)) / step_s)
        share.append(max(cost.step_bytes for _, cost in costs_of_copies(ResolvedRun(full))) / (bandwidth * step_s))
    most = Claim(high=1.05)
    columns = {"link": link, "step": f"{1e3 * median(plain):.0f} ms"}
    return [
        Row("step with snapshots / without, best interval", best, "1", Claim(high=1.02), columns),
        Row("a slice's share of a step on its link", bound, "0.25", Claim(high=0.25), columns),
        Row(f"the same with one every step: {median(share):.2f} of a step on its link", large, "1", most, columns),
    ]


# ---- back


def _back(args: Namespace) -> list[Row]:
    found: dict[str, list[float]] = {"memory": [], "disk": []}
    wholes: dict[str, list[float]] = {"memory": [], "disk": []}
    right = []
    for repeat in range(args.repeats):
        for source, seconds in found.items():
            config = _plain(f"back-{source}-{repeat}")
            with training(config) as run:
                made = run.commits()
                run.wait(lambda made=made: run.commits() >= max(made, SAVED + 12), "steps", every=0.05)  # type: ignore[misc]
                os.kill(run.process.pid, signal.SIGKILL)
                run.process.wait()
                memory = MemoryFolder(RUNS / config.name)
                if source == "disk":
                    memory.remove()
                linked_s, whole_s, resumed_from = _resumed(RUNS / config.name)
                seconds.append(linked_s)
                wholes[source].append(whole_s)
                right.append(float(resumed_from == source))
    return [
        Row("all killed: from workers ready to the first step, from memory", found["memory"], "s", Claim(high=3.0)),
        Row("the same from the disk", found["disk"], "s"),
        Row("from the command to the first step, from memory", wholes["memory"], "s; five processes start"),
        Row("the same from the disk", wholes["disk"], "s; five processes start"),
        Row("resumed from memory if a snapshot was there", right, "1", Claim(low=1.0), judged="median"),
    ]


SAVED = 25  # steps between checkpoints; snapshots are newer


def _plain(name: str) -> RunConfig:
    recovery = {"strategy": "snapshot, checkpoint", "options": {"every": 5, "persist": True}}
    checkpoint = {"every": SAVED}
    return _config(f"snapshots-{name}", (256, 688, 64), STAGES, 4, 10_000, checkpoint=checkpoint, recovery=recovery)


def _resumed(folder: Path) -> tuple[float, float, str]:
    """Resume for a few steps; return the seconds to the first step from the last worker's start and from the command,
    and the source."""
    before = max(fact.step for _, fact in read_run(folder).history if isinstance(fact, d.Commit))
    called = time.monotonic()
    command = cli("train", "--resume", folder, "--quiet", "--train.steps", before + 5)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    history = read_run(folder).history
    last = max(n for n, (_, fact) in enumerate(history) if isinstance(fact, e.RunStarted))
    started = history[last][1]
    formed = next(t for t, fact in history[last:] if isinstance(fact, d.Form))
    first_step = next(t for t, fact in history[last:] if isinstance(fact, d.RunStep))
    return first_step - formed, first_step - called, "memory" if started.snapshot_step >= 0 else "disk"


BLOCKS = 6
APART = 4  # steps between sets


@benchmark("lost_sets", tolerate=[1, 2, 3], most=Flag(1000, "sets of each kind, for a short look"))
def run_lost_sets(args: Namespace) -> Measurement:
    """Kill every set of one, two and (m = 3) three of seven stages in a live fleet.

    All lost state returns from the others' memory: in step with training without a lost step, or from retained
    snapshots with the steps since repeated. The final weights, moments, clocks and generators equal those of a run
    without loss, byte for byte. With m > 1, a donor is also killed during its transfer.
    """
    rows = []
    for tolerate in args.tolerate:
        for every in (0, 2):
            rows += _rows(tolerate, every, args.most)
    return Result(rows, ["Weights, moments, clocks and generators of all seven stages are compared."])


def _rows(tolerate: int, every: int, most: int) -> list[Row]:
    """Compare a run that loses every set with one that loses nothing."""
    members = range(BLOCKS + 1)
    sets = [lost for size in range(1, tolerate + 1) for lost in list(combinations(members, size))[:most]]
    moments = ("forward", "backward", "commit", "any")
    faults = [
        Fault(step=APART * (number + 1), stage=stage, moment=moments[number % len(moments)])  # type: ignore[arg-type]
        for number, lost in enumerate(sets)
        for stage in lost
    ]
    if tolerate > 1:  # a donor dies during its transfer
        extra = APART * (len(sets) + 1)
        gives = Fault(step=extra - every, stage=4, moment="transfer")  # in the step that all returned to
        faults += [Fault(step=extra, stage=2, moment="forward"), gives]
    steps = APART * (len(sets) + 3)
    how = "in step" if not every else f"retained, every {every}"
    faulty = run_fleet(_lost_recipe(tolerate, every, steps, f"m{tolerate}-{every}"), tuple(faults))
    untroubled = finished(_lost_recipe(tolerate, every, steps, f"m{tolerate}-{every}-none"))
    ended = ending(faulty) == "finished"
    alike = [float(ended and one == other) for one, other in zip(_shas(faulty), _shas(untroubled), strict=True)]
    columns = {"m": tolerate, "mode": how, "sets": len(sets), "ended": ending(faulty)}
    forms = [fact.outcome for _, fact in faulty.history if getattr(fact, "kind", "") == "form"]
    odd = sum(outcome in ("rolled back", "skipping") for outcome in forms)
    killed = sum(getattr(fact, "kind", "") == "fault_injected" for _, fact in faulty.history)
    return [
        Row("stages as if nothing had been lost", alike or [0.0], "7 of 7, byte for byte", Claim(low=1.0), columns),
        Row("workers killed", [float(killed)], f"{len(faults)} in the trace", Claim(low=float(len(faults))), columns),
        Row("generations that went to the disk", [float(odd)], "0", Claim(high=0.0), columns),
    ]


def _lost_recipe(tolerate: int, every: int, steps: int, name: str) -> RunConfig:
    recovery = {"strategy": "snapshot", "options": {"tolerate": tolerate, "every": every}}
    fleet = {"spares": tolerate}
    return _config(f"lost_sets-{name}", (32, 64, 32), BLOCKS, 4, steps, fleet=fleet, recovery=recovery)


def _shas(record: RunRecord) -> list[str]:
    """Return a digest of each stage's final state, or empty strings without one."""
    saved = CheckpointStore(Path(record.folder) / "checkpoints").newest(whole_only=True)
    if saved is None:
        return [""] * (BLOCKS + 1)
    states = [read_stage(saved.folder, stage, saved.step) for stage in range(BLOCKS + 1)]
    return [hashlib.sha256(pack(state).numpy().tobytes()).hexdigest() for state in states]


if __name__ == "__main__":
    start(snapshots=run_snapshots, lost_sets=run_lost_sets)
