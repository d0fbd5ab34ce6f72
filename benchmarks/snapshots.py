"""Copies of a stage's state: cost of snapshots, and sets of stages killed in a live fleet."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data, ending, require_finished, run_fleet, step_seconds
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from planaria.faults.trace import Fault

if TYPE_CHECKING:
    from planaria.control.run_record import RunRecord
    from planaria.models.state import StageState


SNAPSHOTS_NAME, STAGES, SKIP, STEPS = "snapshots", 4, 3, 12
LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}


def run_snapshots() -> int:
    """What snapshots in the others' memory cost while nothing fails, and how soon a run is back when all processes die.

    - **Blocked.** A stage's state (256 MB) is copied into a buffer that was used before, beside the same state saved
      and synced. Training waits for that copy alone.
    - **A step on links.** Stages that sleep their passes, links of 100 Mbit/s and 1 Gbit/s: steps with snapshots at the
      best interval over steps without, taking turns. A step's slice may take a quarter of a link's time, and no more.
    - **A slice that is large.** One in every step, which takes about a quarter of it on the slower link.
    - **Back.** The controller is killed, and with it all workers. Then the run is resumed, from memory, and from a
      checkpoint where the memory was removed: until its first step, from the command, and once its workers are ready.
    """
    flags = parser(SNAPSHOTS_NAME, run_snapshots.__doc__)
    flags.add_argument("--mb", type=int, default=256, help="of the state that is copied and saved")
    flags.add_argument("--repeats", type=int, default=5)
    flags.add_argument("--pass-s", type=float, default=0.04, help="a stage's forward; its backward takes twice as long")
    flags.add_argument("--skip-runs", action="store_true", help="only what needs no processes")
    given = flags.parse_args()
    rows = [_blocked(given)]
    if not given.skip_runs:
        for link, bandwidth in LINKS.items():
            rows += _steps(given, link, bandwidth)
        rows += _back(given)
    return conclude(SNAPSHOTS_NAME, given, rows)


# ---- blocked


def _blocked(given: argparse.Namespace) -> Row:
    from planaria.recovery.stream import stream
    from planaria.runtime.checkpoint.stage_file import write_stage

    ratios, copies, saves = [], [], []
    held = [stream(_state(given.mb)) for _ in range(2)]  # both buffers have been used before, as in any run
    with tempfile.TemporaryDirectory(dir=RUNS if RUNS.exists() else None) as folder:
        for repeat in range(given.repeats):
            state = _state(given.mb)
            del held[0]
            began = time.perf_counter()
            held.append(stream(state))
            copied = time.perf_counter() - began
            began = time.perf_counter()
            write_stage(Path(folder), 1, repeat, state)
            saved = time.perf_counter() - began
            ratios.append(copied / saved)
            copies.append(copied)
            saves.append(saved)
    beside = {"copy": f"{1e3 * statistics.median(copies):.0f} ms", "save": f"{1e3 * statistics.median(saves):.0f} ms"}
    return Row(f"blocked: copy of {given.mb} MB / save and sync", ratios, "memory / disk", Claim(high=1 / 20), beside)


def _state(megabytes: int) -> StageState:
    import torch

    from planaria.models.optimizers.adamw import KEYS
    from planaria.models.state import StageState

    side = 512
    count = max(1, megabytes * 10**6 // (3 * 4 * side * side))
    weights = {f"layers.{n}.weight": torch.randn(side, side) for n in range(count)}
    moments = {
        name: dict(zip(KEYS, (torch.randn_like(w), torch.rand_like(w)), strict=True)) for name, w in weights.items()
    }
    return StageState(weights, moments, dict.fromkeys(weights, 7))


# ---- steps on emulated links


def _recipe(
    given: argparse.Namespace, name: str, bandwidth: float, options: dict[str, object] | None, steps: int
) -> RunConfig:
    recovery = RecoveryConfig(strategy="checkfree")
    if options is not None:
        recovery = RecoveryConfig(strategy="snapshot, checkpoint", options=Options(options))
    from planaria.runtime.engine.copy_costs import settle

    return settle(
        RunConfig(
            name=f"{SNAPSHOTS_NAME}-{name}",
            out=str(RUNS),
            model=ModelConfig(vocab=VOCAB, dim=384, layers=STAGES, heads=4, hidden=1056, context=32),
            pipeline=PipelineConfig(stages=STAGES, microbatches=8, microbatch_size=1),
            data=bytes_data(),
            train=TrainConfig(steps=max(1, steps), eval_every=0),
            fleet=FleetConfig(spares=0),
            checkpoint=CheckpointConfig(every=0),
            network=NetworkConfig(
                forward_s=[0.0, *[given.pass_s] * STAGES],
                backward_s=[0.0, *[2 * given.pass_s] * STAGES],
                bandwidth=bandwidth,
                emulate=True,
                hourly=0.1,
            ),
            recovery=recovery,
        )
    )


def _steps(given: argparse.Namespace, link: str, bandwidth: float) -> list[Row]:
    from planaria.runtime.engine.copy_costs import costs_of_copies
    from planaria.runtime.engine.resolved import ResolvedRun

    best, plain, large, share, bound = [], [], [], [], []
    for repeat in range(given.repeats):
        alone = run_fleet(_recipe(given, f"plain-{repeat}", bandwidth, None, SKIP + STEPS))
        config = _recipe(given, f"best-{repeat}", bandwidth, {"every": "best"}, 0)
        every, slices = ({**config.recovery.options}[name] for name in ("every", "slices"))
        warm = 3 * every  # until then snapshots go to memory that was never touched
        beside = run_fleet(_recipe(given, f"best-{repeat}", bandwidth, {"every": "best"}, warm + 2 * every))
        for record in (alone, beside):
            require_finished(record)
        step_s = statistics.mean(step_seconds(alone, SKIP))
        plain.append(step_s)
        best.append(statistics.mean(step_seconds(beside, warm)) / step_s)
        sent = max(cost.step_bytes for _, cost in costs_of_copies(ResolvedRun(config))) * every
        bound.append(sent / slices / (bandwidth * step_s))
        full = _recipe(given, f"large-{repeat}", bandwidth, {"every": 1}, SKIP + STEPS)
        large.append(statistics.mean(step_seconds(run_fleet(full), SKIP)) / step_s)
        share.append(max(cost.step_bytes for _, cost in costs_of_copies(ResolvedRun(full))) / (bandwidth * step_s))
    told: dict[str, float | int | str] = {"link": link, "step": f"{1e3 * statistics.median(plain):.0f} ms"}
    return [
        Row("step with snapshots / without, best interval", best, "1", Claim(high=1.02), told),
        Row("a slice's share of a step on its link", bound, "0.25", Claim(high=0.25), told),
        Row(
            f"the same with one every step: {statistics.median(share):.2f} of a step on its link",
            large,
            "1",
            Claim(high=1.05),
            told,
        ),
    ]


# ---- back


def _back(given: argparse.Namespace) -> list[Row]:
    from benchmarks.endurance import training
    from planaria.runtime.checkpoint.memory import MemoryFolder

    found: dict[str, list[float]] = {"memory": [], "disk": []}
    wholes: dict[str, list[float]] = {"memory": [], "disk": []}
    right = []
    for repeat in range(given.repeats):
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
                linked_s, whole_s, said = _resumed(RUNS / config.name)
                seconds.append(linked_s)
                wholes[source].append(whole_s)
                right.append(float(said == source))
    return [
        Row(
            "all killed: from workers ready to the first step, from memory",
            found["memory"],
            "s",
            Claim(high=3.0),
        ),
        Row("the same from the disk", found["disk"], "s"),
        Row("from the command to the first step, from memory", wholes["memory"], "s; five processes start"),
        Row("the same from the disk", wholes["disk"], "s; five processes start"),
        Row("went on from memory where there was any", right, "1", Claim(low=1.0), judged="median"),
    ]


SAVED = 25
"""steps between checkpoints: the memory is newer"""


def _plain(name: str) -> RunConfig:
    """A run that really computes, on free links."""
    return RunConfig(
        name=f"{SNAPSHOTS_NAME}-{name}",
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=256, layers=STAGES, heads=4, hidden=688, context=64),
        pipeline=PipelineConfig(stages=STAGES, microbatches=4, microbatch_size=1),
        data=bytes_data(),
        train=TrainConfig(steps=10_000, eval_every=0),
        fleet=FleetConfig(spares=0),
        checkpoint=CheckpointConfig(every=SAVED),
        recovery=RecoveryConfig(strategy="snapshot, checkpoint", options=Options({"every": 5, "outlive": True})),
    )


def _resumed(folder: Path) -> tuple[float, float, str]:
    """Go on for a few steps: seconds to the first step from the last worker that was waited for and from the command,
    and from where it went on."""
    from planaria.control import decisions as d
    from planaria.control import events as e
    from planaria.control.logs import read_run

    before = max(fact.step for _, fact in read_run(folder).history if isinstance(fact, d.Commit))
    called = time.monotonic()
    command = [sys.executable, "-m", "planaria", "train", "--resume", str(folder), "--quiet"]
    subprocess.run([*command, "--train.steps", str(before + 5)], check=True, stdout=subprocess.DEVNULL)
    history = read_run(folder).history
    last = max(n for n, (_, fact) in enumerate(history) if isinstance(fact, e.RunStarted))
    started = history[last][1]
    formed = next(t for t, fact in history[last:] if isinstance(fact, d.Form))
    first_step = next(t for t, fact in history[last:] if isinstance(fact, d.RunStep))
    return first_step - formed, first_step - called, "memory" if started.recalled >= 0 else "disk"


LOST_SETS_NAME, LOST_SETS_STAGES = "lost_sets", 6
APART = 4
"""steps from one set to the next"""


def run_lost_sets() -> int:
    """Kill every set of one, two (and, with m = 3, three) of seven stages in a live fleet.

    The ends, neighbours, and the hosts of each other's parities are among them. All that is lost comes back from what
    the others remember: in step with training, no step is lost; with retained snapshots, all go back and make the steps
    since again. Either way weights, moments, clocks and generators are at the end those of a run that lost nothing,
    byte for byte. With m > 1, one is killed while it gives to another that is being rebuilt.
    """
    flags = parser(LOST_SETS_NAME, run_lost_sets.__doc__)
    flags.add_argument("--tolerate", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--most", type=int, default=1000, help="sets of each kind, for a short look")
    given = flags.parse_args()
    rows = []
    for tolerate in given.tolerate:
        for every in (0, 2):
            rows += _rows(tolerate, every, given.most)
    return conclude(
        LOST_SETS_NAME, given, rows, ["Weights, moments, clocks and generators of all seven stages are compared."]
    )


def _rows(tolerate: int, every: int, most: int) -> list[Row]:
    """One run that loses set after set, beside one that loses nothing."""
    members = range(LOST_SETS_STAGES + 1)
    sets = [lost for size in range(1, tolerate + 1) for lost in list(combinations(members, size))[:most]]
    moments = ("forward", "backward", "commit", "any")
    faults = [
        Fault(step=APART * (number + 1), stage=stage, moment=moments[number % len(moments)])  # type: ignore[arg-type]
        for number, lost in enumerate(sets)
        for stage in lost
    ]
    if tolerate > 1:  # a donor dies while it gives: one more is lost than was
        extra = APART * (len(sets) + 1)
        gives = Fault(step=extra - every, stage=4, moment="transfer")  # in the step to which all have gone back
        faults += [Fault(step=extra, stage=2, moment="forward"), gives]
    steps = APART * (len(sets) + 3)
    how = "in step" if not every else f"retained, every {every}"
    struck = run_fleet(_lost_sets_recipe(tolerate, every, steps, f"m{tolerate}-{every}"), tuple(faults))
    untroubled = run_fleet(_lost_sets_recipe(tolerate, every, steps, f"m{tolerate}-{every}-none"))
    require_finished(untroubled)
    ended = ending(struck) == "finished"
    alike = [float(ended and one == other) for one, other in zip(_shas(struck), _shas(untroubled), strict=True)]
    beside: dict[str, float | int | str] = {"m": tolerate, "mode": how, "sets": len(sets), "ended": ending(struck)}
    forms = [fact.outcome for _, fact in struck.history if getattr(fact, "kind", "") == "form"]
    odd = sum(outcome in ("rolled back", "skipping") for outcome in forms)
    killed = sum(getattr(fact, "kind", "") == "fault_injected" for _, fact in struck.history)
    return [
        Row("stages as if nothing had been lost", alike or [0.0], "7 of 7, byte for byte", Claim(low=1.0), beside),
        Row("workers killed", [float(killed)], f"{len(faults)} in the trace", Claim(low=float(len(faults))), beside),
        Row("generations that went to the disk", [float(odd)], "0", Claim(high=0.0), beside),
    ]


def _lost_sets_recipe(tolerate: int, every: int, steps: int, name: str) -> RunConfig:
    return RunConfig(
        name=f"{LOST_SETS_NAME}-{name}",
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=32, layers=LOST_SETS_STAGES, heads=2, hidden=64, context=32),
        pipeline=PipelineConfig(stages=LOST_SETS_STAGES, microbatches=4, microbatch_size=1),
        data=bytes_data(),
        train=TrainConfig(steps=steps, eval_every=0),
        fleet=FleetConfig(spares=tolerate),
        checkpoint=CheckpointConfig(every=0),
        recovery=RecoveryConfig(strategy="snapshot", options=Options({"tolerate": tolerate, "every": every})),
    )


def _shas(record: RunRecord) -> list[str]:
    """A digest of each stage's weights, moments, clocks and generators at the end; none where there is no end."""
    from planaria.models.packing import pack
    from planaria.runtime.checkpoint.stage_file import read_stage
    from planaria.runtime.checkpoint.store import CheckpointStore

    saved = CheckpointStore(Path(record.folder) / "checkpoints").newest(whole_only=True)
    if saved is None:
        return [""] * (LOST_SETS_STAGES + 1)
    states = [read_stage(saved.folder, stage, saved.step) for stage in range(LOST_SETS_STAGES + 1)]
    return [hashlib.sha256(pack(state).numpy().tobytes()).hexdigest() for state in states]


if __name__ == "__main__":
    start(snapshots=run_snapshots, lost_sets=run_lost_sets)
