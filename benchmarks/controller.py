"""What it costs the controller to think, by the number of workers: CPU time of ``decide`` and ``apply``, nothing else.

Workers are pretended: they do as they are told at once, and their reports come in random order. What happens is written
down first and folded again under the clock, ``decide`` after every fact, as the controller does it. Two layouts: one
replica on a schedule, with many nodes for each of eight stages; and replicas of eight workers that meet in pairs every
tenth step. The claims, at 1,000 workers: at most 20 ms for a step, at most 0.3 s for a loss (two broken edges, a death
notice, until the first order of the new generation), and a worker costs at most 1.25 of what it costs among 16.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import ROOT, Claim, Row, conclude, parser, start

if TYPE_CHECKING:
    from planaria.control.decisions import Decision
    from planaria.control.events import Event, RunStarted
    from planaria.control.state import RunState

NAME = "controller"
STAGES = 8
"""the ends among them"""
EVERY = 10
"""steps from one round to the next"""
STEP_MS, LOSS_MS, GROWTH = 20.0, 300.0, 1.25
LARGE = 1000
"""workers, where the claims are"""


def started(**layout: Any) -> RunStarted:
    from planaria.control.events import RunStarted

    plain = {
        "name": NAME, "seed": 1, "stages": STAGES - 1, "steps": 10**6, "first_step": 0, "wall_time": 0.0, "spares": 2,
    }  # fmt: skip
    return RunStarted.model_validate(plain | layout)


def on_schedule(workers: int) -> RunStarted:
    """One replica; every microbatch has a way of its own, which crosses others."""
    width = workers // STAGES
    held = [[stage * width + place for place in range(width)] for stage in range(STAGES)]
    ways = [
        [held[stage][(place * (1 + stage % 2) + stage) % width] for stage in range(STAGES)] for place in range(width)
    ]
    return started(arrangement=held, routes=[[*way, way[0]] for way in ways], samples_per_step=width)


def options(**given: Any) -> dict[str, Any]:
    """Options of an exchange; an older planaria has them beside its kind."""
    from planaria.config.schema import ExchangeConfig

    return {"options": given} if "options" in ExchangeConfig.model_fields else given


def in_pairs(workers: int) -> RunStarted:
    """Replicas of eight workers."""
    replicas = workers // STAGES
    return started(
        replicas=replicas,
        columns=[[number + replicas * stage for stage in range(STAGES)] for number in range(replicas)],
        exchange={"kind": "noloco", "replicas": replicas, **options(every=EVERY)},
        routes=[[*range(STAGES), 0]],
        samples_per_step=replicas,
    )


LAYOUTS: dict[str, Callable[[int], RunStarted]] = {"one replica": on_schedule, "in pairs": in_pairs}


def done() -> Callable[[RunState], RunState]:
    """What is to be said of a run once nothing more is to be decided; an older planaria does not ask to be told."""
    from planaria.control import apply_base as fold

    return getattr(fold, "decided", lambda run: run)


class Obedient:
    """The controller's pure half, and workers that do as they are told; what happens is written down."""

    def __init__(self, settings: RunStarted) -> None:
        from planaria.control.state import RunState

        self.run = RunState.start(settings)
        self.facts: list[Event | Decision] = []
        self.commits = 0
        self._random, self._done = random.Random(1), done()
        self._reports: list[Event] = []
        self._members: dict[int, list[dict[str, Any]]] = {}
        """replica → what its workers say of themselves"""
        self.happened(settings)

    def happened(self, event: Event) -> None:
        """What the controller's loop does with an event."""
        from planaria.control.apply import apply
        from planaria.control.decide import decide

        self.facts.append(event)
        self.run = apply(event, self.run)
        while (decision := decide(self.run)) is not None:
            self.facts.append(decision)
            self.run = apply(decision, self.run)
            self._obey(decision)
        self.run = self._done(self.run)

    def work(self, done: Callable[[], bool]) -> list[Event | Decision]:
        """Reports come in, in random order, until it is done; what was said and decided meanwhile."""
        first = len(self.facts)
        while not done():
            place = self._random.randrange(len(self._reports))
            self._reports[place], self._reports[-1] = self._reports[-1], self._reports[place]
            self.happened(self._reports.pop())
        return self.facts[first:]

    def steps(self, more: int) -> list[Event | Decision]:
        """Go on until the replicas have committed so many steps more each."""
        until = self.commits + more * len(self.run.replicas)
        return self.work(lambda: self.commits >= until)

    def loss(self) -> list[Event | Decision]:
        """A worker in the middle dies; its replica alone reports until it has an order of its new generation."""
        from planaria.control import events as e

        first, replica = len(self.facts), self.run.replicas[len(self.run.replicas) // 2]
        members = self._members[replica.number]
        before, victim, after = members[len(members) // 2 - 1 : len(members) // 2 + 2]
        for neighbour in (before, after):
            broken = {"worker": neighbour["worker"], "node": neighbour["node"], "peer": victim["node"]}
            self.happened(e.EdgeBroken(**broken, generation=replica.generation, detail="reset"))
        own = {member["worker"] for member in members}
        others = [report for report in self._reports if report.worker not in own]
        self._reports = [r for r in self._reports if r.worker in own and r.worker != victim["worker"]]
        self.happened(
            e.WorkerLost(
                worker=victim["worker"],
                incarnation=self.run.workers[victim["worker"]].incarnation,
                cause="connection",
                detail="killed",
            )
        )
        self.work(lambda: self.run.replicas[replica.number].phase == "run")
        self._reports += others
        return self.facts[first:]

    def _obey(self, decision: Decision) -> None:
        from planaria.control import decisions as d
        from planaria.control import events as e

        match decision:
            case d.Spawn():
                joined = e.WorkerJoined(worker=decision.worker, incarnation=decision.incarnation, pid=1)
                self._reports.append(joined)
            case d.Form():
                self._members[decision.replica] = [
                    {"worker": m.worker, "node": m.node, "stage": m.stage} for m in decision.members
                ]
                self._report(decision.replica, e.Linked, generation=decision.generation, link_s=0.0)
            case d.RunStep():
                what = {"generation": decision.generation, "step": decision.step, "loss": 1.0, "grad_norm": 1.0}
                self._report(decision.replica, e.StageReady, **what)
            case d.Commit():
                self.commits += 1
                what = {"generation": decision.generation, "step": decision.step}
                self._report(decision.replica, e.StageCommitted, **what)
            case d.Meet():
                for member, generation in zip(decision.members, decision.generations, strict=True):
                    for other in set(decision.members) - {member}:
                        what = {"generation": generation, "round": decision.round, "replica": other}
                        self._report(member, e.OfferHeard, **what)
            case d.Settle():
                what = {"round": decision.round, "blocking_bytes": 1, "prefetched_bytes": 1, "apart": 0.0}
                for member, generation in zip(decision.members, decision.generations, strict=True):
                    self._report(member, e.RoundMade, generation=generation, **what)

    def _report(self, number: int, kind: type[Any], **what: Any) -> None:
        """Each worker of the replica will say this."""
        for member in self._members[number]:
            known = member.keys() & kind.model_fields.keys()
            self._reports.append(kind(**{name: member[name] for name in known}, **what))


class Folded:
    """Facts that are folded again, under the clock."""

    def __init__(self, before: RunState, facts: Sequence[Event | Decision]) -> None:
        self._before, self._facts = before, facts

    def __call__(self) -> float:
        """Seconds of CPU time."""
        from planaria.control.apply import apply
        from planaria.control.decide import decide

        run, ended, began = self._before, done(), time.process_time()
        for fact in self._facts:
            run = apply(fact, run)
            if decide(run) is None:
                run = ended(run)
        return time.process_time() - began


class Measured:
    """One layout at one size: what can be folded again."""

    def __init__(self, layout: str, workers: int, steps: int) -> None:
        self.layout, self.workers, self.steps = layout, workers, steps
        began = time.process_time()
        fleet = Obedient(LAYOUTS[layout](workers))
        fleet.steps(2)
        before = fleet.run
        self._step = Folded(before, fleet.steps(steps))
        before = fleet.run
        self._loss = Folded(before, fleet.loss())
        self.made_s = time.process_time() - began

    def once(self) -> list[float]:
        """Milliseconds of a step, and of a loss."""
        return [self._step() / self.steps * 1e3, self._loss() * 1e3]


def measured(given: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Layout and workers → the repeats of a step and of a loss, all taking turns."""
    cases = [Measured(layout, workers, given.steps) for layout in LAYOUTS for workers in given.workers]
    for case in cases:  # what happened stays: the collector need not look at it again and again
        case.once()
    gc.collect()
    gc.freeze()
    repeats = [[case.once() for case in cases] for _ in range(given.repeats)]
    return {
        f"{case.layout}, {case.workers}": [[repeat[n][part] for repeat in repeats] for part in (0, 1)]
        for n, case in enumerate(cases)
    }


def before(given: argparse.Namespace) -> dict[str, list[list[float]]]:
    """The same by an older planaria, as far as it gets in time; nothing if none was named."""
    if given.before is None:
        return {}
    found: dict[str, list[list[float]]] = {}
    for workers in given.workers:
        flags = ["--steps", str(EVERY), "--repeats", "3", "--workers", str(workers), "--bare"]
        paths = os.pathsep.join([str(given.before), str(ROOT)])
        try:
            told = subprocess.run(
                [sys.executable, "-m", f"benchmarks.{NAME}", *flags],
                env=os.environ | {"PYTHONPATH": paths},
                capture_output=True,
                text=True,
                timeout=given.patience,
                check=False,
            )
        except subprocess.TimeoutExpired:  # larger ones would take longer yet
            break
        if told.returncode == 0:
            found |= json.loads(told.stdout)
    return found


def rows(given: argparse.Namespace) -> list[Row]:
    """Step, loss and share of a worker, by layout and size."""
    now, then = measured(given), before(given)
    found = []
    for part, what, most in ((0, "step", STEP_MS), (1, "loss", LOSS_MS)):
        for layout in LAYOUTS:
            small = statistics.median(now[f"{layout}, {given.workers[0]}"][part]) / given.workers[0]
            for workers in given.workers:
                values, old = now[f"{layout}, {workers}"][part], then.get(f"{layout}, {workers}")
                share = statistics.median(values) / workers
                beside = {
                    "before": f"{statistics.median(old[part]):.1f} ms" if old else "–",
                    "a worker": f"{share * 1e3:.1f} µs",
                    f"over {given.workers[0]}": round(share / small, 2),
                }
                claim = Claim(high=most) if workers == LARGE else None
                found.append(Row(f"{what}, {layout}, {workers} workers, ms", values, "", claim, beside))
            last = [value / given.workers[-1] / small for value in now[f"{layout}, {given.workers[-1]}"][part]]
            if part == 0:
                what_of = f"a worker's share of a step, {layout}, {given.workers[-1]} over {given.workers[0]}"
                found.append(Row(what_of, last, "linear: 1", Claim(high=GROWTH)))
    return found


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 512, LARGE], help="sizes")
    flags.add_argument("--steps", type=int, default=EVERY, help="folded at a time; a round is one of ten")
    flags.add_argument("--repeats", type=int, default=9)
    flags.add_argument("--before", type=Path, help="src of an older planaria, to be measured too")
    flags.add_argument("--patience", type=float, default=600.0, help="seconds for the older one, at each size")
    flags.add_argument("--bare", action="store_true", help="print the numbers as JSON only")
    given = flags.parse_args()
    if given.bare:
        print(json.dumps(measured(given)))
        return 0
    notes = [
        "milliseconds of CPU time of decide and apply; a step: all replicas make one, a tenth of a round included",
        "a loss: two broken edges, a death notice, the new generation, its members' reports, its first order",
    ]
    return conclude(NAME, given, rows(given), notes)


if __name__ == "__main__":
    start(main)
