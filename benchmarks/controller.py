"""Cost of the control plane and of observing a run: 1,000 workers, watchers of the live page, trackers."""

from __future__ import annotations

import gc
import http.client
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.fleet_run import MODEL_FLAGS, finished, real_stages, step_seconds
from benchmarks.harness import (
    CORES,
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    interleaved,
    milliseconds,
    ratios,
    start,
)
from benchmarks.inline import cpu_seconds
from planaria.config.schema import RunConfig
from planaria.control.apply import apply
from planaria.control.apply_base import mark_decided
from planaria.control.decide import decide
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event, RunStarted
from planaria.control.protocols import Observer
from planaria.control.state.run import RunState

STAGES = 8  # the ends among them
EVERY = 10  # steps from one round to the next
STEP_MS, LOSS_MS, FAILOVER_MS, GROWTH = 20.0, 300.0, 2000.0, 1.25
LARGE = 1000  # workers, where the claims are


def started(**layout: Any) -> RunStarted:
    plain = {
        "name": "controller",
        "seed": 1, "stages": STAGES - 1, "steps": 10**6, "first_step": 0, "wall_time": 0.0, "spares": 2,
    }  # fmt: skip
    return RunStarted.model_validate(plain | layout)


def on_schedule(workers: int) -> RunStarted:
    """One replica; every microbatch has its own path, and paths cross."""
    width = workers // STAGES
    held = [[stage * width + place for place in range(width)] for stage in range(STAGES)]
    ways = [
        [held[stage][(place * (1 + stage % 2) + stage) % width] for stage in range(STAGES)] for place in range(width)
    ]
    return started(arrangement=held, routes=[[*way, way[0]] for way in ways], samples_per_step=width)


def in_pairs(workers: int) -> RunStarted:
    """Replicas of eight workers."""
    replicas = workers // STAGES
    return started(
        replicas=replicas,
        nodes_by_replica=[[number + replicas * stage for stage in range(STAGES)] for number in range(replicas)],
        exchange={"kind": "noloco", "replicas": replicas, "options": {"every": EVERY}},
        routes=[[*range(STAGES), 0]],
        samples_per_step=replicas,
    )


LAYOUTS: dict[str, Callable[[int], RunStarted]] = {"one replica": on_schedule, "in pairs": in_pairs}


class Obedient:
    """The pure part of the controller with simulated workers that obey at once; records all facts."""

    def __init__(self, settings: RunStarted) -> None:
        self.run = RunState.start(settings)
        self.facts: list[Event | Decision] = []
        self.commits = 0
        self._random = random.Random(1)
        self._reports: list[Event] = []
        self._members: dict[int, list[dict[str, Any]]] = {}  # replica → what its workers say of themselves
        self.happened(settings)

    def happened(self, event: Event) -> None:
        self.facts.append(event)
        self.run = apply(event, self.run)
        while (decision := decide(self.run)) is not None:
            self.facts.append(decision)
            self.run = apply(decision, self.run)
            self._obey(decision)
        self.run = mark_decided(self.run)

    def work(self, done: Callable[[], bool]) -> list[Event | Decision]:
        """Deliver reports in random order until ``done``; return the new facts."""
        first = len(self.facts)
        while not done():
            place = self._random.randrange(len(self._reports))
            self._reports[place], self._reports[-1] = self._reports[-1], self._reports[place]
            self.happened(self._reports.pop())
        return self.facts[first:]

    def steps(self, more: int) -> list[Event | Decision]:
        until = self.commits + more * len(self.run.replicas)
        return self.work(lambda: self.commits >= until)

    def loss(self) -> list[Event | Decision]:
        """Lose a middle worker; only its replica reports until its new generation gets an order."""
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

    def failover(self) -> list[Event | Decision]:
        """Replace the controller by one on another machine, to which all workers return, until each replica has run."""
        first = len(self.facts)
        self._reports = [r for r in self._reports if isinstance(r, e.StageCommitted | e.RoundApplied)]  # durable orders
        term = self.run.term + 1
        self.happened(e.LeaderStarted(term=term, pid=1, cause="silent", silent_s=1.0, lost_s=0.1, wall_time=0.0))
        waiting = set(self.run.replicas)

        def all_have_run() -> bool:
            waiting.difference_update([n for n in waiting if self.run.replicas[n].phase == "run"])
            return not waiting

        self.work(all_have_run)
        return self.facts[first:]

    def _obey(self, decision: Decision) -> None:
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
            case d.BeginRound():
                for member, generation in zip(decision.members, decision.generations, strict=True):
                    for other in set(decision.members) - {member}:
                        what = {"generation": generation, "round": decision.round, "replica": other}
                        self._report(member, e.UpdateReceived, **what)
            case d.Settle():
                what = {"round": decision.round, "blocking_bytes": 1, "prefetched_bytes": 1, "spread": 0.0}
                for member, generation in zip(decision.members, decision.generations, strict=True):
                    self._report(member, e.RoundApplied, generation=generation, **what)

    def _report(self, number: int, kind: type[Any], **what: Any) -> None:
        for member in self._members[number]:
            known = member.keys() & kind.model_fields.keys()
            self._reports.append(kind(**{name: member[name] for name in known}, **what))


