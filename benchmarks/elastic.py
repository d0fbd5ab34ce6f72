"""Machines that leave, join and come back with whole replicas."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.fleet_run import Once, finished, first_step_t, last_commit_t, require_finished, run_fleet, thaw_later
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Result, Row, benchmark, ratios, run_config, start
from benchmarks.processes import cli
from planaria.cli.fault_injection import send_signal
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.control.log.state_file import read_state
from planaria.control.protocols import Observer
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.faults.trace import Fault
from planaria.report.run.recoveries import recoveries
from planaria.report.run.round_history import settled_rounds, totals
from planaria.report.run.sample_ledger import prove_exactly_once, sample_ledger
from planaria.runtime.api.stage_omission import loss
from planaria.runtime.checkpoint.loading import load_stages
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import CheckpointStore, SealedCheckpoint, replica_folder
from planaria.runtime.preparation import run_folders
from planaria.runtime.worker.step_samples import batches

WORKERS = 2  # of a replica: the ends and one block stage
HOPS = 4  # of a microbatch between them: there and back, forward and backward


def sizes(replicas: int, step_s: float) -> dict[str, Flag]:
    return {
        "replicas": Flag(replicas),
        "step_s": Flag(step_s, "of a step, all of it on the links", metavar="S"),
        "every": Flag(15, "steps from one round to the next"),
        "dim": Flag(64),
        "samples": Flag(8, "of each replica in a step, of 64 bytes each"),
    }


def recipe(args: Namespace, name: str, seed: int, steps: int, exchange: dict[str, Any], **sections: Any) -> RunConfig:
    """A small byte model that learns Python; its step takes ``--step-s``, all of it on the links."""
    shape = {"vocab": 260, "dim": args.dim, "layers": 1, "heads": 4, "hidden": args.dim * 11 // 4, "context": 64}
    options = {"every": args.every, "bits": 8}
    return run_config(
        name,
        seed=seed,
        model=shape,
        pipeline={"stages": WORKERS - 1, "microbatches": 1, "microbatch_size": args.samples},
        data={"tokenizer": "bytes"},
        optim={"lr": 2e-3, "warmup": 20, "schedule": "cosine"},
        train={"steps": steps, "eval_every": 0, "eval_microbatches": 32},
        exchange={"replicas": args.replicas, "kind": "noloco", "options": options, **exchange},
        network={"emulate": "links", "latency_s": args.step_s / HOPS},
        **sections,
    )


def final_loss(record: RunRecord) -> float:
    config = record.config
    model = load_stages(run_folders.newest_whole(record.folder))
    dataset = tokenise_corpus(config.data, config.model.vocab)
    stream = Stream(dataset, "validation", config.model.context, config.seed)
    batch = batches(stream, 0, config.pipeline.microbatch_size)
    return loss(model, batch, config.train.eval_microbatches, ())


class Guest:
    """A machine that joined a run: ``planaria join`` and its workers in their own session."""

    def __init__(self, folder: Path, number: int, *flags: str) -> None:
        self._output = folder / f"guest-{number}.log"
        with self._output.open("w") as file:
            self._process = subprocess.Popen(
                cli("join", folder, *flags), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def joined(self) -> bool:
        return "joined" in self._output.read_text()

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def leave(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def vanish(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Wait for its exit after the run; kill it after 20 s."""
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.vanish()


VICTIM = 1  # the replica that dies
ROUNDS = 5  # after its return, in which it must have found its place


