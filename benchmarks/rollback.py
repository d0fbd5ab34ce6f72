"""Checkpoint rollback: steps repeated at CheckFree's failure rates, and the hours of its Table 2."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from benchmarks.common import run_config
from benchmarks.fleet_run import VOCAB, bytes_data
from benchmarks.harness import Cell, Claim, Flag, Measurement, Result, Row, benchmark, start
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.data.shards import prepare
from planaria.faults.trace_generation import generate, per_step_probability
from planaria.lab.compare.race import race
from planaria.recovery.checkpoint import RollbackCost, best_steps, rollback, rollback_mean

STAGES = 6
NEEDED = {
    100: {0.0009: 1.31, 0.002: 1.74, 0.004: 2.64},
    10: {0.0009: 1.03, 0.002: 1.06, 0.004: 1.11},
}
"""steps between checkpoints → failures per stage and step → steps per useful one"""
REAL = Claim(low=0.98, high=1.02)
TRACE = 10  # length of a trace in useful steps: twice the need of the highest rate and longest interval


def lost_stages(p: float, seed: int, ticks: int, stages: int = STAGES) -> dict[int, list[int]]:
    """Map ticks to the block stages that fail before them, each with probability ``p``."""
    lost: dict[int, list[int]] = defaultdict(list)
    for fault in generate(seed, p, 3600.0, stages, ticks, exempt=set(), forbid_adjacent=False).faults:
        lost[fault.step].append(fault.stage)
    return lost


def struck(p: float, seed: int, useful: int, stages: int = STAGES) -> frozenset[int]:
    """Return the ticks before which a stage fails, long enough for :func:`simulated`."""
    return frozenset(lost_stages(p, seed, TRACE * useful, stages))


def simulated(useful: int, every: int, faults: frozenset[int], by_steps: bool = False) -> RollbackCost:
    """Simulate rollback on a trace; checkpoints count executed steps, or committed ones ``by_steps``.

    :raises UserError: if the trace ends before the work.
    """
    outcome = rollback(useful, every, faults, "steps" if by_steps else "ticks")
    if outcome.ticks > TRACE * useful:
        raise UserError(f"{useful} steps with a checkpoint every {every} outlast the trace; give more steps")
    return outcome


def simulated_row(given: Namespace, every: int, p: float, needed: float) -> Row:
    traces = [struck(p, seed, given.useful) for seed in range(1, given.traces + 1)]
    over, by_steps = (
        [simulated(given.useful, every, faults, committed).ticks / given.useful for faults in traces]
        for committed in (False, True)
    )
    any_stage = 1.0 - (1.0 - p) ** STAGES
    limit = f"{rollback_mean(every, any_stage, 'ticks'):.3f} expected"
    beside: dict[str, Cell] = {
        "known": needed,
        "each trace": f"{min(over):.2f} … {max(over):.2f} of {len(over)}",
        "by committed steps": f"{fmean(by_steps):.2f}",
        "expected so": f"{rollback_mean(every, any_stage):.2f}",
    }
    claim = Claim(low=round(0.95 * needed, 4), high=round(1.05 * needed, 4))
    return Row(f"every {every}, p = {p:g}", [fmean(over)], limit, claim, beside)


def recipe(every: int, seed: int, useful: int, ticks: int) -> RunConfig:
    """A tiny model; its only validation, after ``useful`` steps, gives the tick."""
    return run_config(
        "rollback",
        seed=seed,
        model={"vocab": VOCAB, "dim": 8, "layers": STAGES, "heads": 2, "hidden": 16, "context": 8},
        pipeline={"stages": STAGES, "microbatches": 1, "microbatch_size": 1},
        data=bytes_data(64),
        train={"steps": ticks, "eval_every": useful, "eval_microbatches": 1},
        recovery={"strategy": "checkpoint"},
        checkpoint={"every": every},
    )


def real_row(given: Namespace, every: int, seed: int) -> Row:
    """Train until ``given.real`` steps are final, or as long as the claim allows."""
    lost = lost_stages(given.real_p, seed, TRACE * given.real)
    foreseen = simulated(given.real, every, frozenset(lost), by_steps=True)
    config = recipe(every, seed, given.real, int(foreseen.ticks * (REAL.high or 1.0)) + 1)
    course = race(config, prepare(config.data, config.model.vocab), lost, lambda tick, loss: None)
    ticks = [point.tick for point in course.points if point.step == given.real][:1]
    print(f"every {every}, seed {seed}: {ticks or 'not'} of {foreseen.ticks} foreseen ticks", flush=True)
    met = [met for met in course.met if met.tick < foreseen.ticks]
    beside = {"each trace": f"rollbacks {len(met)}, steps lost {sum(m.steps_lost for m in met)}"}
    over = [tick / foreseen.ticks for tick in ticks]
    return Row(f"trained, every {every}, seed {seed}", over, "the simulation: 1", REAL, beside)


@benchmark(
    "rollback",
    useful=Flag(10_000, "steps that must last, simulated"),
    traces=Flag(12, "simulated for each interval and rate"),
    real=Flag(1000, "steps that must last, really trained"),
    real_p=Flag(0.004, "failures per stage and step in training"),
    real_every=Flag([10, 40], "steps between checkpoints there"),
    seeds=Flag([1, 2, 3], "of the model and the trace there"),
)
def run_rollback(given: Namespace) -> Measurement:
    """Measure the steps executed per useful step with rollbacks, by failure rate and checkpoint interval.

    Whenever one of six stages fails, all return to the last checkpoint. Claims, over 10,000 useful steps and twelve
    traces, within 5 %: with a checkpoint every 100 steps 1.31, 1.74 and 2.64 at 0.0009, 0.002 and 0.004 failures per
    stage and step (CheckFree's rates, arXiv 2506.15461), every 10 steps 1.03, 1.06 and 1.11; a small model that really
    trains and rolls back needs the simulated steps within 2 %.
    """
    rows = [simulated_row(given, every, p, x) for every, by_rate in NEEDED.items() for p, x in by_rate.items()]
    rows += [real_row(given, every, seed) for every in given.real_every for seed in given.seeds]
    notes = [
        "simulated: steps carried out / useful steps, mean of the traces",
        f"trained: steps carried out / simulated ones, until {given.real} have lasted, p = {given.real_p:g}",
        "a checkpoint interval in executed steps; planaria counts committed ones (two columns)",
    ]
    return Result(rows, notes)


HOUR = 3600.0
USEFUL = 10_000  # iterations to a loss of 2.85 without failures: redundancy's, 419.56 h at 151.04 s
REDUNDANT_S, REDUNDANT_H = 151.04, 419.56
SAVED_EVERY = 100  # iterations between checkpoints, as published for this size
CUTS = (STAGES, 2 * STAGES)
"""block stages of the paper (four layers each) and of the present published configuration (two)"""
VALIDATED = 500  # iterations between validations, the resolution of the published iterations


@dataclass(frozen=True)
class Rate:
    """One published rate of the table; seconds per iteration, hours of training."""

    hourly: float
    p: float  # failures per stage and iteration in the paper's training
    checkpoint_s: float
    checkpoint_h: float
    checkfree_s: float  # CheckFree and CheckFree+
    checkfree: int  # iterations
    checkfree_h: float
    plus: int
    plus_h: float

    @property
    def formula_p(self) -> float:
        """Return the hourly rate per iteration."""
        return per_step_probability(self.hourly, self.checkpoint_s)

    def break_even(self, hours: float) -> float:
        """Return the cost of redundancy's iteration, in plain ones, below which it takes fewer than ``hours``."""
        return hours * HOUR / (USEFUL * self.checkfree_s)


RATES = (
    Rate(0.05, 0.0009, 91.35, 558.23, 91.32, 14_500, 367.81, 14_000, 355.13),
    Rate(0.10, 0.002, 91.35, 621.67, 91.32, 16_000, 405.87, 14_500, 367.81),
    Rate(0.16, 0.004, 92.14, 634.35, 92.12, 22_000, 562.96, 18_000, 460.60),
)


@dataclass(frozen=True)
class Policy:
    """The interval of checkpoints (None: the best) and the seconds of an upload or download, which stop training."""

    every: int | None
    upload_s: float  # of one of six stages; proportional to the stage's size
    stages: int

    @property
    def stands_s(self) -> float:
        """Return the seconds of one upload, all stages at once."""
        return self.upload_s * STAGES / self.stages

    def interval(self, rate: Rate, p: float) -> int:
        """Return the iterations between checkpoints."""
        hourly = 1.0 - (1.0 - p) ** (HOUR / rate.checkpoint_s)
        return self.every or best_steps(hourly, self.stages, rate.checkpoint_s, self.stands_s)

    def hours(self, rate: Rate, p: float, traces: Sequence[frozenset[int]], by_steps: bool = False) -> list[float]:
        """Return the hours of training for each trace."""
        outcomes = [simulated(USEFUL, self.interval(rate, p), trace, by_steps) for trace in traces]
        return [(o.ticks * rate.checkpoint_s + (o.saves + o.rollbacks) * self.stands_s) / HOUR for o in outcomes]

    def expected(self, rate: Rate, counted: Literal["steps", "ticks"]) -> float:
        """Return the mean hours in closed form, without transfers."""
        any_stage = 1.0 - (1.0 - rate.p) ** self.stages
        return USEFUL * rollback_mean(self.interval(rate, rate.p), any_stage, counted) * rate.checkpoint_s / HOUR

    def committed(self, rate: Rate, traces: Sequence[frozenset[int]]) -> str:
        """Return the hours with checkpoints by committed iterations, or the expectation if traces are too short."""
        if self.expected(rate, "steps") > TRACE / 2 * USEFUL * rate.checkpoint_s / HOUR:
            return f"{self.expected(rate, 'steps'):.0f} expected"
        return f"{fmean(self.hours(rate, rate.p, traces, by_steps=True)):.1f}"

    def row(self, rate: Rate, traces: Sequence[frozenset[int]], by_formula: Sequence[frozenset[int]]) -> Row:
        hours = self.hours(rate, rate.p, traces)
        formula = self.hours(rate, rate.formula_p, by_formula)
        published = rate.checkpoint_h if self.every == SAVED_EVERY else None
        intervals = dict.fromkeys(str(self.interval(rate, p)) for p in (rate.p, rate.formula_p))
        name = f"saved every {self.every}" if self.every else f"saved best: {' or '.join(intervals)}"
        claimed = self.every is None or self.every <= 10
        what = f"{rate.hourly:.0%} {self.stages} stages, {name}, {self.stands_s:g} s"
        beside = _beside(rate, fmean(hours), published) | {
            "without uploads": f"{self.expected(rate, 'ticks'):.0f}",
            "p by formula": f"{fmean(formula):.1f}",
            "committed": self.committed(rate, traces),
        }
        limit = f"{USEFUL * rate.checkpoint_s / HOUR:.0f}: no failure"
        return Row(what, [fmean(hours)], limit, Claim(high=rate.plus_h) if claimed else None, beside)


def _beside(rate: Rate, hours: float, published: float | None) -> dict[str, Cell]:
    """Return columns: published hours, deviation, and redundancy's break-even cost."""
    parted = "" if published is None else f"{hours / published - 1.0:+z.1%}"
    shown = "" if published is None else f"{published:.2f}"
    return {"published": shown, "parts by": parted, "break-even": f"{rate.break_even(hours):.2f}"}


def redundant_row() -> Row:
    hours = USEFUL * REDUNDANT_S / HOUR
    claim = Claim(low=REDUNDANT_H - 0.01, high=REDUNDANT_H + 0.01)
    beside = _beside(RATES[0], hours, REDUNDANT_H) | {"break-even": ""}
    return Row("any  redundant", [hours], "", claim, beside)


def rate_rows(given: Namespace, rate: Rate) -> list[Row]:
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
    """Return every cell of the table: name, hours, and seconds of an iteration."""
    found = [("any  redundant", REDUNDANT_H, REDUNDANT_S)]
    for rate in RATES:
        found += [
            (f"{rate.hourly:.0%} checkpoint", rate.checkpoint_h, rate.checkpoint_s),
            (f"{rate.hourly:.0%} CheckFree", rate.checkfree_h, rate.checkfree_s),
            (f"{rate.hourly:.0%} CheckFree+", rate.plus_h, rate.checkfree_s),
        ]
    return found


def cell_rows() -> list[Row]:
    """Check that each cell's hours are a whole number of validations times its seconds (hours are rounded to 0.01)."""
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
"""the cell computed from the seconds of the lower rates: 25,000 × 91.35 s"""


def explaining_p(rate: Rate, stages: int) -> float:
    """Return the p per stage and iteration that explains the published hours of checkpointing."""
    low, high = 0.0, 0.1
    ratio = rate.checkpoint_h * HOUR / (USEFUL * rate.checkpoint_s)
    for _ in range(50):
        p = (low + high) / 2.0
        needed = rollback_mean(SAVED_EVERY, 1.0 - (1.0 - p) ** stages, "ticks")
        low, high = (p, high) if needed < ratio else (low, p)
    return low


@benchmark(
    "table2",
    upload_s=Flag(12.9, "seconds to upload one of six stages; 12.9: 805 MB with moments at 500 Mbit/s"),
    traces=Flag(12, "simulated for each rate and p"),
)
def run_table2(given: Namespace) -> Measurement:
    """Recompute CheckFree's Table 2 (arXiv 2506.15461): training hours of a 500M model, by strategy.

    Published: seconds per iteration, failure rates, hours, and the iterations of CheckFree and CheckFree+. Recomputed:
    checkpointing, by simulated rollbacks, and redundancy, with the iterations of a failure-free run; for six block
    stages of four layers (the paper) and twelve of two (the published configuration since March 2026). Claims: 10,000
    failure-free iterations give redundancy's hours; all hours but one are whole validations times the seconds beside
    them; a checkpoint every 10 iterations, or at the best interval, transfers included, needs fewer hours than
    CheckFree+ at every rate.
    """
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
        "break-even: redundancy takes fewer hours than the arm while its iteration takes less than this many plain",
        f"  ones; as published it takes {' / '.join(f'{REDUNDANT_S / rate.checkfree_s:.2f}' for rate in RATES)}",
    ]
    return Result(rows, notes)


if __name__ == "__main__":
    start(rollback=run_rollback, table2=run_table2)
