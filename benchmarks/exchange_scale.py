"""Exchange among many replicas: stragglers, a slow replica, slow links, and the time to a target of 4 to 4,096."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.exchange import COLLECTIVES, ReplicaLinks, everyone, pairs
from benchmarks.exchange_in_process import Replica, exchanged, settle
from benchmarks.fleet_run import finished, sleeping, small_run
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, ratios, saved, start
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.log.run_record import RunRecord
from planaria.exchange.base import Exchange, Update
from planaria.exchange.gossip import random_groups
from planaria.exchange.registry import EXCHANGES, make_exchange
from planaria.faults.trace import Fault
from planaria.models.families import stage_parameters
from planaria.pipeline.network.costs import FP32_BYTES
from planaria.runtime.worker.sleeping_runner import slowdown_factor

ARMS = {"all": "diloco", "pairs": "noloco"}


def recipe(kind: str, seed: int, replicas: int, rounds: int, every: int, pass_s: float) -> RunConfig:
    """Replicas of two stages whose forward takes ``pass_s`` and whose backward takes twice that."""
    return small_run(
        f"stragglers-{kind}-{seed}",
        rounds * every,
        seed=seed,
        optim={"lr": 1e-3},
        exchange={"replicas": replicas, "kind": kind, "options": {"every": every}, "patience_s": 1000.0},
        fleet={"missed_heartbeats": 40},
        network=sleeping(pass_s, straggle_probability=0.05, straggle_factor=5.0),
    )


def train(config: RunConfig) -> tuple[float, float]:
    """Train; return the seconds from the first step to the last commit, and the mean replica's wait."""
    record = finished(config)
    began = {}
    last: dict[int, float] = {}
    waited = 0.0
    for t, fact in record.history:
        if isinstance(fact, d.RunStep):
            began.setdefault(fact.replica, t)
        elif isinstance(fact, d.Commit):
            last[fact.replica] = t
        elif isinstance(fact, d.Settle):
            waited += sum(t - last[replica] for replica in fact.members)
    return max(last.values()) - max(began.values()), waited / config.exchange.replicas


@benchmark(
    "stragglers",
    replicas=8,
    rounds=40,
    every=Flag(4, "steps from one round to the next"),
    pass_ms=Flag(20.0, "of a forward at each of the two stages"),
    seeds=3,
)
def run_stragglers(args: Namespace) -> Measurement:
    """Measure rounds of all replicas over rounds in pairs, with stragglers.

    Eight replicas are real processes whose stages sleep; in one round of twenty a replica takes five times as long. All
    arms have the same stragglers. Claim: rounds of all (DiLoCo) take at least 1.10 times as long as pairs (NoLoCo).
    """
    shape = (args.replicas, args.rounds, args.every, args.pass_ms / 1e3)
    took: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for seed in range(1, args.seeds + 1):
        for arm, kind in ARMS.items():
            took[arm].append(train(recipe(kind, seed, *shape)))
    seconds = {arm: [total for total, _ in found] for arm, found in took.items()}
    columns = {
        f"{arm}: {what}": f"{median(found[place] for found in took[arm]):.1f} s"
        for arm in ARMS
        for place, what in enumerate(("took", "waited"))
    }
    over = ratios(seconds["all"], seconds["pairs"])
    return [Row("rounds of all / pairs", over, "modelled 1.19 for 8 replicas", Claim(low=1.10), columns)]


HIDDEN, CLASSES, HELD_OUT = 32, 10, 397
OWN, BATCH = 16, 4  # images of a replica; of a step


@dataclass(frozen=True)
class Method:
    """A method of agreement: exchange, options, and the collective of its messages."""

    name: str
    carrier: str  # a collective of :mod:`benchmarks.exchange`, or ``pairs``
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""  # of the exchange; empty: none

    @property
    def every(self) -> int:
        """Inner steps between rounds; 0: every step; -1: never."""
        found: int = self.options.get("every", 0 if self.carrier else -1)
        return found // int(self.options.get("fragments", 1))


@dataclass(frozen=True)
class Place:
    """The times of steps and messages at a location."""

    name: str
    step_s: float  # median of one replica's step
    step_sigma: float  # of its logarithm, from step to step
    bytes: float  # of the weights, or of a step's gradients
    rate: float  # median bytes a second of a replica's link
    rate_sigma: float  # of its logarithm, from replica to replica
    latency_s: float
    latency_sigma: float