def folded(run: RunState, facts: Sequence[Event | Decision]) -> float:
    """Fold the facts again; return the seconds of CPU time."""
    began = time.process_time()
    for fact in facts:
        run = apply(fact, run)
        if decide(run) is None:
            run = mark_decided(run)
    return time.process_time() - began


class Measured:
    """One layout at one size, with facts to fold again."""

    def __init__(self, layout: str, workers: int, steps: int) -> None:
        self.layout, self.workers, self.steps = layout, workers, steps
        fleet = Obedient(LAYOUTS[layout](workers))
        fleet.steps(2)
        before = fleet.run
        self._step = before, fleet.steps(steps)
        before = fleet.run
        self._loss = before, fleet.loss()
        before = fleet.run
        self._failover = before, fleet.failover()

    def once(self) -> list[float]:
        return [folded(*self._step) / self.steps * 1e3, folded(*self._loss) * 1e3, folded(*self._failover) * 1e3]


def measured(args: Namespace) -> dict[str, list[list[float]]]:
    """Map layout and size to the repeats of a step, of a loss and of a failover, interleaved."""
    cases = [Measured(layout, workers, args.steps) for layout in LAYOUTS for workers in args.workers]
    for case in cases:
        case.once()
    gc.collect()
    gc.freeze()
    repeats = [[case.once() for case in cases] for _ in range(args.repeats)]
    return {
        f"{case.layout}, {case.workers}": [[repeat[n][part] for repeat in repeats] for part in (0, 1, 2)]
        for n, case in enumerate(cases)
    }


def rows(args: Namespace) -> list[Row]:
    now, found = measured(args), list[Row]()
    for part, what, most in ((0, "step", STEP_MS), (1, "loss", LOSS_MS), (2, "failover", FAILOVER_MS)):
        for layout in LAYOUTS:
            small = statistics.median(now[f"{layout}, {args.workers[0]}"][part]) / args.workers[0]
            for workers in args.workers:
                values = now[f"{layout}, {workers}"][part]
                share = statistics.median(values) / workers
                details = {
                    "a worker": f"{share * 1e3:.1f} µs",
                    f"over {args.workers[0]}": round(share / small, 2),
                }
                claim = Claim(high=most) if workers == LARGE else None
                found.append(Row(f"{what}, {layout}, {workers} workers, ms", values, "", claim, details))
            last = [value / args.workers[-1] / small for value in now[f"{layout}, {args.workers[-1]}"][part]]
            if part == 0:
                what_of = f"a worker's share of a step, {layout}, {args.workers[-1]} over {args.workers[0]}"
                found.append(Row(what_of, last, "linear: 1", Claim(high=GROWTH)))
    return found


@benchmark(
    "controller",
    workers=Flag([16, 64, 256, 512, LARGE], "sizes"),
    steps=Flag(EVERY, "folded at a time; a round is one of ten"),
    repeats=9,
)
def run_controller(args: Namespace) -> Measurement:
    """Measure the controller's CPU time of ``decide`` and ``apply``, by the number of workers.

    Simulated workers obey at once; their reports arrive in random order. The facts are recorded first and folded again
    under the clock, with ``decide`` after every fact. Two layouts: one replica on a schedule, with many nodes per
    stage; and replicas of eight workers that exchange in pairs every tenth step. Claims at 1,000 workers: at most 20 ms
    per step, 0.3 s per loss (two broken edges, a death notice, up to the first order of the new generation) and 2 s per
    failover (until each replica has run); a worker costs at most 1.25 of its cost among 16.
    """
    notes = [
        "milliseconds of CPU time of decide and apply; a step: all replicas make one, a tenth of a round included",
        "a loss: two broken edges, a death notice, the new generation, its members' reports, its first order",
        "a failover: another controller, to which all workers return; new generations, their reports, first orders",
    ]
    return Result(rows(args), notes)


