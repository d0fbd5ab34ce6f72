"""What swapped routing (CheckFree+) buys and costs: the loss of a first or last block stage, and steps to equal loss.

Two models start from the same weights and read the same data; one is trained in natural order, in the other half of the
microbatches meet the two outer stages at either end in swapped order. Then the first block stage becomes a copy of the
second, or the last one a copy of the last but one. The claims: in the swapped model the first stage's loss does at most
0.2 of the harm at once that it does in the other, the last stage's at most 0.5; and without any loss the swapped model
takes at most 1.35 times as many steps to the same validation loss.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat

from benchmarks import ladder
from benchmarks.common import Claim, Row, conclude, parser, start
from planaria.compare.race import Point
from planaria.compare.results import smoothed, ticks_to
from planaria.compare.spec import SMOOTHED
from planaria.config import RecoveryConfig
from planaria.data.shards import prepare
from planaria.errors import RunStopped, UserError

NAME = "edges"
FIRST, LAST, STEPS = Claim(high=0.2), Claim(high=0.5), Claim(high=1.35)
ROUTINGS = ("full", "swapped")
COPY = RecoveryConfig(strategy="copy")
"""for a first or last block stage, of its partner under either routing"""


@dataclass(frozen=True)
class Course:
    """One model: its validations, and how much worse it is at once without its first and its last block stage."""

    points: list[Point]
    first: float
    last: float


def train(given: argparse.Namespace, seed: int, routing: str) -> Course:
    """Train one model, then lose either edge of it."""
    engine = ladder.engine_for(ladder.recipe(given, seed, COPY, routing))
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
                judged="worst",
            )
        )
    finals = [statistics.mean(smoothed(each[side].points)[-1][1] for each in pairs) for side in (0, 1)]
    ratios = [steps_ratio(full.points, swapped.points) for full, swapped in pairs]
    beside = {"full": f"loss {finals[0]:.3f}", "swapped": f"loss {finals[1]:.3f}"}
    return [*rows, Row("steps to equal loss", ratios, "none known", STEPS, beside, judged="worst")]


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
    flags.add_argument("--steps", type=int, default=600)
    flags.add_argument("--every", type=int, default=20, help=f"steps between validations; {SMOOTHED} make one loss")
    ladder.add_model_flags(flags)
    given = flags.parse_args()
    if given.steps < SMOOTHED * given.every:
        raise UserError(
            f"--steps {given.steps}: a loss is the mean of {SMOOTHED} validations; lower --every or train on"
        )
    prepare(ladder.recipe(given, 0, COPY).data, given.vocab, print)
    notes = [
        "measured: swapped / full, worst seed",
        "full, swapped: validation loss minus that of the same model at the same step with all its stages, nats per "
        "token, mean of the seeds; in the last row validation losses at the end",
    ]
    return conclude(NAME, given, rows_of(measure(given), given.stages), notes)


if __name__ == "__main__":
    start(main)
