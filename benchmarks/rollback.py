"""What rolling back costs: steps that must be carried out for each one that lasts, by failure rate and interval.

Whenever one of six stages fails, all go back to the last checkpoint. The claims, over 10,000 useful steps and twelve
traces: with a checkpoint every 100 steps 1.31, 1.74 and 2.64 times as many are needed at 0.0009, 0.002 and 0.004
failures per stage and step (CheckFree's rates, arXiv 2506.15461), and with one every 10 steps 1.03, 1.06 and 1.11, each
within 5 %; and a small model that really trains and rolls back needs what the simulation says of its trace, within 2 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data
from planaria.common.errors import UserError
from planaria.config.schema import CheckpointConfig, ModelConfig, PipelineConfig, RecoveryConfig, RunConfig, TrainConfig
from planaria.data.shards import prepare
from planaria.faults.generating import generate
from planaria.lab.compare.race import race
from planaria.recovery.checkpoint import Rollback, rollback, rollback_mean

NAME = "rollback"
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
        name=NAME,
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
