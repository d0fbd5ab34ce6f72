"""A run that is never left alone: eight replicas of a small byte model learn Python while workers and machines go.

Two arms with the same seed, recipe and steps. In one, a driver strikes from outside, at random moments that its seed
gives: it kills a worker of any replica (SIGKILL), freezes one (SIGSTOP, thawed later), lets a machine join (`planaria
join`, two workers: one replica more), asks one to leave (Ctrl-C), or kills all its processes at once. The claims: for
each second that a replica exists it trains at least 0.97 of the fault-free arm's tokens; the one model's validation
loss is within 3 %; every sample is used exactly once; at least 30 such events happened.

Steps wait for emulated links and not for the processor, so that a replica that is gone makes no other faster. The share
of the machine that was busy stands in the table: where it comes near to all cores, the first number means nothing.

Whoever is late at a round makes its partner late, which makes the next one late: without end to their patience, all
replicas would lose in time what each loses by its own faults. So the recipe's is one second.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Cell, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import Once, first_step_t, require_finished, run_fleet
from benchmarks.linked_run import add_flags, final_loss, recipe
from benchmarks.unrest import GUESTS, Deed, Driver, deeds
from planaria.config.options import Options
from planaria.config.schema import CheckpointConfig, ExchangeConfig, FleetConfig, RunConfig
from planaria.control import decisions as d
from planaria.control import events as e

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord
    from planaria.control.protocols import Observer

NAME = "elastic"
STRIKING = 0.85
"""of the seconds of an arm: with more replicas its steps are done sooner"""


def recipe_of(given: argparse.Namespace, arm: str, seed: int) -> RunConfig:
    return recipe(
        given,
        f"{NAME}-{arm}-{seed}",
        seed,
        round(given.seconds / given.step_s),
        ExchangeConfig(
            replicas=given.replicas,
            most=given.replicas + GUESTS,
            kind="noloco",
            options=Options({"every": given.every, "bits": 8}),
            patience_s=given.patience,
        ),
        FleetConfig(spares=1),
        CheckpointConfig(every=100),
    )


@dataclass(frozen=True)
class Outcome:
    """What one arm came to with one seed."""

    record: RunRecord
    loss: float
    cores: float
    took: float
    """seconds from the first step to the last commit"""
    live: float
    """seconds that replicas existed in that time, all together"""
    tokens: int
    waited: float
    """seconds that replicas waited in rounds, all together"""
    alone: float
    """share of their rounds in which they met nobody"""
    still: float
    """seconds that they stood still in recoveries"""
    idle: float
    """seconds that they had nothing left to do at the end, while others had"""
    problems: list[str]
    """what is wrong with the ledger"""
    events: Counter[str]
    outcomes: Counter[str]
    """recoveries by how they ended"""

    @property
    def rate(self) -> float:
        """Tokens for each second of a replica."""
        return self.tokens / self.live


def run_arm(given: argparse.Namespace, arm: str, seed: int, planned: Sequence[Deed]) -> Outcome:
    from planaria.report.run.ledger import prove_exactly_once, sample_ledger
    from planaria.report.run.recovery_timeline import recoveries
    from planaria.report.run.round_history import gatherings, totals

    drivers: list[Driver] = []

    def around(observer: Observer, folder: Path) -> Observer:
        drivers.append(Driver(folder, planned, seed))
        return Once(observer, d.RunStep, drivers[0].start)

    cores = 0.0
    try:
        record = run_fleet(recipe_of(given, arm, seed), around=around)
    finally:
        cores = sum(driver.end() for driver in drivers)
    require_finished(record)
    began, ended = first_step_t(record), last_commit_t(record)
    sums, timings = totals(gatherings(record)), recoveries(record)
    return Outcome(
        record=record,
        loss=final_loss(record),
        cores=cores,
        took=ended - began,
        live=live_seconds(record, began, ended),
        tokens=sum(line.samples for line in sample_ledger(record)) * record.config.model.context,
        waited=sums.for_others + sums.for_offers,
        alone=sums.alone / sums.attended if sums.attended else 0.0,
        still=sum(timing.total or 0.0 for timing in timings),
        idle=idle_seconds(record, ended),
        problems=prove_exactly_once(record),
        events=happened(record, ended),
        outcomes=Counter(timing.outcome for timing in timings),
    )


def last_commit_t(record: RunRecord) -> float:
    return max(t for t, fact in record.history if isinstance(fact, d.Commit))


def live_seconds(record: RunRecord, began: float, ended: float) -> float:
    """Replicas' seconds between these moments: each exists from its first formation, or from ``Found``, to ``Disband``.

    So what a joining replica's copy takes, and every recovery, is time in which it could have trained.
    """
    since: dict[int, float] = {}
    total = 0.0
    for t, fact in record.history:
        if isinstance(fact, d.Found | d.Form):
            since.setdefault(fact.replica, min(max(t, began), ended))
        elif isinstance(fact, d.Disband) and fact.replica in since:
            total += min(max(t, began), ended) - since.pop(fact.replica)
    return total + sum(ended - t for t in since.values())


def idle_seconds(record: RunRecord, ended: float) -> float:
    """From the last commit of each replica that stays (or its formation, if later) to the last commit of all."""
    since: dict[int, float] = {}
    for t, fact in record.history:
        if isinstance(fact, d.Form | d.Commit):
            since[fact.replica] = min(t, ended)
        elif isinstance(fact, d.Disband):
            since.pop(fact.replica, None)
    return sum(ended - t for t in since.values())


def happened(record: RunRecord, ended: float) -> Counter[str]:
    """What the log says was done to the run until its last commit. A machine that stays to the end does not leave."""
    found: Counter[str] = Counter()
    for t, fact in record.history:
        if t > ended:
            continue
        if isinstance(fact, e.FaultInjected):
            found["killed" if fact.signal == "SIGKILL" else "frozen"] += 1
        elif isinstance(fact, e.HostJoined):
            found["joined"] += 1
        elif isinstance(fact, e.HostLeft):
            found["left" if fact.detail.startswith("leaves") else "vanished"] += 1
    return found


def least_lost(outcome: Outcome, step_s: float) -> float:
    """Seconds that the faults must cost their replicas at least: half a step done again, and a freeze's silence."""
    from planaria.report.run.recovery_timeline import recoveries

    fleet = outcome.record.config.fleet
    lost = 0.0
    for timing in recoveries(outcome.record):
        lost += step_s / 2 + fleet.heartbeat_s * fleet.missed * ("heartbeat" in timing.causes)
    return lost


