"""Cost of the control plane and of observing a run: 1,000 workers, watchers of the live page, trackers."""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.common import ROOT, Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import add_model_flags, real_stages, require_finished, run_fleet, step_seconds
from benchmarks.inline import cpu_seconds
from planaria.report.live.tracker import Tracker

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.control.decisions import Decision
    from planaria.control.events import Event, RunStarted
    from planaria.control.protocols import Observer
    from planaria.control.state import RunState


CONTROLLER_NAME = "controller"
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
        "name": CONTROLLER_NAME,
        "seed": 1, "stages": STAGES - 1, "steps": 10**6, "first_step": 0, "wall_time": 0.0, "spares": 2,
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
                [sys.executable, "-m", "benchmarks.controller", "controller", *flags],
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


def run_controller() -> int:
    """Measure the controller's CPU time of ``decide`` and ``apply``, by the number of workers.

    Workers are pretended: they do as they are told at once, and their reports come in random order. What happens is
    written down first and folded again under the clock, ``decide`` after every fact, as the controller does it. Two
    layouts: one replica on a schedule, with many nodes for each of eight stages; and replicas of eight workers that
    meet in pairs every tenth step. The claims, at 1,000 workers: at most 20 ms for a step, at most 0.3 s for a loss
    (two broken edges, a death notice, until the first order of the new generation), and a worker costs at most 1.25 of
    what it costs among 16.
    """
    flags = parser(CONTROLLER_NAME, run_controller.__doc__)
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
    return conclude(CONTROLLER_NAME, given, rows(given), notes)


LIVE_WATCHERS_NAME = "live_watchers"
CLAIM, SHARE = Claim(high=1.01), Claim(high=0.01)
END_S = 30.0


