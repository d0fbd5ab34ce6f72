"""Beside TRL: four peers of a swarm, one peer alone, and TRL's GRPOTrainer, on one machine and from one start model.

All learn the task `sums` by its own verifier, from the same problems in the same order, with as many completions in an
update, drawn alike and learned from by the same AdamW at a constant rate; what neither side is told is its default. The
rate is searched for TRL and for the one peer, on a seed apart (--search); the four peers take the one peer's. The start
model has been to school, and is given to all sides as a Hugging Face folder. Every process has one thread.

Processor time is that of all processes together, as the kernel counts it. The time of a run of one update, made just
before, is taken off as what it costs to start and end. Held-out sums are put to saved models afterwards, by one
examiner for all sides.

TRL lives in an environment of its own, and is never imported here. To make it, in the repository's root:

    python3 -m venv ../venv-trl && ../venv-trl/bin/pip install -c constraints.txt "trl>=1.16"
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.common import ROOT, Claim, Row, conclude, parser, start
from benchmarks.trl_runs import ALONE, FOUR, NAME, SIDES, TRL, Ran, ran, started
from planaria.common.errors import UserError

INSTALL = 'python3 -m venv ../venv-trl && ../venv-trl/bin/pip install -c constraints.txt "trl>=1.16"'
LEARNS, COSTS = Claim(low=-0.03), Claim(high=1.0)
Floats = Sequence[float]


def at(curve: Floats, place: float) -> float:
    """A curve at ``place``, counted in its points, with straight lines between them; its end beyond that."""
    left = min(int(place), len(curve) - 1)
    right = min(left + 1, len(curve) - 1)
    return curve[left] + (min(place, len(curve) - 1) - left) * (curve[right] - curve[left])


def searched(given: argparse.Namespace, begun: Path) -> tuple[dict[str, float], list[Row]]:
    """Each side's best rate by the mean of its curve on the seed of the search, and what was found on the way."""
    found: dict[str, dict[float, list[float]]] = {ALONE: {}, TRL: {}}
    for lr, side in itertools.product(given.rates, found):
        found[side][lr] = ran(given, side, begun, given.rounds, lr, given.search).curve
    best = {side: max(curves, key=lambda lr, of=curves: (fmean(of[lr]), -lr)) for side, curves in found.items()}
    rows = [
        Row(
            f"search, {side}: mean accuracy at the best rate",
            [fmean(curves[best[side]])],
            "all: 1",
            beside={f"rate {lr:g}": fmean(curve) for lr, curve in curves.items()},
        )
        for side, curves in found.items()
    ]
    return best | {FOUR: best[ALONE]}, rows


def less(one: Floats, other: Floats) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def per_update(runs: Sequence[Ran], short: Sequence[Ran], rounds: int) -> list[float]:
    """Processor seconds of one update, seed by seed: of runs of ``rounds``, less those of one."""
    return [(run.seconds - first.seconds) / (rounds - 1) for run, first in zip(runs, short, strict=True)]


def learning_rows(
    given: argparse.Namespace, runs: Mapping[str, Sequence[Ran]], cost: Mapping[str, Floats]
) -> list[Row]:
    """How much is learned: of as many completions, and of as much processor time as the cheapest side takes for them.

    ``runs``: of each side, seed by seed. ``cost``: processor seconds of their updates.
    """
    least = given.rounds * min(map(fmean, cost.values()))
    kinds: list[tuple[str, Claim | None, dict[str, list[float]]]] = [
        (
            f"accuracy after {given.rounds * given.prompts * given.group:,} completions",
            LEARNS,
            {side: [run.curve[-1] for run in found] for side, found in runs.items()},
        ),
        (
            "mean accuracy on the way there",
            LEARNS,
            {side: [fmean(run.curve) for run in found] for side, found in runs.items()},
        ),
        (
            f"accuracy after {least:.1f} CPU s of training",
            None,
            {
                side: [at(run.curve, least / c / given.every) for run, c in zip(found, cost[side], strict=True)]
                for side, found in runs.items()
            },
        ),
    ]
    rows = [Row("accuracy at the start", [run.curve[0] for run in runs[TRL]], "all: 1")]
    for what, claim, found in kinds:
        rows += [Row(f"{what}: {side}", found[side], "all: 1") for side in SIDES]
        rows += [
            Row(f"{what}: {side} less TRL", less(found[side], found[TRL]), "as TRL: 0", claim) for side in (ALONE, FOUR)
        ]
    return rows


def cost_rows(given: argparse.Namespace, short: Mapping[str, Sequence[Ran]], cost: Mapping[str, Floats]) -> list[Row]:
    """What learning takes, and what it takes to start. ``short``: runs with one update."""
    thousand = 1000 / (given.prompts * given.group)
    what = "CPU s of 1,000 completions, generated and learned from"
    rows = [Row(f"{what}: {side}", [thousand * c for c in cost[side]], "unknown") for side in SIDES]
    for side, claim in ((ALONE, COSTS), (FOUR, None)):
        ratios = [a / b for a, b in zip(cost[side], cost[TRL], strict=True)]
        rows.append(Row(f"CPU time of training: {side} over TRL", ratios, "as TRL: 1", claim))
    what = "CPU s of a run with one update"
    return rows + [Row(f"{what}: {side}", [run.seconds for run in short[side]], "unknown") for side in SIDES]


def refuse_senseless(given: argparse.Namespace) -> None:
    """:raises UserError: when nothing could be measured like that."""
    if not given.python.is_file():
        raise UserError(f"--python {given.python}: no such file; make TRL's environment: {INSTALL}")
    if given.rounds < 2 or given.every < 1 or given.rounds % given.every:
        raise UserError(f"--rounds {given.rounds}: must be 2 or more, and a multiple of --every {given.every}")
    if given.search in given.seeds:
        raise UserError(
            f"--search {given.search}: is among --seeds; give another, or rates are tuned to what they are judged on"
        )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--python", type=Path, default=ROOT.parent / "venv-trl/bin/python", help="that can import TRL")
    flags.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3], help="learning rates to try")
    flags.add_argument("--search", type=int, default=100, help="seed that they are tried on")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of problems and draws")
    flags.add_argument("--rounds", type=int, default=30, help="updates of a run")
    flags.add_argument("--every", type=int, default=5, help="updates between examinations")
    flags.add_argument("--prompts", type=int, default=16, help="problems of an update")
    flags.add_argument("--group", type=int, default=12, help="completions of a problem; divides by four")
    flags.add_argument("--school", type=int, default=800, help="steps of the start model's pre-training")
    given = flags.parse_args()
    refuse_senseless(given)
    import torch

    torch.set_num_threads(1)
    begun = started(given)
    best, rows = searched(given, begun)
    short: dict[str, list[Ran]] = {side: [] for side in SIDES}
    runs: dict[str, list[Ran]] = {side: [] for side in SIDES}
    for seed, side in itertools.product(given.seeds, SIDES):  # in turns: the machine may be busier at one time
        short[side].append(ran(given, side, begun, 1, best[side], seed))
        runs[side].append(ran(given, side, begun, given.rounds, best[side], seed))
    cost = {side: per_update(runs[side], short[side], given.rounds) for side in SIDES}
    notes = [
        "rates: " + ", ".join(f"{side} {lr:g}" for side, lr in best.items()),
        "accuracy: share of all 810 held-out sums solved, one draw each, which is their mean reward",
    ]
    return conclude(NAME, given, [*learning_rows(given, runs, cost), *cost_rows(given, short, cost), *rows], notes)


if __name__ == "__main__":
    start(main)
