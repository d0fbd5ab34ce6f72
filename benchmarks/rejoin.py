"""A machine dies with a whole replica on it, and another takes its place: what the model loses by that.

Four replicas of two processes learn Python, with three seeds. In the middle both processes of one replica are killed at
once. Nobody replaces them, so that the replica disbands and the others use its samples; some seconds later `planaria
join` brings two workers, and the replica begins anew as a copy of another. The fault-free arm has the same seeds,
recipe and steps. The claims: the one model's perplexity is at most 1.03 of the fault-free arm's; within five rounds,
the newcomer is less than twice as far from the others' mean as they are from one another; while they are one fewer,
nobody waits longer than the recipe's patience.

Distances are read from checkpoints, in which each replica's weights are, not from what pairs say of each other when
they meet: a pair tells how far its two are apart, and the newcomer's partner may be the one that it is a copy of. A
checkpoint counts when all replicas are between the same two rounds. The distance to the mean of n others is divided by
√(1 + 1/n), as the mean of few is itself not where that of many would be; the usual spread is that of the others in the
same checkpoint. The largest ratio from the return to the fifth round after it is what is judged.
"""

from __future__ import annotations

import argparse
import math
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.common import Cell, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import Once, require_finished, run_fleet
from benchmarks.linked_run import WORKERS, Guest, add_flags, final_loss, recipe
from planaria.common.errors import RunStopped
from planaria.config.options import Options
from planaria.config.schema import CheckpointConfig, ExchangeConfig, FleetConfig, RunConfig
from planaria.control import decisions as d

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.control.logs import RunRecord
    from planaria.control.protocols import Observer
    from planaria.runtime.checkpoint.store import Saved

NAME = "rejoin"
VICTIM = 1
"""the replica that dies"""
ROUNDS = 5
"""after its return, in which it must have found its place"""


