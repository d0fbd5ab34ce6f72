"""What does training cost in workers' processor time, over one process that does the same?

The fleet's workers and the inline engine train the same small model on the same microbatches, one thread each, and take
turns. Compared is processor time per step: of all workers together, their waiting, frames, heartbeats and reports
included, and of the one process. The claims: at most 1.25, 1.08 and 1.04 at widths of 128, 256 and 512.

The limit is what each of several such processes uses, as many as there are workers, that train at once and have nothing
to do with each other: they take turns at the cores, and find caches that others have used since.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import VOCAB, Relay, bytes_data, require_finished, run_fleet
from benchmarks.ladder import engine_for
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control import decisions as d
from planaria.control import events as e

if TYPE_CHECKING:
    from planaria.control.protocols import Observer

NAME = "worker_cpu"
CLAIMS = {128: Claim(high=1.25), 256: Claim(high=1.08), 512: Claim(high=1.04)}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time that these live processes have used, all threads."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # how Linux names another process's clock


class Metered(Relay):
    """Notes what the workers have used when a step is ordered."""

    def __init__(self, inner: Observer) -> None:
        super().__init__(inner)
        self._pids: list[int] = []
        self.used: dict[int, float] = {}

    def on_event(self, t: float, event: e.Event) -> None:
        super().on_event(t, event)
        if isinstance(event, e.WorkerJoined):
            self._pids.append(event.pid)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        if isinstance(decision, d.RunStep):
            self.used[decision.step] = cpu_seconds(self._pids)
        super().on_decision(t, decision)


def fleet_s(config: RunConfig, warm: int) -> float:
    """Processor seconds of a step of all workers."""
    metered: list[Metered] = []

    def around(inner: Observer, folder: Path) -> Observer:
        metered.append(Metered(inner))
        return metered[0]

    require_finished(run_fleet(config, around=around))
    used, last = metered[0].used, config.train.steps - 1
    return (used[last] - used[warm]) / (last - warm)


def inline_s(config: RunConfig, warm: int, at_once: int = 1) -> float:
    """The same of one process, which has nothing else to do; the mean of so many ``at_once``."""
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fmean(fresh.map(_inline_s, repeat(config, at_once), repeat(warm, at_once)))


def _inline_s(config: RunConfig, warm: int) -> float:
    engine = engine_for(config)
    for _ in range(warm):
        engine.train_step()
    began = time.process_time()
    for _ in range(config.train.steps - warm):
        engine.train_step()
    return (time.process_time() - began) / (config.train.steps - warm)


def recipe(given: argparse.Namespace, dim: int) -> RunConfig:
    return RunConfig(
        name=f"{NAME}-{dim}",
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=dim, layers=given.stages, hidden=dim * 11 // 4),
        pipeline=PipelineConfig(
            stages=given.stages, microbatches=given.microbatches, microbatch_size=given.microbatch_size
        ),
        optim=OptimConfig(lr=1e-4),
        data=bytes_data(),
        train=TrainConfig(steps=given.steps, eval_every=0),
        fleet=FleetConfig(spares=0),
        checkpoint=CheckpointConfig(every=0),
    )


def row_of(given: argparse.Namespace, dim: int) -> Row:
    config = recipe(given, dim)
    workers = given.stages + 1
    sides = [
        lambda: fleet_s(config, given.warm),
        lambda: inline_s(config, given.warm),
        lambda: inline_s(config, given.warm, workers),
    ]
    fleet, inline, crowd = interleaved(sides, given.repeats)
    limit = f"{median(crowd) / median(inline):.3f}: {workers} such processes at once"
    beside = {"fleet": milliseconds(fleet), "inline": milliseconds(inline)}
    ratios = [a / b for a, b in zip(fleet, inline, strict=True)]
    return Row(f"width {dim}", ratios, limit, CLAIMS.get(dim), beside)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--dims", type=int, nargs="+", default=list(CLAIMS), help="widths of the model")
    flags.add_argument("--steps", type=int, default=40, help="in one repeat")
    flags.add_argument("--warm", type=int, default=10, help="the first of these, which do not count")
    flags.add_argument("--repeats", type=int, default=5, help="of each side")
    flags.add_argument("--stages", type=int, default=4, help="block stages of one layer each")
    flags.add_argument("--microbatches", type=int, default=8)
    flags.add_argument("--microbatch-size", type=int, default=4)
    given = flags.parse_args()
    rows = [row_of(given, dim) for dim in given.dims]
    return conclude(NAME, given, rows, ["measured: processor time of all workers / of the one process"])


if __name__ == "__main__":
    start(main)
