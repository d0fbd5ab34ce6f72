"""What swapped routing (CheckFree+) buys and costs: the loss of a first or last block stage, and steps to equal loss.

Two models start from the same weights and read the same data; one is trained in natural order, in the other half of the
microbatches meet the two outer stages at either end in swapped order. Then the first block stage becomes a copy of the
second, or the last one a copy of the last but one. The claims: in the swapped model the first stage's loss does at most
0.2 of the harm at once that it does in the other, the last stage's at most 0.5; and without any loss the swapped model
takes at most 1.35 times as many steps to the same validation loss.

The models read bytes, of which they learn enough in so few steps for the last stage to matter at all. Its claim is the
doubtful one: trials at other sizes, seeds and learning rates gave 0.37 to 1.06, since losing it does little harm (0.1
to 0.3 nats) under either routing. The first stage's needs two layers a stage: with one, trials gave 0.15 to 0.54.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.ladder import engine_for
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from planaria.data.shards import prepare
from planaria.lab.compare.race import Point
from planaria.lab.compare.race_results import smoothed, ticks_to
from planaria.lab.compare.race_spec import SMOOTHED

NAME = "edges"
FIRST, LAST, STEPS = Claim(high=0.2), Claim(high=0.5), Claim(high=1.35)
VOCAB = 260
"""ids of bytes, and some"""
ROUTINGS = ("full", "swapped")


@dataclass(frozen=True)
class Course:
    """One model: its validations, and how much worse it is at once without its first and its last block stage."""

    points: list[Point]
    first: float
    last: float


def recipe(given: argparse.Namespace, seed: int, routing: str) -> RunConfig:
    """Two layers a stage; half of the microbatches are one of two."""
    return RunConfig(
        name=NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=VOCAB, dim=given.dim, layers=2 * given.stages, hidden=given.dim * 11 // 4, context=96),
        data=DataConfig(tokenizer="bytes"),
        pipeline=PipelineConfig(stages=given.stages, microbatches=2, microbatch_size=given.samples // 2),
        routing=RoutingConfig(kind=routing),
        optim=OptimConfig(lr=2e-3, warmup=20),
        train=TrainConfig(steps=given.steps),
        recovery=RecoveryConfig(strategy="copy"),
    )


def train(given: argparse.Namespace, seed: int, routing: str) -> Course:
    """Train one model, then lose either edge of it."""
    engine = engine_for(recipe(given, seed, routing))
    points = []
    for step in range(1, given.steps + 1):
        engine.train_step()
        if step % given.every == 0:
            points.append(Point(tick=step, step=step, loss=engine.evaluate()))
    whole, state = engine.evaluate(), {s: copy.deepcopy(runner.state()) for s, runner in engine.runners.items()}
    harm = []
    for stage in (1, given.stages):
        engine.become(state)
        if (plan := engine.lose([stage])).reason:
            raise RunStopped(plan.reason)
        harm.append(engine.evaluate() - whole)
    return Course(points, *harm)


def steps_ratio(full: list[Point], swapped: list[Point]) -> float:
    """Steps to equal loss, swapped over full: to the best loss that both reach."""
    target = max(min(loss for _, loss in smoothed(points)) for points in (full, swapped))
    ticks = [ticks_to(points, target) for points in (full, swapped)]
    assert ticks[0] is not None and ticks[1] is not None, "both reach the worse of their best losses"
    return ticks[1] / ticks[0]


def rows_of(pairs: list[tuple[Course, Course]], stages: int) -> list[Row]:
    """The three claims, a value for each seed; ``pairs`` are (full, swapped)."""
    rows = []
    for what, claim, side in (("stage 1", FIRST, "first"), (f"stage {stages}", LAST, "last")):
        harms = [(getattr(full, side), getattr(swapped, side)) for full, swapped in pairs]
        rows.append(
            Row(
                what=f"{what} lost, copied from its partner",
                values=[swapped / full for full, swapped in harms],
                limit="no harm: 0",
                claim=claim,
                beside={
                    "full": f"{statistics.mean(full for full, _ in harms):+.3f}",
                    "swapped": f"{statistics.mean(swapped for _, swapped in harms):+.3f}",
                },
            )
        )
    finals = [statistics.mean(smoothed(each[side].points)[-1][1] for each in pairs) for side in (0, 1)]
    ratios = [steps_ratio(full.points, swapped.points) for full, swapped in pairs]
    beside = {"full": f"loss {finals[0]:.3f}", "swapped": f"loss {finals[1]:.3f}"}
    return [*rows, Row("steps to equal loss", ratios, "none known", STEPS, beside)]


def measure(given: argparse.Namespace) -> list[tuple[Course, Course]]:
    """Both models of every seed."""
    arms = list(product(given.seeds, ROUTINGS))
    seeds, routings = [seed for seed, _ in arms], [routing for _, routing in arms]
    courses: list[Course] = []
    with ProcessPoolExecutor(given.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for arm, course in zip(arms, pool.map(train, repeat(given), seeds, routings), strict=True):
            courses.append(course)
            loss = course.points[-1].loss
            print(
                f"seed {arm[0]}, {arm[1]}: loss {loss:.3f}, stage 1 lost {course.first:+.3f}, "
                f"stage {given.stages} lost {course.last:+.3f}",
                flush=True,
            )
    return list(zip(courses[::2], courses[1::2], strict=True))


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=500)
    flags.add_argument("--every", type=int, default=25, help=f"steps between validations; {SMOOTHED} make one loss")
    flags.add_argument("--stages", type=int, default=6, help="block stages of two layers each")
    flags.add_argument("--dim", type=int, default=64, help="width of the model; 64 is 0.6 million parameters")
    flags.add_argument("--samples", type=int, default=20, help="in one step, of 96 bytes each")
    flags.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    given = flags.parse_args()
    if given.steps < SMOOTHED * given.every:
        raise UserError(
            f"--steps {given.steps}: a loss is the mean of {SMOOTHED} validations; lower --every or train on"
        )
    prepare(recipe(given, 0, "full").data, VOCAB, print)
    notes = [
        "measured: swapped / full, the median seed",
        "full, swapped: validation loss minus that of the same model at the same step with all its stages, nats per "
        "byte, mean of the seeds; in the last row validation losses at the end",
    ]
    return conclude(NAME, given, rows_of(measure(given), given.stages), notes)


if __name__ == "__main__":
    start(main)