def recipe_of(given: argparse.Namespace, arm: str, seed: int) -> RunConfig:
    return recipe(
        given,
        f"{NAME}-{arm}-{seed}",
        seed,
        given.steps,
        ExchangeConfig(replicas=given.replicas, kind="noloco", options=Options({"every": given.every, "bits": 8})),
        FleetConfig(spares=0, replace=False),
        CheckpointConfig(every=max(1, given.every // 4), keep=given.steps if arm == "struck" else 2),
    )


@dataclass(frozen=True)
class Place:
    """Where the newcomer is in one checkpoint."""

    rounds: int
    """that it has settled since its return"""
    distance: float
    """RMS over parameters, to the mean of the others"""
    usual: float
    """of the others, to their own"""

    @property
    def ratio(self) -> float:
        return self.distance / self.usual


@dataclass(frozen=True)
class Struck:
    """What became of the run whose replica was killed."""

    loss: float
    away: float
    """seconds without it"""
    steps: int
    """that each of the others made meanwhile"""
    longest: float
    """seconds that one of the others waited for anybody in a round while it was away"""
    places: list[Place]
    problems: list[str]


def run_struck(given: argparse.Namespace, seed: int) -> Struck:
    from planaria.faults.trace import Fault

    faults = tuple(Fault(step=given.steps // 2, stage=VICTIM * WORKERS + n) for n in range(WORKERS))
    guests: list[Guest] = []
    timers: list[threading.Timer] = []

    def around(observer: Observer, folder: Path) -> Observer:
        timers.append(threading.Timer(given.away, lambda: guests.append(Guest(folder, 1))))
        timers[0].daemon = True
        return Once(observer, d.Disband, timers[0].start)

    try:
        record = run_fleet(recipe_of(given, "struck", seed), faults, around)
    finally:
        for timer in timers:
            timer.cancel()
        for guest in guests:
            guest.end()
    require_finished(record)
    return judged(record)


def judged(record: RunRecord) -> Struck:
    from planaria.report.run.ledger import prove_exactly_once
    from planaria.report.run.round_history import gatherings

    gone = next((t for t, fact in record.history if isinstance(fact, d.Disband)), math.inf)
    back = next((t for t, fact in record.history if isinstance(fact, d.Found)), math.inf)
    if math.isinf(back):
        raise RunStopped(f"{record.folder}: the replica never came back; give the run more --steps")
    alone = [one for one in gatherings(record) if gone <= one.t <= back]
    return Struck(
        loss=final_loss(record),
        away=back - gone,
        steps=sum(isinstance(f, d.Commit) for t, f in record.history if gone <= t <= back) // len(others(record)),
        longest=max((seconds for one in alone for seconds in one.for_others.values()), default=0.0),
        places=places(record),
        problems=prove_exactly_once(record),
    )


def others(record: RunRecord) -> list[int]:
    return [replica for replica in range(record.config.exchange.replicas) if replica != VICTIM]


def places(record: RunRecord) -> list[Place]:
    """The newcomer in all checkpoints that count; all but the newest two are removed then.

    :raises RunStopped: when the run was over before the fifth round.
    """
    from planaria.runtime.checkpoint.store import CheckpointStore

    returned: int | None = None
    sealed: set[str] = set()
    found = False
    for _, fact in record.history:
        if isinstance(fact, d.Found):
            found = True
        elif isinstance(fact, d.Form) and found and fact.replica == VICTIM and returned is None:
            returned = fact.rounds
        elif isinstance(fact, d.Seal) and returned is not None:
            sealed.add(fact.folder)
    assert returned is not None
    store = CheckpointStore(record.folder / "checkpoints")
    saved = store.list()
    looked = [place(one, returned) for one in saved if one.folder.name in sealed and comparable(one)]
    for old in saved[:-2]:
        shutil.rmtree(old.folder)
    if all(one.rounds < ROUNDS for one in looked):
        raise RunStopped(f"{record.folder}: over before round {ROUNDS} of the newcomer; give the run more --steps")
    return [one for one in looked if one.rounds <= ROUNDS]


def comparable(saved: Saved) -> bool:
    """Is the newcomer there, and is every replica between the same two rounds?"""
    standings = saved.manifest.standings
    same = len({standing.rounds for standing in standings.values()}) == 1
    return VICTIM in standings and same and all(standing.inner > 0 for standing in standings.values())


def place(saved: Saved, returned: int) -> Place:
    """Its distance and the usual one, by the weights of all stages; ``returned`` rounds were settled at its return."""
    import torch

    weights = {replica: weights_of(saved, replica) for replica in saved.manifest.standings}
    rest = torch.stack([each for replica, each in weights.items() if replica != VICTIM])
    count, mean = len(rest), rest.mean(dim=0)
    distance = rms(weights[VICTIM] - mean) / math.sqrt(1 + 1 / count)
    usual = rms(rest - mean) * math.sqrt(count / (count - 1))
    return Place(saved.manifest.standings[VICTIM].rounds - returned, distance, usual)


def weights_of(saved: Saved, replica: int) -> Tensor:
    """All fast weights of a replica, one after the other; float64."""
    import torch

    from planaria.runtime.checkpoint.stage_file import read_stage
    from planaria.runtime.checkpoint.store import replica_folder

    folder = replica_folder(saved.folder, replica)
    states = [read_stage(folder, stage, saved.step).weights for stage in saved.manifest.stages]
    return torch.cat([tensor.flatten().double() for state in states for _, tensor in sorted(state.items())])


def rms(of: Tensor) -> float:
    return float(of.square().mean().sqrt())


def run_free(given: argparse.Namespace, seed: int) -> float:
    """The fault-free arm's validation loss."""
    record = run_fleet(recipe_of(given, "fault-free", seed))
    require_finished(record)
    return final_loss(record)


def rows_of(given: argparse.Namespace, free: Sequence[float], struck: Sequence[Struck]) -> list[Row]:
    ratios = [math.exp(one.loss - other) for one, other in zip(struck, free, strict=True)]
    worst = [max(place.ratio for place in one.places) for one in struck]
    last = [one.places[-1].ratio for one in struck]
    beside: dict[str, Cell] = {
        "mean": fmean(ratios),
        "struck": f"{fmean(math.exp(one.loss) for one in struck):.3f}",
        "fault-free": f"{fmean(map(math.exp, free)):.3f}",
    }
    away = f"{fmean(one.away for one in struck):.1f} s, {fmean(one.steps for one in struck):.0f} steps"
    near: dict[str, Cell] = {"mean": fmean(worst), "struck": f"last {fmean(last):.2f}", "fault-free": f"away {away}"}
    waits = [one.longest for one in struck]
    patience = recipe_of(given, "struck", 0).exchange.patience_s
    problems = [len(one.problems) for one in struck]
    looked = sum(len(one.places) for one in struck)
    return [
        Row("perplexity / fault-free", ratios, "1", Claim(high=1.03), beside, "worst"),
        Row(
            f"newcomer's distance / usual, {ROUNDS} rounds",
            worst,
            f"1; {looked} places",
            Claim(high=2.0),
            near,
            "worst",
        ),
        Row("longest wait of the others, s", waits, "0", Claim(high=patience), {"mean": fmean(waits)}, "worst"),
        Row("what is wrong with the ledgers", problems, "0", Claim(high=0), {}, "worst"),
    ]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=480)
    flags.add_argument("--away", type=float, default=10.0, metavar="S", help="from the death to `planaria join`")
    add_flags(flags, replicas=4, step_s=0.25)
    given = flags.parse_args()
    free, struck = [], []
    for seed in range(1, given.seeds + 1):
        free.append(run_free(given, seed))
        struck.append(run_struck(given, seed))
        near = ", ".join(f"{place.rounds}: {place.ratio:.2f}" for place in struck[-1].places)
        print(f"seed {seed}: {struck[-1].loss:.4f} and {free[-1]:.4f} nats; distances by round {near}", flush=True)
        print("\n".join(struck[-1].problems), end="\n" if struck[-1].problems else "", flush=True)
    return conclude(NAME, given, rows_of(given, free, struck))


if __name__ == "__main__":
    start(main)