def recipe_of(args: Namespace, arm: str, seed: int) -> RunConfig:
    checkpoint = {"every": max(1, args.every // 4), "keep": args.steps if arm == "faulty" else 2}
    fleet = {"spares": 0, "replace": False}
    return recipe(args, f"rejoin-{arm}-{seed}", seed, args.steps, {}, fleet=fleet, checkpoint=checkpoint)


@dataclass(frozen=True)
class Place:
    """The newcomer in one checkpoint."""

    rounds: int  # that it has settled since its return
    distance: float  # RMS over parameters, to the mean of the others
    usual: float  # of the others, to their own

    @property
    def ratio(self) -> float:
        return self.distance / self.usual


@dataclass(frozen=True)
class Struck:
    """The run whose replica was killed."""

    loss: float
    away: float  # seconds without it
    steps: int  # that each of the others made meanwhile
    longest: float  # seconds that one of the others waited for anybody in a round while it was away
    places: list[Place]
    problems: list[str]


def run_struck(args: Namespace, seed: int) -> Struck:
    faults = tuple(Fault(step=args.steps // 2, stage=VICTIM * WORKERS + n) for n in range(WORKERS))
    guests: list[Guest] = []
    timers: list[threading.Timer] = []

    def around(observer: Observer, folder: Path) -> Observer:
        timers.append(threading.Timer(args.away, lambda: guests.append(Guest(folder, 1))))
        timers[0].daemon = True
        return Once(d.Disband, timers[0].start).attach(observer, folder)

    try:
        record = run_fleet(recipe_of(args, "faulty", seed), faults, around)
    finally:
        for timer in timers:
            timer.cancel()
        for guest in guests:
            guest.end()
    require_finished(record)
    return judged(record)


def judged(record: RunRecord) -> Struck:
    gone = next((t for t, fact in record.history if isinstance(fact, d.Disband)), math.inf)
    back = next((t for t, fact in record.history if isinstance(fact, d.ReplicaRestarted)), math.inf)
    if math.isinf(back):
        raise RunStopped(f"{record.folder}: the replica never came back; give the run more --steps")
    alone = [one for one in settled_rounds(record) if gone <= one.t <= back]
    return Struck(
        loss=final_loss(record),
        away=back - gone,
        steps=sum(isinstance(f, d.Commit) for t, f in record.history if gone <= t <= back) // len(others(record)),
        longest=max((seconds for one in alone for seconds in one.waited_for_peers_s.values()), default=0.0),
        places=places(record),
        problems=prove_exactly_once(record),
    )


def others(record: RunRecord) -> list[int]:
    return [replica for replica in range(record.config.exchange.replicas) if replica != VICTIM]


def places(record: RunRecord) -> list[Place]:
    """Return the newcomer's place in all comparable checkpoints, and remove all but the newest two.

    :raises RunStopped: if the run ended before the fifth round.
    """
    returned: int | None = None
    sealed: set[str] = set()
    found = False
    for _, fact in record.history:
        if isinstance(fact, d.ReplicaRestarted):
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


def comparable(saved: SealedCheckpoint) -> bool:
    positions = saved.manifest.positions
    same = len({standing.rounds for standing in positions.values()}) == 1
    return VICTIM in positions and same and all(standing.inner > 0 for standing in positions.values())


def place(saved: SealedCheckpoint, returned: int) -> Place:
    """Return the newcomer's distance and the usual one; ``returned`` rounds were settled at its return."""
    weights = {replica: weights_of(saved, replica) for replica in saved.manifest.positions}
    rest = torch.stack([each for replica, each in weights.items() if replica != VICTIM])
    count, mean = len(rest), rest.mean(dim=0)
    distance = rms(weights[VICTIM] - mean) / math.sqrt(1 + 1 / count)
    usual = rms(rest - mean) * math.sqrt(count / (count - 1))
    return Place(saved.manifest.positions[VICTIM].rounds - returned, distance, usual)


def weights_of(saved: SealedCheckpoint, replica: int) -> Tensor:
    """Return all fast weights of a replica, concatenated, in float64."""
    folder = replica_folder(saved.folder, replica)
    states = [read_stage(folder, stage, saved.step).weights for stage in saved.manifest.stages]
    return torch.cat([tensor.flatten().double() for state in states for _, tensor in sorted(state.items())])


def rms(of: Tensor) -> float:
    return float(of.square().mean().sqrt())


def rows_of(args: Namespace, free: Sequence[float], faulty: Sequence[Struck]) -> list[Row]:
    over = [math.exp(one.loss - other) for one, other in zip(faulty, free, strict=True)]
    worst = [max(place.ratio for place in one.places) for one in faulty]
    last = [one.places[-1].ratio for one in faulty]
    columns = {
        "mean": fmean(over),
        "faulty": f"{fmean(math.exp(one.loss) for one in faulty):.3f}",
        "fault-free": f"{fmean(map(math.exp, free)):.3f}",
    }
    away = f"{fmean(one.away for one in faulty):.1f} s, {fmean(one.steps for one in faulty):.0f} steps"
    near = {"mean": fmean(worst), "faulty": f"last {fmean(last):.2f}", "fault-free": f"away {away}"}
    waits = [one.longest for one in faulty]
    patience = Claim(high=recipe_of(args, "faulty", 0).exchange.patience_s)
    problems = [len(one.problems) for one in faulty]
    newcomer, places = (
        f"newcomer's distance / usual, {ROUNDS} rounds",
        f"1; {sum(len(one.places) for one in faulty)} places",
    )
    return [
        Row("perplexity / fault-free", over, "1", Claim(high=1.03), columns, "worst"),
        Row(newcomer, worst, places, Claim(high=2.0), near, "worst"),
        Row("longest wait of the others, s", waits, "0", patience, {"mean": fmean(waits)}, "worst"),
        Row("what is wrong with the ledgers", problems, "0", Claim(high=0), {}, "worst"),
    ]


@benchmark(
    "rejoin",
    seeds=3,
    steps=480,
    away=Flag(10.0, "from the death to `planaria join`", metavar="S"),
    **sizes(replicas=4, step_s=0.25),
)
def run_rejoin(args: Namespace) -> Measurement:
    """Measure the loss of a complete replica with its machine, and its replacement by another machine.

    Four replicas of two processes learn Python. In the middle both processes of one replica are killed and not
    replaced, so the replica disbands and the others use its samples; seconds later `planaria join` brings two workers,
    and the replica restarts as a copy of another. The fault-free arm has the same seeds, recipe and steps. Claims: the
    averaged model's perplexity is at most 1.03 of the fault-free arm's; within five rounds the newcomer is less than
    twice as far from the others' mean as they are; while it is away, no replica waits longer than `patience_s`.

    Distances come from checkpoints in which all replicas are between the same two rounds; the distance to the mean of n
    others is divided by √(1 + 1/n). The largest ratio from the return to the fifth round after it is judged.
    """
    free, faulty = [], []
    for seed in range(1, args.seeds + 1):
        free.append(final_loss(finished(recipe_of(args, "fault-free", seed))))
        faulty.append(run_struck(args, seed))
        near = ", ".join(f"{place.rounds}: {place.ratio:.2f}" for place in faulty[-1].places)
        print(f"seed {seed}: {faulty[-1].loss:.4f} and {free[-1]:.4f} nats; distances by round {near}", flush=True)
        print("\n".join(faulty[-1].problems), end="\n" if faulty[-1].problems else "", flush=True)
    return rows_of(args, free, faulty)


GUESTS = 2  # machines that are lent at once, at most
THAW_S = 3.0

What = Literal["kill", "stop", "join", "leave", "vanish"]


@dataclass(frozen=True)
class Deed:
    """An action of the driver, ``at`` seconds after the first step."""

    at: float
    what: What


def deeds(seed: int, seconds: float, every: float) -> list[Deed]:
    """Draw one action per interval, in its middle half: 2/6 kills, 1/6 freezes, 3/6 joins or leaves."""
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
    """Performs the planned actions on a run, from its first step."""

    def __init__(self, folder: Path, planned: Sequence[Deed], seed: int) -> None:
        super().__init__(name="driver", daemon=True)
        self._folder, self._planned = folder, planned
        self._random = random.Random(f"elastic {seed} victims")
        self._come: list[Guest] = []
        self._gone = 0  # number of guests already removed, in order of arrival
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
        """Stop, wait for the guests, and return the mean number of busy cores."""
        cores = (busy_ticks() - self._ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - self._began)
        self._over.set()
        if self.is_alive():
            self.join()
        for guest in self._come:
            guest.end()
        return cores

    def _done(self, what: What) -> bool:
        """Perform the action; return False if it is impossible at the moment."""
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
        """Hit a random worker of a replica."""
        try:
            held = [worker for worker in read_state(self._folder).workers if worker.node is not None]
            if not held:
                return False
            victim = self._random.choice(held)
            send_signal(self._folder, action, f"worker={victim.worker}")
        except UserError:
            return False  # it has just exited
        if action == "stop":
            thaw_later(victim, THAW_S)
        return True


def busy_ticks() -> int:
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return user + nice + system + irq + softirq


STRIKING = 0.85  # of the seconds of an arm: with more replicas its steps are done sooner


def elastic_recipe_of(args: Namespace, arm: str, seed: int) -> RunConfig:
    exchange = {"max_replicas": args.replicas + GUESTS, "patience_s": args.patience}
    steps = round(args.seconds / args.step_s)
    return recipe(args, f"elastic-{arm}-{seed}", seed, steps, exchange, fleet={"spares": 1}, checkpoint={"every": 100})


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed."""

    record: RunRecord
    loss: float
    cores: float
    took: float  # seconds from the first step to the last commit
    live: float  # seconds that replicas existed in that time, all together
    tokens: int
    waited: float  # seconds that replicas waited in rounds, all together
    alone: float  # share of rounds without a partner
    still: float  # seconds that they stood still in recoveries
    idle: float  # seconds that they had nothing left to do at the end, while others had
    problems: list[str]  # what is wrong with the ledger
    events: Counter[str]
    outcomes: Counter[str]  # recoveries by how they ended

    @property
    def rate(self) -> float:
        return self.tokens / self.live


def run_arm(args: Namespace, arm: str, seed: int, planned: Sequence[Deed]) -> Outcome:
    drivers: list[Driver] = []

    def around(observer: Observer, folder: Path) -> Observer:
        drivers.append(Driver(folder, planned, seed))
        return Once(d.RunStep, drivers[0].start).attach(observer, folder)

    cores = 0.0
    try:
        record = run_fleet(elastic_recipe_of(args, arm, seed), around=around)
    finally:
        cores = sum(driver.end() for driver in drivers)
    require_finished(record)
    began, ended = first_step_t(record), last_commit_t(record)
    sums, timings = totals(settled_rounds(record)), recoveries(record)
    return Outcome(
        record=record,
        loss=final_loss(record),
        cores=cores,
        took=ended - began,
        live=live_seconds(record, began, ended),
        tokens=sum(line.samples for line in sample_ledger(record)) * record.config.model.context,
        waited=sums.waited_for_peers_s + sums.waited_for_updates_s,
        alone=sums.alone / sums.attended if sums.attended else 0.0,
        still=sum(timing.total or 0.0 for timing in timings),
        idle=idle_seconds(record, ended),
        problems=prove_exactly_once(record),
        events=happened(record, ended),
        outcomes=Counter(timing.outcome for timing in timings),
    )


def live_seconds(record: RunRecord, began: float, ended: float) -> float:
    """Return the replica-seconds between two moments, from each formation (or ``Found``) to its ``Disband``.

    State transfers of joining replicas and recoveries count as time in which they could have trained.
    """
    since: dict[int, float] = {}
    total = 0.0
    for t, fact in record.history:
        if isinstance(fact, d.ReplicaRestarted | d.Form):
            since.setdefault(fact.replica, min(max(t, began), ended))
        elif isinstance(fact, d.Disband) and fact.replica in since:
            total += min(max(t, began), ended) - since.pop(fact.replica)
    return total + sum(ended - t for t in since.values())


def idle_seconds(record: RunRecord, ended: float) -> float:
    """Return the seconds from each remaining replica's last commit or formation to the last commit of all."""
    since: dict[int, float] = {}
    for t, fact in record.history:
        if isinstance(fact, d.Form | d.Commit):
            since[fact.replica] = min(t, ended)
        elif isinstance(fact, d.Disband):
            since.pop(fact.replica, None)
    return sum(ended - t for t in since.values())


def happened(record: RunRecord, ended: float) -> Counter[str]:
    """Count the events in the log up to the last commit."""
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
    """Return the least seconds that the faults cost: half a step repeated, and a freeze's silence."""
    fleet = outcome.record.config.fleet
    lost = 0.0
    for timing in recoveries(outcome.record):
        lost += step_s / 2 + fleet.heartbeat_s * fleet.missed_heartbeats * ("heartbeat" in timing.causes)
    return lost


def elastic_rows_of(args: Namespace, free: Sequence[Outcome], faulty: Sequence[Outcome]) -> list[Row]:
    events = [sum(one.events.values()) for one in faulty]
    kinds: Counter[str] = sum((one.events for one in faulty), Counter())
    ends: Counter[str] = sum((one.outcomes for one in faulty), Counter())
    founded = sum(isinstance(fact, d.ReplicaRestarted) for one in faulty for _, fact in one.record.history)
    limit = 1 - max(least_lost(one, args.step_s) / one.live for one in faulty)
    problems = [len(one.problems) + len(other.problems) for one, other in zip(free, faulty, strict=True)]
    context = faulty[0].record.config.model.context
    samples = sum(one.tokens for one in (*free, *faulty)) // context

    def both(of: str) -> str:
        return " / ".join(f"{fmean(getattr(one, of) for one in arm):.4g}" for arm in (faulty, free))

    columns = {
        "took s": both("took"),
        "replicas' s": both("live"),
        "waited": both("waited"),
        "stood still": both("still"),
        "idle": both("idle"),
        "alone": both("alone"),
        "cores busy": both("cores"),
    }
    rates = ratios([one.rate for one in faulty], [one.rate for one in free])
    losses = ratios([one.loss for one in faulty], [one.loss for one in free])
    return [
        Row("tokens a replica's second / fault-free", rates, f"steps redone: {limit:.3f}", Claim(low=0.97), columns),
        Row("the one model's loss / fault-free", losses, f"1: {both('loss')} nats", Claim(0.97, 1.03)),
        Row("what is wrong with the ledgers", problems, f"0: {samples} samples", Claim(high=0), {}, "worst"),
        Row("events", events, f"{listed(kinds)}; {listed(ends)}; {founded} founded", Claim(low=30)),
    ]


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


@benchmark(
    "elastic",
    seconds=Flag(600.0, "of an arm, as its steps are meant to take"),
    deed_s=Flag(15.0, "from one event to the next", metavar="S"),
    patience=Flag(1.0, "exchange.patience_s", metavar="S"),
    **sizes(replicas=8, step_s=1.0),
    seeds=1,
)
def run_elastic(args: Namespace) -> Measurement:
    """Measure a run whose workers and machines come and go: eight replicas of a small byte model learn Python.

    Two arms with the same seed, recipe and steps. In one, a driver acts from outside at seeded random moments: it kills
    (SIGKILL) or freezes (SIGSTOP, thawed later) a worker, starts `planaria join` with two workers, asks a machine to
    leave (Ctrl-C), or kills all its processes. Claims: per replica-second it trains at least 0.97 of the fault-free
    arm's tokens; the averaged model's validation loss is within 3 %; every sample is used once; at least 30 events.

    Steps wait for emulated links, so a missing replica speeds up no other. The table shows the busy cores: near all
    cores the first number is meaningless. `exchange.patience_s` is 1 s, because a late replica delays its partner,
    which delays the next.
    """
    arms: dict[str, list[Outcome]] = {"fault-free": [], "faulty": []}
    for seed in range(1, args.seeds + 1):
        for arm, found in arms.items():
            planned = deeds(seed, args.seconds * STRIKING, args.deed_s) if arm == "faulty" else []
            found.append(run_arm(args, arm, seed, planned))
            one = found[-1]
            print(f"seed {seed}, {arm}: {one.rate:.1f} tokens a replica's second, {one.loss:.4f} nats", flush=True)
            print("\n".join(one.problems), end="\n" if one.problems else "", flush=True)
    return Result(elastic_rows_of(args, arms["fault-free"], arms["faulty"]), notes(arms))


def notes(arms: dict[str, list[Outcome]]) -> list[str]:
    folders = [str(one.record.folder.relative_to(RUNS.parents[1])) for found in arms.values() for one in found]
    return [
        "two numbers: of the arm with events / of the one without; seconds of all replicas together, but for `took`",
        f"{os.cpu_count()} cores, shared with other work on the machine",
        f"logs: {', '.join(folders)}",
    ]


if __name__ == "__main__":
    start(rejoin=run_rejoin, elastic=run_elastic)
