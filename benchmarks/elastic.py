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
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from benchmarks.common import RUNS, Cell, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import Once, first_step_t, require_finished, run_fleet, thaw_later
from benchmarks.linked_run import Guest, add_flags, final_loss, recipe
from planaria import decisions as d
from planaria import events as e
from planaria.config import CheckpointConfig, ExchangeConfig, FleetConfig, RunConfig
from planaria.errors import UserError

if TYPE_CHECKING:
    from planaria.control.controller import Observer
    from planaria.observe.logs import RunRecord

NAME = "elastic"
GUESTS = 2
"""machines that are lent at once, at most"""
STRIKING = 0.85
"""of the seconds of an arm: with more replicas its steps are done sooner"""
THAW_S = 3.0

What = Literal["kill", "stop", "join", "leave", "vanish"]


@dataclass(frozen=True)
class Deed:
    """Something that the driver does ``at`` so many seconds after the first step."""

    at: float
    what: What


def deeds(seed: int, seconds: float, every: float) -> list[Deed]:
    """One in every interval of ``seconds``, at a random time of its middle half.

    Of six, two are kills, one a freeze, and three let a machine come or go: which, depends on how many are there.
    """
    rng = random.Random(f"{NAME} {seed}")
    planned, guests = [], 0
    for number in range(int(seconds / every)):
        what: What = rng.choice(("kill", "kill", "stop", "join", "join", "join"))
        if what == "join" and rng.random() < guests / GUESTS:
            what = rng.choice(("leave", "vanish"))
        guests += {"join": 1, "leave": -1, "vanish": -1}.get(what, 0)
        planned.append(Deed((number + rng.uniform(0.25, 0.75)) * every, what))
    return planned


class Driver(threading.Thread):
    """Does what was planned to a run; begins with its first step."""

    def __init__(self, folder: Path, planned: Sequence[Deed], seed: int) -> None:
        super().__init__(name="driver", daemon=True)
        self._folder, self._planned = folder, planned
        self._random = random.Random(f"{NAME} {seed} victims")
        self._come: list[Guest] = []
        self._gone = 0
        """those of them that have been told to go; who came first goes first"""
        self._over = threading.Event()
        self._ticks = busy_ticks()
        self._began = time.monotonic()

    def run(self) -> None:
        self._ticks, self._began = busy_ticks(), time.monotonic()
        for deed in self._planned:
            if self._over.wait(self._began + deed.at - time.monotonic()):
                return
            while not self._done(deed.what) and not self._over.wait(0.2):
                pass

    def end(self) -> float:
        """The run is over: see everybody off. The cores that were busy on average, whoever kept them so."""
        cores = (busy_ticks() - self._ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - self._began)
        self._over.set()
        if self.is_alive():
            self.join()
        for guest in self._come:
            guest.end()
        return cores

    def _done(self, what: What) -> bool:
        """Do it; False when it cannot be done just now."""
        if what in ("kill", "stop"):
            return self._strike(what)
        if what == "join":
            self._come.append(Guest(self._folder, len(self._come) + 1))
            return True
        guest = self._come[self._gone]
        if not (guest.joined or guest.gone):
            return False
        self._gone += 1
        if what == "vanish":
            guest.vanish()
        else:
            guest.leave()
        return True

    def _strike(self, action: str) -> bool:
        """A blow at any worker that stands in a replica."""
        from planaria.commands.chaos import strike
        from planaria.control.statefile import read_state

        try:
            held = [worker for worker in read_state(self._folder).workers if worker.node is not None]
            if not held:
                return False
            victim = self._random.choice(held)
            strike(self._folder, action, f"worker={victim.worker}")
        except UserError:
            return False  # it has just gone by itself
        if action == "stop":
            thaw_later(victim, THAW_S)
        return True


def busy_ticks() -> int:
    """Clock ticks that the machine's cores have been busy since it started, all together."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return user + nice + system + irq + softirq


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
            every=given.every,
            bits=8,
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
    from planaria.observe.ledger import prove_exactly_once, sample_ledger
    from planaria.observe.recoveries import recoveries
    from planaria.observe.rounds import gatherings, totals

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
    sums = totals(gatherings(record))
    return Outcome(
        record=record,
        loss=final_loss(record),
        cores=cores,
        took=ended - began,
        live=live_seconds(record, began, ended),
        tokens=sum(line.samples for line in sample_ledger(record)) * record.config.model.context,
        waited=sums.for_others + sums.for_offers,
        problems=prove_exactly_once(record),
        events=happened(record, ended),
        outcomes=Counter(timing.outcome for timing in recoveries(record)),
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
    from planaria.observe.recoveries import recoveries

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
    lines = sum(one.tokens + other.tokens for one, other in zip(free, struck, strict=True)) // 64

    def both(of: str, unit: str) -> str:
        """A number of the struck arms beside that of the fault-free ones."""
        means = (fmean(getattr(one, of) for one in arm) for arm in (struck, free))
        return " / ".join(f"{mean:.4g}" for mean in means) + f" {unit}"

    beside: dict[str, Cell] = {
        "took": both("took", "s"),
        "replicas existed": both("live", "s"),
        "waited": both("waited", "s"),
        "cores busy": both("cores", f"of {os.cpu_count()}"),
    }
    rates = [one.rate / other.rate for one, other in zip(struck, free, strict=True)]
    losses = [one.loss / other.loss for one, other in zip(struck, free, strict=True)]
    return [
        Row("tokens a replica's second / fault-free", rates, f"steps redone: {limit:.3f}", Claim(low=0.97), beside),
        Row("final loss of the one model / fault-free", losses, "1", Claim(0.97, 1.03), {"took": both("loss", "nats")}),
        Row("what is wrong with the ledgers", problems, f"0: {lines} samples", Claim(high=0), {}, "worst"),
        Row("events", events, told(kinds), Claim(low=30), {"took": told(ends), "waited": f"{founded} founded"}),
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
    return ["two numbers: of the arm with events / of the one without", f"logs: {', '.join(folders)}"]


if __name__ == "__main__":
    start(main)
