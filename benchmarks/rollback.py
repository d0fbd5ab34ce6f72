"""Checkpoint rollback: steps repeated at CheckFree's failure rates, and the hours of its Table 2."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.common import RUNS, Cell, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data
from planaria.common.errors import UserError
from planaria.config.schema import CheckpointConfig, ModelConfig, PipelineConfig, RecoveryConfig, RunConfig, TrainConfig
from planaria.data.shards import prepare
from planaria.faults.generating import generate, per_step_probability
from planaria.lab.compare.race import race
from planaria.recovery.checkpoint import Rollback, best_steps, rollback, rollback_mean

ROLLBACK_NAME = "rollback"
STAGES = 6
NEEDED = {
    100: {0.0009: 1.31, 0.002: 1.74, 0.004: 2.64},
    10: {0.0009: 1.03, 0.002: 1.06, 0.004: 1.11},
}
"""steps between checkpoints → failures per stage and step → steps that are carried out for each useful one"""
REAL = Claim(low=0.98, high=1.02)
TRACE = 10
"""length of a trace, in useful steps: twice what the highest of the rates needs at the longest interval"""


def lost_stages(p: float, seed: int, ticks: int, stages: int = STAGES) -> dict[int, list[int]]:
    """Tick → the block stages that fail before it, each with probability ``p``."""
    lost: dict[int, list[int]] = defaultdict(list)
    for fault in generate(seed, p, 3600.0, stages, ticks, exempt=set(), forbid_adjacent=False).faults:
        lost[fault.step].append(fault.stage)
    return lost


def struck(p: float, seed: int, useful: int, stages: int = STAGES) -> frozenset[int]:
    """Ticks before which a stage fails, far enough into the future for :func:`simulated`."""
    return frozenset(lost_stages(p, seed, TRACE * useful, stages))


def simulated(useful: int, every: int, faults: frozenset[int], by_steps: bool = False) -> Rollback:
    """Rollback on a trace; checkpoints count steps that were carried out, or committed ones ``by_steps``.

    :raises UserError: when the trace ends before the work does, and the rest would look free of failures.
    """
    outcome = rollback(useful, every, faults, "steps" if by_steps else "ticks")
    if outcome.ticks > TRACE * useful:
        raise UserError(f"{useful} steps with a checkpoint every {every} outlast the trace; give more steps")
    return outcome


def simulated_row(given: argparse.Namespace, every: int, p: float, needed: float) -> Row:
    """One interval and rate."""
    traces = [struck(p, seed, given.useful) for seed in range(1, given.traces + 1)]
    ratios, by_steps = (
        [simulated(given.useful, every, faults, committed).ticks / given.useful for faults in traces]
        for committed in (False, True)
    )
    any_stage = 1.0 - (1.0 - p) ** STAGES
    return Row(
        what=f"every {every}, p = {p:g}",
        values=[statistics.mean(ratios)],
        limit=f"{rollback_mean(every, any_stage, 'ticks'):.3f} expected",
        claim=Claim(low=round(0.95 * needed, 4), high=round(1.05 * needed, 4)),
        beside={
            "known": needed,
            "each trace": f"{min(ratios):.2f} … {max(ratios):.2f} of {len(ratios)}",
            "by committed steps": f"{statistics.mean(by_steps):.2f}",
            "expected so": f"{rollback_mean(every, any_stage):.2f}",
        },
    )


def recipe(every: int, seed: int, useful: int, ticks: int) -> RunConfig:
    """A model of a few thousand parameters; the only validation is after ``useful`` steps, and tells the tick."""
    return RunConfig(
        name=ROLLBACK_NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=VOCAB, dim=8, layers=STAGES, heads=2, hidden=16, context=8),
        pipeline=PipelineConfig(stages=STAGES, microbatches=1, microbatch_size=1),
        data=bytes_data(64),
        train=TrainConfig(steps=ticks, eval_every=useful, eval_microbatches=1),
        recovery=RecoveryConfig(strategy="checkpoint"),
        checkpoint=CheckpointConfig(every=every),
    )


def real_row(given: argparse.Namespace, every: int, seed: int) -> Row:
    """Train until ``given.real`` steps have lasted, or for as long as the claim allows."""
    lost = lost_stages(given.real_p, seed, TRACE * given.real)
    foreseen = simulated(given.real, every, frozenset(lost), by_steps=True)
    config = recipe(every, seed, given.real, int(foreseen.ticks * (REAL.high or 1.0)) + 1)
    course = race(config, prepare(config.data, config.model.vocab), lost, lambda tick, loss: None)
    ticks = [point.tick for point in course.points if point.step == given.real][:1]
    print(f"every {every}, seed {seed}: {ticks or 'not'} of {foreseen.ticks} foreseen ticks", flush=True)
    met = [met for met in course.met if met.tick < foreseen.ticks]
    return Row(
        what=f"trained, every {every}, seed {seed}",
        values=[tick / foreseen.ticks for tick in ticks],
        limit="the simulation: 1",
        claim=REAL,
        beside={"each trace": f"rollbacks {len(met)}, steps lost {sum(m.steps_lost for m in met)}"},
    )


def run_rollback() -> int:
    """What rolling back costs: steps that must be carried out for each one that lasts, by failure rate and interval.

    Whenever one of six stages fails, all go back to the last checkpoint. The claims, over 10,000 useful steps and
    twelve traces: with a checkpoint every 100 steps 1.31, 1.74 and 2.64 times as many are needed at 0.0009, 0.002 and
    0.004 failures per stage and step (CheckFree's rates, arXiv 2506.15461), and with one every 10 steps 1.03, 1.06 and
    1.11, each within 5 %; and a small model that really trains and rolls back needs what the simulation says of its
    trace, within 2 %.
    """
    flags = parser(ROLLBACK_NAME, run_rollback.__doc__)
    flags.add_argument("--useful", type=int, default=10_000, help="steps that must last, simulated")
    flags.add_argument("--traces", type=int, default=12, help="simulated for each interval and rate")
    flags.add_argument("--real", type=int, default=1000, help="steps that must last, really trained")
    flags.add_argument("--real-p", type=float, default=0.004, help="failures per stage and step in training")
    flags.add_argument("--real-every", type=int, nargs="+", default=[10, 40], help="steps between checkpoints there")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the model and the trace there")
    given = flags.parse_args()
    rows = [simulated_row(given, every, p, x) for every, by_rate in NEEDED.items() for p, x in by_rate.items()]
    rows += [real_row(given, every, seed) for every in given.real_every for seed in given.seeds]
    notes = [
        "simulated: steps carried out / useful steps, mean of the traces",
        f"trained: steps carried out / simulated ones, until {given.real} have lasted, p = {given.real_p:g}",
        "a checkpoint every so many steps that were carried out; planaria counts committed ones (two columns)",
    ]
    return conclude(ROLLBACK_NAME, given, rows, notes)


TABLE2_NAME = "table2"
HOUR = 3600.0
USEFUL = 10_000
"""iterations without failures to the loss of 2.85: those of redundancy, 419.56 h at 151.04 s"""
REDUNDANT_S, REDUNDANT_H = 151.04, 419.56
SAVED_EVERY = 100
"""iterations between checkpoints, as published for this size"""
CUTS = (STAGES, 2 * STAGES)
"""block stages of the paper, of four layers each, and of the published configuration now, of two"""
VALIDATED = 500
"""iterations between validations, so what the loss of 2.85 is known to"""


@dataclass(frozen=True)
class Rate:
    """One rate of the table, as published. Times of an iteration in seconds, of training in hours."""

    hourly: float
    p: float
    """failures per stage and iteration that the training was given"""
    checkpoint_s: float
    checkpoint_h: float
    checkfree_s: float
    """CheckFree's and CheckFree+'s alike"""
    checkfree: int
    """iterations"""
    checkfree_h: float
    plus: int
    plus_h: float

    @property
    def formula_p(self) -> float:
        """What the hourly rate comes to in one iteration."""
        return per_step_probability(self.hourly, self.checkpoint_s)

    def break_even(self, hours: float) -> float:
        """Redundancy takes fewer than ``hours`` while its iteration takes less than so many plain ones."""
        return hours * HOUR / (USEFUL * self.checkfree_s)


RATES = (
    Rate(0.05, 0.0009, 91.35, 558.23, 91.32, 14_500, 367.81, 14_000, 355.13),
    Rate(0.10, 0.002, 91.35, 621.67, 91.32, 16_000, 405.87, 14_500, 367.81),
    Rate(0.16, 0.004, 92.14, 634.35, 92.12, 22_000, 562.96, 18_000, 460.60),
)


@dataclass(frozen=True)
class Policy:
    """How often a checkpoint is made, and the seconds that uploading it stops training for, as reading it back does.

    ``every`` None is the best interval for the rate and the upload.
    """

    every: int | None
    upload_s: float
    """of a stage, where there are six; smaller ones take as much less"""
    stages: int

    @property
    def stands_s(self) -> float:
        """Seconds of one upload: all stages at the same time, each its own."""
        return self.upload_s * STAGES / self.stages

    def interval(self, rate: Rate, p: float) -> int:
        """Iterations between checkpoints."""
        hourly = 1.0 - (1.0 - p) ** (HOUR / rate.checkpoint_s)
        return self.every or best_steps(hourly, self.stages, rate.checkpoint_s, self.stands_s)

    def hours(self, rate: Rate, p: float, traces: Sequence[frozenset[int]], by_steps: bool = False) -> list[float]:
        """Of training, for each trace drawn with ``p``."""
        outcomes = [simulated(USEFUL, self.interval(rate, p), trace, by_steps) for trace in traces]
        return [(o.ticks * rate.checkpoint_s + (o.saves + o.rollbacks) * self.stands_s) / HOUR for o in outcomes]

    def expected(self, rate: Rate, counted: Literal["steps", "ticks"]) -> float:
        """Mean hours in closed form, without uploads and downloads."""
        any_stage = 1.0 - (1.0 - rate.p) ** self.stages
        return USEFUL * rollback_mean(self.interval(rate, rate.p), any_stage, counted) * rate.checkpoint_s / HOUR

    def committed(self, rate: Rate, traces: Sequence[frozenset[int]]) -> str:
        """Hours when checkpoints count iterations that lasted; what to expect where that would outlast the traces."""
        if self.expected(rate, "steps") > TRACE / 2 * USEFUL * rate.checkpoint_s / HOUR:
            return f"{self.expected(rate, 'steps'):.0f} expected"
        return f"{statistics.mean(self.hours(rate, rate.p, traces, by_steps=True)):.1f}"

    def row(self, rate: Rate, traces: Sequence[frozenset[int]], by_formula: Sequence[frozenset[int]]) -> Row:
        """This policy at this rate, with both failure probabilities."""
        hours = self.hours(rate, rate.p, traces)
        formula = self.hours(rate, rate.formula_p, by_formula)
        published = rate.checkpoint_h if self.every == SAVED_EVERY else None
        intervals = dict.fromkeys(str(self.interval(rate, p)) for p in (rate.p, rate.formula_p))
        name = f"saved every {self.every}" if self.every else f"saved best: {' or '.join(intervals)}"
        claimed = self.every is None or self.every <= 10
        return Row(
            what=f"{rate.hourly:.0%} {self.stages} stages, {name}, {self.stands_s:g} s",
            values=[statistics.mean(hours)],
            limit=f"{USEFUL * rate.checkpoint_s / HOUR:.0f}: no failure",
            claim=Claim(high=rate.plus_h) if claimed else None,
            beside=_beside(rate, statistics.mean(hours), published)
            | {
                "without uploads": f"{self.expected(rate, 'ticks'):.0f}",
                "p by formula": f"{statistics.mean(formula):.1f}",
                "committed": self.committed(rate, traces),
            },
        )


def _beside(rate: Rate, hours: float, published: float | None) -> dict[str, Cell]:
    """The published hours, how far the recomputed ones are from them, and what redundancy may cost to beat them."""
    parted = "" if published is None else f"{hours / published - 1.0:+z.1%}"
    shown = "" if published is None else f"{published:.2f}"
    return {"published": shown, "parts by": parted, "break-even": f"{rate.break_even(hours):.2f}"}


def redundant_row() -> Row:
    """The same at every rate: nothing is lost."""
    hours = USEFUL * REDUNDANT_S / HOUR
    return Row(
        what="any  redundant",
        values=[hours],
        limit="",
        claim=Claim(low=REDUNDANT_H - 0.01, high=REDUNDANT_H + 0.01),
        beside=_beside(RATES[0], hours, REDUNDANT_H) | {"break-even": ""},
    )


def rate_rows(given: argparse.Namespace, rate: Rate) -> list[Row]:
    """Every arm at one rate."""
    seeds, rows = range(1, given.traces + 1), list[Row]()
    for stages in CUTS:
        traces, by_formula = ([struck(p, seed, USEFUL, stages) for seed in seeds] for p in (rate.p, rate.formula_p))
        policies = [Policy(every, given.upload_s, stages) for every in (SAVED_EVERY, 50, 10, None)]
        rows += [policy.row(rate, traces, by_formula) for policy in [*policies, Policy(None, 0.0, stages)]]
    arms = {"CheckFree": (rate.checkfree, rate.checkfree_h), "CheckFree+": (rate.plus, rate.plus_h)}
    for arm, (iterations, published) in arms.items():
        hours = iterations * rate.checkfree_s / HOUR
        what = f"{rate.hourly:.0%} {arm}, {iterations:,} iterations"
        rows.append(Row(what, [hours], "as published", beside=_beside(rate, hours, published)))
    return rows


def cells() -> list[tuple[str, float, float]]:
    """Every cell of hours in the table: whose it is, its hours, and the seconds of an iteration beside it."""
    found = [("any  redundant", REDUNDANT_H, REDUNDANT_S)]
    for rate in RATES:
        found += [
            (f"{rate.hourly:.0%} checkpoint", rate.checkpoint_h, rate.checkpoint_s),
            (f"{rate.hourly:.0%} CheckFree", rate.checkfree_h, rate.checkfree_s),
            (f"{rate.hourly:.0%} CheckFree+", rate.plus_h, rate.checkfree_s),
        ]
    return found


def cell_rows() -> list[Row]:
    """Iterations that each cell's hours come to, and how far these are from the nearest validation: 0 where the cell
    follows from the seconds beside it, and hours that are rounded to 0.01 (36 s)."""
    rows = []
    for whose, hours, seconds in cells():
        iterations = hours * HOUR / seconds
        away = iterations - VALIDATED * round(iterations / VALIDATED)
        odd = whose == ODD
        claim = Claim(low=VALIDATED / 4) if odd else Claim(high=1.0)
        limit = f"of {VALIDATED}; {iterations:,.1f} iterations"
        rows.append(Row(f"{whose}: hours × 3600 / its seconds, from a validation", [abs(away)], limit, claim))
    return rows


ODD = f"{RATES[-1].hourly:.0%} checkpoint"
"""the cell that does not follow from the seconds beside it, but from those of the lower rates: 25,000 × 91.35 s"""


def explaining_p(rate: Rate, stages: int) -> float:
    """The p per stage and iteration that would explain the published hours of checkpointing."""
    low, high = 0.0, 0.1
    ratio = rate.checkpoint_h * HOUR / (USEFUL * rate.checkpoint_s)
    for _ in range(50):
        p = (low + high) / 2.0
        needed = rollback_mean(SAVED_EVERY, 1.0 - (1.0 - p) ** stages, "ticks")
        low, high = (p, high) if needed < ratio else (low, p)
    return low


def run_table2() -> int:
    """Recompute CheckFree's Table 2 (arXiv 2506.15461): training hours of a 500M model, by strategy.

    Taken from the paper: seconds of an iteration, failure rates, hours (alike in its versions 1 and 2). Recomputed:
    checkpointing, by simulating its rollbacks until the iterations of a run without failures have lasted; and
    redundancy, whose iterations are those. What CheckFree and CheckFree+ need only training can tell: their iterations
    are taken as published. Twice: for six block stages of four layers, as the paper has it, and twelve of two, as the
    published configuration has it since March 2026: twice as many that can fail. The claims: 10,000 iterations without
    failures are what redundancy's hours say; hours are iterations in whole validations times the seconds beside them,
    but for one cell; a checkpoint every 10 iterations, or at the best interval, with its uploads and downloads paid
    for, needs fewer hours than CheckFree+ is published with, at every rate and with either number of stages.
    """
    flags = parser(TABLE2_NAME, run_table2.__doc__)
    flags.add_argument(
        "--upload-s",
        type=float,
        default=12.9,
        help="seconds of an upload of one of six stages, half for twelve; 12.9: with moments, 805 MB, at 500 Mbit/s",
    )
    flags.add_argument("--traces", type=int, default=12, help="simulated for each rate and p")
    given = flags.parse_args()
    rows = [redundant_row(), *(row for rate in RATES for row in rate_rows(given, rate)), *cell_rows()]
    explained = [
        ", ".join(f"{explaining_p(rate, stages):.4f} at {rate.hourly:.0%}" for rate in RATES) for stages in CUTS
    ]
    given_p = "; ".join(f"{rate.hourly:.0%}: {rate.p:g}, by formula {rate.formula_p:.5f}" for rate in RATES)
    notes = [
        "measured: hours, mean of the traces, with the p that the paper's training was given; checkpoints count",
        "  iterations that were carried out, as published (committed: only those that lasted, as planaria does)",
        f"p per stage and iteration: {given_p}",
        *(
            f"the published hours of checkpoints every {SAVED_EVERY} would take p = {p}, with {stages} stages"
            for stages, p in zip(CUTS, explained, strict=True)
        ),
        "without uploads: the mean in closed form, of iterations alone",
        "saved best: iterations between checkpoints, with either p; after the comma: seconds of an upload",
        "break-even: redundancy takes fewer hours than the arm while its iteration takes less than so many plain",
        f"  ones; as published it takes {' / '.join(f'{REDUNDANT_S / rate.checkfree_s:.2f}' for rate in RATES)}",
    ]
    return conclude(TABLE2_NAME, given, rows, notes)


if __name__ == "__main__":
    start(rollback=run_rollback, table2=run_table2)