def read(url: str, watchers: int) -> None:
    """So many watchers, who read and forget until the server ends."""
    parts = urlsplit(url)
    token = parse_qs(parts.query)["token"][0]
    os.nice(19)

    def one() -> None:
        line = http.client.HTTPConnection(parts.hostname or "", parts.port)
        line.request("GET", "/api/runs/0/frames", headers={"authorization": f"Bearer {token}"})
        answer = line.getresponse()
        while answer.read1(1 << 16):
            pass

    threads = [threading.Thread(target=one) for _ in range(watchers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def watched(folder: Path, watchers: int, shares: list[float]) -> Iterator[None]:
    """The page of a run and its watchers; ``shares`` gets what the page took of all cores in the meantime."""
    from planaria.cli.commands.watch import beside
    from planaria.report.live_page.serving import Address

    said: list[str] = []
    with beside(folder, Address(), None, False, said.append) as page:
        began, before = time.monotonic(), cpu_seconds([page.pid])
        url = said[0].split()[-1]
        script = f"from benchmarks.controller import read; read({url!r}, {watchers})"
        readers = subprocess.Popen([sys.executable, "-c", script])
        yield
        took, lasted = cpu_seconds([page.pid]) - before, time.monotonic() - began
        shares.append(took / lasted / len(os.sched_getaffinity(0)))
    readers.wait(END_S)


def step_s(config: RunConfig, watchers: int, warm: int, shares: list[float]) -> float:
    """Seconds of a step, the median; ``shares`` as in :func:`watched`."""
    with ExitStack() as beside:

        def around(inner: Observer, folder: Path) -> Observer:
            if watchers:
                beside.enter_context(watched(folder, watchers, shares))
            return inner

        record = run_fleet(config, around=around)
    require_finished(record)
    return statistics.median(step_seconds(record, warm))


def run_live_watchers() -> int:
    """What do watchers of the live page cost a run? Step times with no page, with one watcher, and with twenty.

    The same small run is trained on the fleet in turns: without a page, and with one that is served by a process of its
    own, as `planaria train --live` starts it, and read by one or by twenty watchers in another process. Compared are
    the medians of the steps' times. The claim: at most 1.01 of the time without.

    Steps vary by more than that from run to run, so the processor time that the page took is claimed too: less than a
    hundredth of all cores' over the run. It is what a machine without an idle core cannot do otherwise meanwhile.
    Watchers run at the lowest priority, since real ones are on other machines.
    """
    flags = parser(LIVE_WATCHERS_NAME, run_live_watchers.__doc__)
    add_model_flags(flags)
    flags.add_argument("--steps", type=int, default=150, help="in one repeat")
    flags.add_argument("--warm", type=int, default=20, help="the first of these, which do not count")
    flags.add_argument("--repeats", type=int, default=7, help="of each side")
    flags.add_argument("--watchers", type=int, nargs="+", default=[1, 20])
    given = flags.parse_args()
    config = real_stages(given, LIVE_WATCHERS_NAME, given.steps, spares=1, save_every=0)
    counts = [0, *given.watchers]
    shares: dict[int, list[float]] = {count: [] for count in counts}
    sides = [lambda n=count: step_s(config, n, given.warm, shares[n]) for count in counts]
    alone, *others = interleaved(sides, given.repeats)
    rows = []
    for count, found in zip(given.watchers, others, strict=True):
        ratios = [with_page / without for with_page, without in zip(found, alone, strict=True)]
        beside = {"without": milliseconds(alone), "with": milliseconds(found)}
        who = f"{count} watcher{'s' * (count > 1)}"
        rows.append(Row(who, ratios, "1", CLAIM, beside))
        rows.append(Row(f"{who}: processor time of the page, of all cores'", shares[count], "0", SHARE))
    return conclude(LIVE_WATCHERS_NAME, given, rows, ["measured: median time of a step with the page / without"])


TRACKERS_COST_NAME = "trackers_cost"
TRACKERS_COST_CLAIM = Claim(high=1.01)
SLOW = "benchmarks.controller:Slow"


class Slow(Tracker):
    """Computes for a while in each call."""

    call_ms: float = 20.0

    def open(self, folder: Path) -> None:
        """It keeps nothing."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        until = time.thread_time() + self.call_ms / 1e3
        while time.thread_time() < until:
            pass

    def close(self) -> None:
        """It has nothing left to send."""


def trackers_cost_step_s(config: RunConfig, tracked: bool, warm: int) -> float:
    """Seconds of a step, the median."""
    record = run_fleet(config, tracked=tracked)
    require_finished(record)
    return statistics.median(step_seconds(record, warm))


def observed(config: RunConfig, names: str, call_ms: float) -> RunConfig:
    """The recipe with these trackers."""
    options = {"call_ms": call_ms} if SLOW in names else {}
    told = config.observe.model_copy(update={"trackers": names, "options": options})
    return config.model_copy(update={"observe": type(told).model_validate(told.model_dump())})


def run_trackers_cost() -> int:
    """What do trackers cost a run? Step times with the recipe's trackers, and without any.

    The same small run is trained on the fleet in turns: with nobody told of its numbers, and with trackers that are
    told of every step, each in a thread of its own in the controller's process (``report/live/watch.py``). Compared
    are the medians of the steps' times, pair by pair. The claim: at most 1.01 of the time without.

    ``slow`` is a tracker that is made here: each of its calls computes for ``--call-ms`` and so holds the interpreter.
    It is not among the trackers that the claim is made for, since nobody would ship it; it shows what a bad one does.
    """
    flags = parser(TRACKERS_COST_NAME, run_trackers_cost.__doc__)
    add_model_flags(flags)
    flags.add_argument("--steps", type=int, default=150, help="in one repeat")
    flags.add_argument("--warm", type=int, default=20, help="the first of these, which do not count")
    flags.add_argument("--repeats", type=int, default=7, help="of each side")
    flags.add_argument("--trackers", nargs="+", default=["tensorboard"], help="sides; 'a, b' is one with both")
    flags.add_argument("--slow", action="store_true", help="one more side, with the slow tracker")
    flags.add_argument("--call-ms", type=float, default=20.0, help="what a call of the slow tracker computes")
    given = flags.parse_args()
    config = real_stages(given, TRACKERS_COST_NAME, given.steps, spares=0, save_every=0)
    names = [*given.trackers, *([SLOW] if given.slow else [])]
    recipes = {name: observed(config, name, given.call_ms) for name in names}
    sides = [partial(trackers_cost_step_s, config, False, given.warm)]
    sides += [partial(trackers_cost_step_s, recipe, True, given.warm) for recipe in recipes.values()]
    alone, *others = interleaved(sides, given.repeats)
    rows = []
    for name, found in zip(names, others, strict=True):
        ratios = [told / without for told, without in zip(found, alone, strict=True)]
        beside = {"without": milliseconds(alone), "with": milliseconds(found)}
        claim = None if name == SLOW else TRACKERS_COST_CLAIM
        rows.append(Row(name.rpartition(":")[2], ratios, "1", claim, beside))
    return conclude(TRACKERS_COST_NAME, given, rows, ["measured: median time of a step with trackers / without"])


if __name__ == "__main__":
    start(controller=run_controller, live_watchers=run_live_watchers, trackers_cost=run_trackers_cost)