OBSERVED = MODEL_FLAGS | {
    "steps": Flag(150, "in one repeat"),
    "warm": Flag(20, "the first of these, which do not count"),
    "repeats": Flag(7, "of each side"),
}
CLAIM, SHARE = Claim(high=1.01), Claim(high=0.01)
END_S = 30.0


def read(url: str, watchers: int) -> None:
    """Read the live page with this many watchers until the server ends."""
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
    """Serve the page of a run to watchers; append the page's share of all cores to ``shares``."""
    from planaria.cli.commands.watch import serve_page
    from planaria.report.live_page.http_server import ServerAddress

    printed: list[str] = []
    with serve_page(folder, ServerAddress(), None, False, printed.append) as page:
        began, before = time.monotonic(), cpu_seconds([page.pid])
        url = printed[0].split()[-1]
        script = f"from benchmarks.controller import read; read({url!r}, {watchers})"
        readers = subprocess.Popen([sys.executable, "-c", script])
        yield
        took, lasted = cpu_seconds([page.pid]) - before, time.monotonic() - began
        shares.append(took / lasted / CORES)
    readers.wait(END_S)


def step_s(config: RunConfig, watchers: int, warm: int, shares: list[float]) -> float:
    """Return the median seconds of a step; ``shares`` as in :func:`watched`."""
    with ExitStack() as stack:

        def around(inner: Observer, folder: Path) -> Observer:
            if watchers:
                stack.enter_context(watched(folder, watchers, shares))
            return inner

        record = finished(config, around=around)
    return statistics.median(step_seconds(record, warm))


@benchmark(
    "live_watchers",
    **OBSERVED,
    watchers=[1, 20],
)
def run_live_watchers(args: Namespace) -> Measurement:
    """Measure the step time with 0, 1 and 20 watchers of the live page.

    The same small run is trained in turns without a page, and with one that its own process serves, as `planaria train
    --live` does, to watchers in another process at the lowest priority. Claims: the median step takes at most 1.01 of
    that without; because steps vary more than that, also: the page takes at most 1 % of all cores' processor time.
    """
    config = real_stages(args, "live_watchers", args.steps, spares=1, save_every=0)
    counts = [0, *args.watchers]
    shares: dict[int, list[float]] = {count: [] for count in counts}
    sides = [lambda n=count: step_s(config, n, args.warm, shares[n]) for count in counts]
    alone, *others = interleaved(sides, args.repeats)
    rows = []
    for count, found in zip(args.watchers, others, strict=True):
        details = {"without": milliseconds(alone), "with": milliseconds(found)}
        who = f"{count} watcher{'s' * (count > 1)}"
        rows.append(Row(who, ratios(found, alone), "1", CLAIM, details))
        rows.append(Row(f"{who}: processor time of the page, of all cores'", shares[count], "0", SHARE))
    return Result(rows, ["measured: median time of a step with the page / without"])


def tracked_step_s(config: RunConfig, tracked: bool, warm: int) -> float:
    return statistics.median(step_seconds(finished(config, tracked=tracked), warm))


@benchmark(
    "trackers_cost",
    **OBSERVED,
    trackers=Flag(["tensorboard"], "sides; 'a, b' is one with both"),
)
def run_trackers_cost(args: Namespace) -> Measurement:
    """Measure the step time with the recipe's trackers and without any.

    The same small run is trained in turns without trackers, and with trackers that receive every step, each in its own
    thread of the controller. Claim: the median step takes at most 1.01 of that without.
    """
    config = real_stages(args, "trackers_cost", args.steps, spares=0, save_every=0)
    sides = [partial(tracked_step_s, config, False, args.warm)]
    for names in args.trackers:
        observe = config.observe.model_copy(update={"trackers": names, "options": {}})
        sides.append(partial(tracked_step_s, config.model_copy(update={"observe": observe}), True, args.warm))
    alone, *others = interleaved(sides, args.repeats)
    rows = []
    for names, found in zip(args.trackers, others, strict=True):
        details = {"without": milliseconds(alone), "with": milliseconds(found)}
        rows.append(Row(names, ratios(found, alone), "1", CLAIM, details))
    return Result(rows, ["measured: median time of a step with trackers / without"])


if __name__ == "__main__":
    start(controller=run_controller, live_watchers=run_live_watchers, trackers_cost=run_trackers_cost)