def rows_of(given: argparse.Namespace, free: Sequence[Outcome], struck: Sequence[Outcome]) -> list[Row]:
    events = [sum(one.events.values()) for one in struck]
    kinds: Counter[str] = sum((one.events for one in struck), Counter())
    ends: Counter[str] = sum((one.outcomes for one in struck), Counter())
    founded = sum(isinstance(fact, d.Found) for one in struck for _, fact in one.record.history)
    limit = 1 - max(least_lost(one, given.step_s) / one.live for one in struck)
    problems = [len(one.problems) + len(other.problems) for one, other in zip(free, struck, strict=True)]
    context = struck[0].record.config.model.context
    samples = sum(one.tokens for one in (*free, *struck)) // context

    def both(of: str) -> str:
        """A number of the struck arms beside that of the fault-free ones."""
        return " / ".join(f"{fmean(getattr(one, of) for one in arm):.4g}" for arm in (struck, free))

    beside: dict[str, Cell] = {
        "took s": both("took"),
        "replicas' s": both("live"),
        "waited": both("waited"),
        "stood still": both("still"),
        "idle": both("idle"),
        "alone": both("alone"),
        "cores busy": both("cores"),
    }
    rates = [one.rate / other.rate for one, other in zip(struck, free, strict=True)]
    losses = [one.loss / other.loss for one, other in zip(struck, free, strict=True)]
    return [
        Row("tokens a replica's second / fault-free", rates, f"steps redone: {limit:.3f}", Claim(low=0.97), beside),
        Row("the one model's loss / fault-free", losses, f"1: {both('loss')} nats", Claim(0.97, 1.03)),
        Row("what is wrong with the ledgers", problems, f"0: {samples} samples", Claim(high=0), {}, "worst"),
        Row("events", events, f"{told(kinds)}; {told(ends)}; {founded} founded", Claim(low=30)),
    ]


def told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seconds", type=float, default=600.0, help="of an arm, as its steps are meant to take")
    flags.add_argument("--deed-s", type=float, default=15.0, metavar="S", help="from one event to the next")
    flags.add_argument("--patience", type=float, default=1.0, metavar="S", help="exchange.patience_s")
    add_flags(flags, replicas=8, step_s=1.0)
    flags.add_argument("--seeds", type=int, default=1)
    given = flags.parse_args()
    arms: dict[str, list[Outcome]] = {"fault-free": [], "struck": []}
    for seed in range(1, given.seeds + 1):
        for arm, found in arms.items():
            planned = deeds(seed, given.seconds * STRIKING, given.deed_s) if arm == "struck" else []
            found.append(run_arm(given, arm, seed, planned))
            one = found[-1]
            print(f"seed {seed}, {arm}: {one.rate:.1f} tokens a replica's second, {one.loss:.4f} nats", flush=True)
            print("\n".join(one.problems), end="\n" if one.problems else "", flush=True)
    return conclude(NAME, given, rows_of(given, arms["fault-free"], arms["struck"]), notes(arms))


def notes(arms: dict[str, list[Outcome]]) -> list[str]:
    folders = [str(one.record.folder.relative_to(RUNS.parents[1])) for found in arms.values() for one in found]
    return [
        "two numbers: of the arm with events / of the one without; seconds of all replicas together, but for `took`",
        f"{os.cpu_count()} cores, of which the machine kept so many busy",
        f"logs: {', '.join(folders)}",
    ]


if __name__ == "__main__":
    start(main)
