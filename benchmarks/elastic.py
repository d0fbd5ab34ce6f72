"""Machines that leave, join and come back with whole replicas."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
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
from planaria.common.errors import RunStopped, UserError
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control import decisions as d
from planaria.control import events as e

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.control.logs import RunRecord
    from planaria.control.protocols import Observer
    from planaria.runtime.checkpoint.store import Saved


WORKERS = 2
"""of a replica: the ends and one block stage"""
HOPS = 4
"""of a microbatch between them: there and back, forward and backward"""


def add_flags(flags: argparse.ArgumentParser, replicas: int, step_s: float) -> None:
    """The sizes of :func:`recipe`."""
    flags.add_argument("--replicas", type=int, default=replicas)
    flags.add_argument("--step-s", type=float, default=step_s, metavar="S", help="of a step, all of it on the links")
    flags.add_argument("--every", type=int, default=15, help="steps from one round to the next")
    flags.add_argument("--dim", type=int, default=64)
    flags.add_argument("--samples", type=int, default=8, help="of each replica in a step, of 64 bytes each")


def recipe(
    given: argparse.Namespace,
    name: str,
    seed: int,
    steps: int,
    exchange: ExchangeConfig,
    fleet: FleetConfig,
    checkpoint: CheckpointConfig,
) -> RunConfig:
    """A small byte model that learns Python; its step takes ``--step-s``, on the way between two processes."""
    return RunConfig(
        name=name,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=260, dim=given.dim, layers=1, heads=4, hidden=given.dim * 11 // 4, context=64),
        pipeline=PipelineConfig(stages=WORKERS - 1, microbatches=1, microbatch_size=given.samples),
        data=DataConfig(tokenizer="bytes"),
        optim=OptimConfig(lr=2e-3, warmup=20, schedule="cosine"),
        train=TrainConfig(steps=steps, eval_every=0, eval_microbatches=32),
        exchange=exchange,
        fleet=fleet,
        checkpoint=checkpoint,
        network=NetworkConfig(emulate="links", latency_s=given.step_s / HOPS),
    )


def final_loss(record: RunRecord) -> float:
    """Validation loss in nats of what the run ended with: of several replicas, of the one model that they make."""
    from planaria.data.shards import prepare
    from planaria.data.stream import Stream
    from planaria.runtime.checkpoint.loading import load_model
    from planaria.runtime.engine import runs
    from planaria.runtime.engine.omission import loss
    from planaria.runtime.engine.samples import batches

    config = record.config
    model = load_model(runs.newest_whole(record.folder), config.pipeline.stages).eval()
    dataset = prepare(config.data, config.model.vocab)
    stream = Stream(dataset, "validation", config.model.context, config.seed)
    batch = batches(stream, 0, config.pipeline.microbatch_size)
    return loss(model, batch, config.train.eval_microbatches, ())


class Guest:
    """A machine that has been lent to a run: ``planaria join`` and its workers, a session of their own."""

    def __init__(self, folder: Path, number: int) -> None:
        self._told = folder / f"guest-{number}.log"
        with self._told.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "planaria", "join", str(folder)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def joined(self) -> bool:
        return "joined" in self._told.read_text()

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def leave(self) -> None:
        """Ctrl-C: it leaves once others have taken over what it has."""
        self._process.send_signal(signal.SIGINT)

    def vanish(self) -> None:
        """All its processes die at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """The run is over: it goes by itself, or is made to."""
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.vanish()


REJOIN_NAME = "rejoin"
VICTIM = 1
"""the replica that dies"""
ROUNDS = 5
"""after its return, in which it must have found its place"""


def recipe_of(given: argparse.Namespace, arm: str, seed: int) -> RunConfig:
    return recipe(
        given,
        f"{REJOIN_NAME}-{arm}-{seed}",
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


def run_rejoin() -> int:
    """A machine dies with a whole replica on it, and another takes its place: what the model loses by that.

    Four replicas of two processes learn Python, with three seeds. In the middle both processes of one replica are
    killed at once. Nobody replaces them, so that the replica disbands and the others use its samples; some seconds
    later `planaria join` brings two workers, and the replica begins anew as a copy of another. The fault-free arm has
    the same seeds, recipe and steps. The claims: the one model's perplexity is at most 1.03 of the fault-free arm's;
    within five rounds, the newcomer is less than twice as far from the others' mean as they are from one another; while
    they are one fewer, nobody waits longer than the recipe's patience.

    Distances are read from checkpoints, in which each replica's weights are, not from what pairs say of each other when
    they meet: a pair tells how far its two are apart, and the newcomer's partner may be the one that it is a copy of. A
    checkpoint counts when all replicas are between the same two rounds. The distance to the mean of n others is divided
    by √(1 + 1/n), as the mean of few is itself not where that of many would be; the usual spread is that of the others
    in the same checkpoint. The largest ratio from the return to the fifth round after it is what is judged.
    """
    flags = parser(REJOIN_NAME, run_rejoin.__doc__)
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
    return conclude(REJOIN_NAME, given, rows_of(given, free, struck))


GUESTS = 2
"""machines that are lent at once, at most"""
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
    rng = random.Random(f"elastic {seed}")
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
        self._random = random.Random(f"elastic {seed} victims")
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
        from planaria.cli.commands.chaos import strike
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


ELASTIC_NAME = "elastic"
STRIKING = 0.85
"""of the seconds of an arm: with more replicas its steps are done sooner"""


def elastic_recipe_of(given: argparse.Namespace, arm: str, seed: int) -> RunConfig:
    return recipe(
        given,
        f"{ELASTIC_NAME}-{arm}-{seed}",
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
        record = run_fleet(elastic_recipe_of(given, arm, seed), around=around)
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


def elastic_rows_of(given: argparse.Namespace, free: Sequence[Outcome], struck: Sequence[Outcome]) -> list[Row]:
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


def run_elastic() -> int:
    """A run that is never left alone: eight replicas of a small byte model learn Python while workers and machines go.

    Two arms with the same seed, recipe and steps. In one, a driver strikes from outside, at random moments that its
    seed gives: it kills a worker of any replica (SIGKILL), freezes one (SIGSTOP, thawed later), lets a machine join
    (`planaria join`, two workers: one replica more), asks one to leave (Ctrl-C), or kills all its processes at once.
    The claims: for each second that a replica exists it trains at least 0.97 of the fault-free arm's tokens; the one
    model's validation loss is within 3 %; every sample is used exactly once; at least 30 such events happened.

    Steps wait for emulated links and not for the processor, so that a replica that is gone makes no other faster. The
    share of the machine that was busy stands in the table: where it comes near to all cores, the first number means
    nothing.

    Whoever is late at a round makes its partner late, which makes the next one late: without end to their patience, all
    replicas would lose in time what each loses by its own faults. So the recipe's is one second.
    """
    flags = parser(ELASTIC_NAME, run_elastic.__doc__)
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
    return conclude(ELASTIC_NAME, given, elastic_rows_of(given, arms["fault-free"], arms["struck"]), notes(arms))


def notes(arms: dict[str, list[Outcome]]) -> list[str]:
    folders = [str(one.record.folder.relative_to(RUNS.parents[1])) for found in arms.values() for one in found]
    return [
        "two numbers: of the arm with events / of the one without; seconds of all replicas together, but for `took`",
        f"{os.cpu_count()} cores, of which the machine kept so many busy",
        f"logs: {', '.join(folders)}",
    ]


if __name__ == "__main__":
    start(rejoin=run_rejoin, elastic=run_elastic)