def clock(place: Place, method: Method, n: int, steps: int, seed: int, free: bool = False) -> float:
    """Return the seconds per step including delays; with ``free``, messages take no time."""
    drawn = np.random.default_rng([seed, n])
    rate = np.full(n, np.inf) if free else place.rate * drawn.lognormal(0.0, place.rate_sigma, n)
    links = ReplicaLinks(
        rate, 0.0 if free else place.latency_s, place.latency_sigma, np.random.default_rng([seed, n, 1])
    )
    every, late = method.every, int(method.options.get("delay", 0))
    said = place.bytes * method.options.get("bits", 32) / 32 / method.options.get("fragments", 1)
    now, coming = np.zeros(n), None
    for step in range(1, steps + 1):
        now = now + place.step_s * drawn.lognormal(0.0, place.step_sigma, n)
        if coming is not None and step == coming[0]:
            now, coming = np.maximum(now, coming[1]), None
        if every < 0 or step % max(1, every):
            continue
        if method.carrier == "pairs":
            arrived = pairs(now, said, links, random_groups(step, range(n), 2, seed))
        else:
            arrived = COLLECTIVES[method.carrier](now, said, links)
        if late:
            coming = step + late, arrived
        else:
            now = arrived
    return float(now.max()) / steps


class Digits:
    """The images and the nets of ``n`` replicas, stacked along the first axis of every weight."""

    def __init__(self, n: int, seed: int) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(found.data, dtype=torch.float32)[order] / 16
        labels = torch.tensor(found.target)[order]
        self.images, self.labels = images[HELD_OUT:], labels[HELD_OUT:]
        self.unseen = images[:HELD_OUT], labels[:HELD_OUT]
        draw = torch.Generator().manual_seed(seed)
        first = torch.randn(64, HIDDEN, generator=draw) / 8
        second = torch.randn(HIDDEN, CLASSES, generator=draw) / HIDDEN**0.5
        begin = {"a": first, "b": torch.zeros(HIDDEN), "c": second, "d": torch.zeros(CLASSES)}
        self.n, self.draw = n, draw
        self.own = torch.randint(len(self.images), (n, OWN), generator=draw)
        self.weights = {name: w.expand(n, *w.shape).clone() for name, w in begin.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of each replica's batch."""
        rows = self.own.gather(1, torch.randint(OWN, (self.n, BATCH), generator=self.draw))
        x, y = self.images[rows], self.labels[rows]
        w = self.weights
        before = torch.baddbmm(w["b"].unsqueeze(1), x, w["a"])
        hidden = before.relu()
        logits = torch.baddbmm(w["d"].unsqueeze(1), hidden, w["c"])
        wrong = (logits.softmax(-1) - torch.nn.functional.one_hot(y, CLASSES)) / BATCH
        back = (wrong @ w["c"].transpose(1, 2)) * (before > 0)
        return {"a": x.transpose(1, 2) @ back, "b": back.sum(1), "c": hidden.transpose(1, 2) @ wrong, "d": wrong.sum(1)}

    def loss(self) -> float:
        x, y = self.unseen
        w = {name: value.mean(0) for name, value in self.weights.items()}
        logits = (x @ w["a"] + w["b"]).relu() @ w["c"] + w["d"]
        return float(torch.nn.functional.cross_entropy(logits, y))


def losses(method: Method, n: int, rate: float, steps: int, seed: int) -> Iterator[float]:
    """Yield the mean model's loss after each step of SGD with momentum 0.9 at ``rate``."""
    nets, velocity = Digits(n, seed), dict[str, Any]()
    options = {name: value for name, value in method.options.items() if name != "bits"}
    agreed: Exchange | None = EXCHANGES.make(method.kind, options) if method.kind else None
    of = {i: Replica(_row(nets, i), agreed.start(_row(nets, i))) for i in range(n)} if agreed else {}
    coming: Any = None
    for step in range(1, steps + 1):
        found = nets.gradients()
        if method.every == 0:
            found = {name: g.mean(0, keepdim=True).expand_as(g) for name, g in found.items()}
        for name, g in found.items():
            velocity[name] = 0.9 * velocity.get(name, 0.0) + g
            nets.weights[name] = nets.weights[name] - rate * velocity[name]
        if agreed is not None and (due := step % method.every == 0 or (coming and step == coming[0])):
            for i, replica in of.items():
                replica.fast = _row(nets, i)
        if agreed is not None and step % method.every == 0:
            coming = step + agreed.overlap, _heard(method, agreed, of, step // method.every - 1, seed)
        if agreed is not None and due and step == coming[0]:
            settle(agreed, of, coming[1])
            nets.weights = {name: torch.stack([of[i].fast[name] for i in range(n)]) for name in nets.weights}
        yield nets.loss()


def _heard(method: Method, agreed: Exchange, of: dict[int, Replica], round: int, seed: int) -> Any:
    """Return the updates that each replica receives; where all receive all, only their mean, which is equivalent."""
    if method.carrier == "pairs":
        return exchanged(agreed, of, round, seed)
    said = [agreed.update(replica.outer, replica.fast).blocking for replica in of.values()]
    mean = torch.stack([one for one in said if one is not None]).mean(0)
    return {i: {i: Update(mean)} for i in of}


def _row(nets: Digits, i: int) -> dict[str, Tensor]:
    return {name: value[i].clone() for name, value in nets.weights.items()}


TUNED, TRAINED = 64, (4, 64, 256, 1024)  # replicas for the search of options; for measured learning
RATES = (0.02, 0.04)
REACHED_AT = 0.2  # share of the steps at which all-reduce's loss is the target
PLACES = (
    Place("home links", 1.0, 0.3, 5e8, 12.5e6, 0.5, 0.04, 0.7),
    Place("one data centre", 1.0, 0.3, 5e8, 3.1e9, 0.1, 1e-4, 0.5),
)
"""0.12 billion parameters; steps of a second, 100 Mbit/s or 25 Gbit/s"""


def heavy(every: int, alpha: float) -> dict[str, object]:
    return {"every": every, "alpha": alpha, "momentum": "heavy_ball"}


GRID: dict[str, list[Method]] = {
    "all-reduce, ring": [Method("all-reduce, ring", "ring")],
    "all-reduce, tree": [Method("all-reduce, tree", "tree")],
    "DiLoCo, ring": [
        Method("DiLoCo, ring", "ring", heavy(e, a), "diloco") for e, a in product((5, 20), (0.0, 0.3, 0.6))
    ],
    "streaming, ring": [
        Method("streaming, ring", "ring", heavy(20, a) | {"fragments": 2, "delay": 5, "mix": 0.5}, "streaming_diloco")
        for a in (0.0, 0.3, 0.6)
    ],
    "NoLoCo, pairs": [
        Method("NoLoCo, pairs", "pairs", {"every": e, "alpha": a, "gamma": g}, "noloco")
        for e, a, g in product((5, 20), (0.0, 0.3), (0.3, 0.7))
    ],
    "local": [Method("local", "")],
}


@cache
def curve(name: str, choice: int, n: int, rate: float, steps: int, seed: int) -> tuple[float, ...]:
    return tuple(losses(GRID[name][choice], n, rate, steps, seed))


def target(args: Namespace, n: int, seed: int) -> float:
    """Return all-reduce's loss at :data:`REACHED_AT` of the steps, at its best rate."""
    best = min(RATES, key=lambda rate: curve("all-reduce, ring", 0, n, rate, args.steps, seed)[-1])
    return curve("all-reduce, ring", 0, n, best, args.steps, seed)[math.ceil(REACHED_AT * args.steps) - 1]


def learned(args: Namespace, name: str, choice: int, n: int, rate: float, seed: int) -> float:
    """Return the steps until the target, or infinity; both all-reduces learn alike."""
    like = "all-reduce, ring" if name.startswith("all-reduce") else name
    reached, losses_ = target(args, n, seed), curve(like, choice, n, rate, args.steps, seed)
    return next((float(step) for step, loss in enumerate(losses_, 1) if loss <= reached), math.inf)


def tuned(args: Namespace, place: Place, name: str) -> tuple[int, float]:
    """Return the grid's choice and the rate with the least time to the target, on seed 0."""

    def took(one: tuple[int, float]) -> float:
        choice, rate = one
        return learned(args, name, choice, TUNED, rate, 0) * clock(place, GRID[name][choice], TUNED, args.clock, 0)

    return min(product(range(len(GRID[name])), RATES), key=took)


def step_parts(args: Namespace, place: Place, method: Method, n: int) -> tuple[float, float, float]:
    """Return the seconds per step of computing, waiting for slower replicas, and messages."""
    seeds = range(1, args.seeds + 1)
    whole = median(clock(place, method, n, args.clock, seed) for seed in seeds)
    waiting = median(clock(place, method, n, args.clock, seed, free=True) for seed in seeds)
    computing = place.step_s * math.exp(place.step_sigma**2 / 2)
    return computing, max(0.0, waiting - computing), max(0.0, whole - waiting)


def place_rows(args: Namespace, place: Place) -> Iterator[Row]:
    for name in GRID:
        choice, rate = tuned(args, place, name)
        method = GRID[name][choice]
        chosen = ", ".join(f"{k} {v}" for k, v in method.options.items() if k != "momentum") or "-"
        for n in args.replicas:
            parts = step_parts(args, place, method, n)
            columns = dict(zip(("compute s", "wait s", "messages s"), (f"{x:.2f}" for x in parts), strict=True))
            columns |= {"options": f"rate {rate:g}, {chosen}"}
            what = f"{place.name}, {name}, {n}"
            if n not in TRAINED or n > args.most:
                yield Row(f"{what}: seconds a step", [sum(parts)], "", None, columns)
                continue
            steps = [learned(args, name, choice, n, rate, seed) for seed in range(1, args.seeds + 1)]
            columns |= {"steps": " ".join(f"{s:g}" for s in steps)}
            yield Row(f"{what}: hours to the target", [s * sum(parts) / 3600 for s in steps], "", None, columns)


def over_rows(rows: Sequence[Row], args: Namespace, place: Place) -> Iterator[Row]:
    """Hours to the target of pairs over those of collectives, for seeds where both reach it."""
    hours = {row.what.split(":")[0]: row.values for row in rows if "hours" in row.what}
    for rival, n in product(("all-reduce, ring", "DiLoCo, ring"), TRAINED):
        if n <= args.most and n in args.replicas:
            mine, other = (hours[f"{place.name}, {name}, {n}"] for name in ("NoLoCo, pairs", rival))
            over = [a / b for a, b in zip(mine, other, strict=True) if max(a, b) < math.inf]
            yield Row(f"{place.name}, {n}: hours of NoLoCo over {rival}", over, f"1; {len(over)} seeds get there")


def growth_rows(args: Namespace) -> Iterator[Row]:
    """Time of a round of 4,096 replicas over one of 64, with equal links."""
    place = replace(PLACES[0], step_sigma=0.0, rate_sigma=0.0)
    for carrier, claim in (("pairs", Claim(high=1.5)), ("tree", Claim(low=1.5))):
        method = Method(carrier, carrier, {"every": 1})
        found = {n: [clock(place, method, n, 4, seed) for seed in range(args.seeds)] for n in (64, 4096)}
        yield Row(f"a round of 4,096 over one of 64, {carrier}", ratios(found[4096], found[64]), "1", claim)


def predicted(kind: str, seed: int, flags: dict[str, float]) -> float:
    """Predict the seconds of a run of ``stragglers`` from its processes' random draws."""
    n, rounds, every = int(flags["replicas"]), int(flags["rounds"]), int(flags["every"])
    config = recipe(kind, seed, n, rounds, every, flags["pass_ms"] / 1e3)
    free = ReplicaLinks(np.full(n, np.inf), 0.0, 0.0, np.random.default_rng(0))
    now = np.zeros(n)
    for number in range(rounds):
        now = now + np.array(
            [every * 6 * flags["pass_ms"] / 1e3 * slowdown_factor(config, i, number) for i in range(n)]
        )
        groups = make_exchange(config.exchange).groups(number, range(n), seed)
        now = everyone(now, 0.0, free) if kind == "diloco" else pairs(now, 0.0, free, groups)
    return float(now.max())


def real_row() -> Row:
    found = saved("stragglers")
    measured: Sequence[float] = found["rows"][0]["values"]
    over = []
    for seed, ratio in enumerate(measured, 1):
        both = [predicted(kind, seed, found["flags"]) for kind in ("diloco", "noloco")]
        over.append(both[0] / both[1] / ratio)
    limit = "measured on 16 processes: " + ", ".join(f"{x:.2f}" for x in measured)
    return Row("stragglers: rounds of all over pairs, predicted / measured", over, limit, Claim(0.85, 1.15))


@benchmark(
    "exchange_scale",
    seeds=3,
    steps=Flag(1000, "of learning"),
    clock=Flag(100, "steps of which the clock takes the mean"),
    replicas=[4, 64, 256, 1024, 4096],
    most=Flag(1024, "replicas whose learning is measured"),
)
def run_exchange_scale(args: Namespace) -> Measurement:
    """Compute the time to a target for 4 to 4,096 replicas: measured steps times simulated seconds per step.

    Steps: replicas learn handwritten digits with planaria's exchanges; options are searched by time to the target, on a
    separate seed with 64 replicas, per location. Seconds: log-normal steps, links and latencies, collectives (ring,
    tree, pairs), and delays passed on between rounds; shown as computing, waiting and messages. Claims: the clock
    predicts the rounds of `stragglers` from the same draws; a round in pairs does not grow with the replicas, one of
    all does. Needs the extra experts (scikit-learn's digits).
    """
    torch.set_num_threads(1)
    rows = [real_row(), *growth_rows(args)]
    for place in PLACES:
        found = list(place_rows(args, place))
        rows += [*found, *over_rows(found, args, place)]
    notes = [
        f"options: by time to the target with {TUNED} replicas, seed 0",
        f"target: all-reduce's loss at {REACHED_AT:g} of the steps; inf, or null in the file: not within the steps",
    ]
    return Result(rows, notes)


# ---- a decoupled exchange beside a slow replica

FAST = (0, 1)  # replicas
SLOW = 2
STAGES = 2  # of a replica, with the ends
SKIP = 10  # first steps
LAST = 20  # steps whose training loss is averaged
SLOW_ARMS = ("lone", "decoupled", "killed", "all due", "noloco")


def exchange_of(args: Namespace, arm: str) -> dict[str, Any]:
    """Return an arm's exchange; all have a round of the same weights every sixteen steps."""
    if arm == "noloco":
        return {"kind": "noloco", "options": {"every": 16}}
    everyone = {"min_due": 3} if arm == "all due" else {}
    return {"kind": "decoupled", "options": {"every": 16, "fragments": 2, "delay": args.delay, **everyone}}


def slow_recipe(args: Namespace, arm: str, seed: int) -> RunConfig:
    """Replicas of two stages that learn bytes; their links determine the duration of a step."""
    replicas = len(FAST) + (arm != "lone")
    return small_run(
        f"decoupled-{arm.replace(' ', '-')}-{seed}",
        args.steps,
        STAGES - 1,
        seed=seed,
        model={"vocab": 260, "heads": 4, "hidden": 88, "context": 32},
        pipeline={"microbatch_size": 4},
        optim={"lr": 2e-3, "warmup": 10, "schedule": "constant"},
        exchange={"replicas": replicas, "patience_s": 1000.0, **exchange_of(args, arm)},
        fleet={"spares": 1 if arm == "killed" else 0},
        network={"emulate": "links", "latency_s": args.step_s / 4},
    )


def faults(args: Namespace, arm: str) -> tuple[Fault, ...]:
    """Slow the third replica's batches down; in the arm "killed", also kill its stage every few of its steps."""
    if arm == "lone":
        return ()
    ends, block = SLOW * STAGES, SLOW * STAGES + 1  # its nodes
    slow = Fault(step=0, stage=ends, signal="slow_data", strength=2 * args.step_s)
    kills = range(args.kill_every, args.steps, args.kill_every) if arm == "killed" else ()
    return (slow, *(Fault(step=step, stage=block) for step in kills))


def step_seconds(record: RunRecord) -> float:
    """Return the mean seconds of the fast replicas' steps that belong to them, without the first ten."""
    times: dict[int, list[float]] = {replica: [] for replica in FAST}
    steps = record.starts[0][1].steps
    for t, fact in record.history:
        if isinstance(fact, d.Commit) and fact.replica in times and fact.step < steps:
            times[fact.replica].append(t)
    return fmean((of[-1] - of[SKIP]) / (len(of) - 1 - SKIP) for of in times.values())


def last_losses(record: RunRecord) -> dict[int, float]:
    of: dict[int, list[float]] = defaultdict(list)
    for metric in record.trained:
        for replica, loss in metric.losses.items():
            of[replica].append(loss)
    return {replica: fmean(values[-LAST:]) for replica, values in of.items()}


def contributions(record: RunRecord) -> float:
    members = {
        fact.round: fact.contributors or fact.members for _, fact in record.history if isinstance(fact, d.Settle)
    }
    return fmean(SLOW in of for of in members.values())


@benchmark(
    "decoupled_slow",
    steps=Flag(60, "of each replica, if each uses its own samples"),
    step_s=Flag(0.2, "of a step, all of it on the links", metavar="S"),
    delay=Flag(4, "steps before a round is settled; the fast ones make three in one of the slow one"),
    kill_every=Flag(6, "steps of the slow replica from one SIGKILL to the next"),
    seeds=3,
)
def run_slow(args: Namespace) -> Measurement:
    """Train two fast replicas and one that is three times slower, as processes, with several exchanges.

    The first arm has the fast ones alone. Claims: with a decoupled exchange the fast ones keep >= 0.95 of their speed,
    also if the slow one is killed every few steps. Rounds that wait for all are shown, with the losses of each
    replica's last steps and the share of rounds in which the slow one's update counted.
    """
    took: dict[str, list[float]] = defaultdict(list)
    columns: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(1, args.seeds + 1):
        for arm in SLOW_ARMS:
            config = slow_recipe(args, arm, seed)
            record = finished(config, faults(args, arm))
            took[arm].append(step_seconds(record))
            by_replica = last_losses(record)
            columns[arm]["loss, fast"].append(fmean(by_replica[replica] for replica in FAST))
            if arm != "lone":
                columns[arm]["loss, slow"].append(by_replica[SLOW])
                columns[arm]["slow contributed"].append(contributions(record))
    claims = {"decoupled": Claim(low=0.95), "killed": Claim(low=0.95)}
    return [
        Row(
            f"speed of the fast ones: {arm} / lone",
            ratios(took["lone"], took[arm]),
            "1",
            claims.get(arm),
            {name: f"{median(values):.3f}" for name, values in columns[arm].items()},
        )
        for arm in SLOW_ARMS
        if arm != "lone"
    ]


# ---- rounds of eager and blocking DiLoCo on slow links

LATENCY_S = 0.02
EAGER_ARMS = (("eager", 2.0), ("eager", 8.0), ("diloco", 2.0))
"""exchange, and seconds of the larger stage's message on a link"""


def linked_recipe(args: Namespace, kind: str, message_s: float) -> RunConfig:
    """Three replicas of two stages that sleep. The block's message is 700 times as large as an activation."""
    plain = recipe(kind, 1, 3, args.rounds, args.every, args.pass_ms / 1e3)
    model = plain.model.model_copy(update={"hidden": 4096})
    bandwidth = FP32_BYTES * stage_parameters(model, 1, 1) / message_s
    return small_run(
        f"eager-{kind}-{message_s:g}",
        plain.train.steps,
        model=model.model_dump(),
        exchange=plain.exchange.model_dump(),
        fleet={"missed_heartbeats": 40},
        network=sleeping(args.pass_ms / 1e3, latency_s=LATENCY_S, bandwidth=bandwidth),
    )


def round_waits(record: RunRecord) -> tuple[float, float]:
    """Return the share of the time in which rounds wait for messages, and the mean seconds of the inner steps.

    A round begins when all members have made their inner steps, and is settled when all messages have arrived.
    """
    began = [t for t, fact in record.history if isinstance(fact, d.BeginRound)]
    ended = [t for t, fact in record.history if isinstance(fact, d.Settle)]
    inner = [begin - end for begin, end in zip(began[1:], ended[:-1], strict=True)]
    return 1.0 - sum(inner) / (ended[-1] - ended[0]), fmean(inner)


@benchmark(
    "exchange_eager",
    rounds=6,
    every=Flag(16, "inner steps between rounds"),
    pass_ms=Flag(30.0, "of a forward at each of the two stages"),
    repeats=2,
)
def run_eager(args: Namespace) -> Measurement:
    """Measure how long rounds of eager and of blocking DiLoCo wait for messages over emulated links.

    Three replicas of two stages are processes whose passes sleep; each pair has its own link. The inner steps of a
    round take 5 s, its messages 2 or 8 s. A wait is from the last member's arrival until all updates have arrived.
    Claim: eager rounds wait for at most 0.01 of the time if messages take less than the inner steps.
    """
    rows = []
    for kind, message_s in EAGER_ARMS:
        found = [round_waits(finished(linked_recipe(args, kind, message_s))) for _ in range(args.repeats)]
        inner_s = median(seconds for _, seconds in found)
        claim = Claim(high=0.01) if kind == "eager" and message_s < inner_s else None
        columns = {"inner steps": f"{inner_s:.2f} s"}
        rows.append(
            Row(f"{kind}, messages of {message_s:g} s: waits", [w for w, _ in found], "0", claim, columns, "worst")
        )
    return rows


if __name__ == "__main__":
    start(stragglers=run_stragglers, scale=run_exchange_scale, decoupled=run_slow, eager=run_eager)
