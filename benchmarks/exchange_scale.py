"""Exchange among many replicas: rounds with stragglers, and steps and seconds from 4 to 4,096 replicas."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.common import RUNS, Claim, Row, conclude, parser, saved, start
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished, run_fleet
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
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

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.exchange.base import Exchange
    from planaria.exchange.lab import Replica


STRAGGLERS_NAME = "stragglers"
CLAIM = Claim(low=1.10)
ARMS = {"all": "diloco", "pairs": "noloco"}


def recipe(kind: str, seed: int, replicas: int, rounds: int, every: int, pass_s: float) -> RunConfig:
    """Replicas of two stages whose forward takes ``pass_s`` and whose backward twice that."""
    return RunConfig(
        name=f"{STRAGGLERS_NAME}-{kind}-{seed}",
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=VOCAB, dim=32, layers=1, heads=2, hidden=64, context=16),
        pipeline=PipelineConfig(stages=1, microbatches=1, microbatch_size=1),
        data=bytes_data(),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=rounds * every, eval_every=0),
        exchange=ExchangeConfig(replicas=replicas, kind=kind, options=Options({"every": every}), patience_s=1000.0),
        fleet=FleetConfig(spares=0, missed=40),
        checkpoint=CheckpointConfig(every=0),
        network=NetworkConfig(
            emulate=True, forward_s=[pass_s], backward_s=[2 * pass_s], straggle=0.05, straggle_times=5.0
        ),
    )


def train(config: RunConfig) -> tuple[float, float]:
    """Seconds from the first step to the last commit; of them, the mean replica's between a step due and the next."""
    record = run_fleet(config)
    require_finished(record)
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


def run_stragglers() -> int:
    """Stragglers among eight replicas: how long a round of all waits for them, and how long a round of two does.

    Every replica is real processes on the fleet; stages sleep what the recipe says, and one round in twenty a replica
    takes five times as long. All arms have the same seeds, and with them the same stragglers in the same rounds. The
    claim: rounds of all (DiLoCo) take at least 1.10 times as long as rounds in pairs (NoLoCo).
    """
    flags = parser(STRAGGLERS_NAME, run_stragglers.__doc__)
    flags.add_argument("--replicas", type=int, default=8)
    flags.add_argument("--rounds", type=int, default=40)
    flags.add_argument("--every", type=int, default=4, help="steps from one round to the next")
    flags.add_argument("--pass-ms", type=float, default=20.0, help="of a forward at each of the two stages")
    flags.add_argument("--seeds", type=int, default=3)
    given = flags.parse_args()
    shape = (given.replicas, given.rounds, given.every, given.pass_ms / 1e3)
    took: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for seed in range(1, given.seeds + 1):
        for arm, kind in ARMS.items():
            took[arm].append(train(recipe(kind, seed, *shape)))
    seconds = {arm: [total for total, _ in found] for arm, found in took.items()}
    beside = {
        f"{arm}: {what}": f"{statistics.median(found[place] for found in took[arm]):.1f} s"
        for arm in ARMS
        for place, what in enumerate(("took", "waited"))
    }
    row = Row(
        what="rounds of all / pairs",
        values=[one / other for one, other in zip(seconds["all"], seconds["pairs"], strict=True)],
        limit="modelled 1.19 for 8 replicas",
        claim=CLAIM,
        beside=beside,
    )
    return conclude(STRAGGLERS_NAME, given, [row])


HIDDEN, CLASSES, HELD_OUT = 32, 10, 397
OWN, BATCH = 16, 4
"""images that a replica has, drawn for it; of a step"""


@dataclass(frozen=True)
class Method:
    """One way to agree: the exchange's name and options, and what carries its messages."""

    name: str
    carrier: str
    """a collective of :mod:`planaria.pipeline.network.collectives`, or ``pairs``"""
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    """of the exchange; empty: none"""

    @property
    def every(self) -> int:
        """Inner steps from round to round; 0: in every step; -1: never."""
        found: int = self.options.get("every", 0 if self.carrier else -1)
        return found // int(self.options.get("fragments", 1))


@dataclass(frozen=True)
class Place:
    """Where replicas stand: what a step takes and what a message takes there."""

    name: str
    step_s: float
    """median of one replica's step"""
    step_sigma: float
    """of its logarithm, from step to step"""
    bytes: float
    """of the weights, or of a step's gradients"""
    rate: float
    """median bytes a second of a replica's link"""
    rate_sigma: float
    """of its logarithm, from replica to replica"""
    latency_s: float
    latency_sigma: float


def clock(place: Place, method: Method, n: int, steps: int, seed: int, free: bool = False) -> float:
    """Seconds a step, lateness of all rounds included; ``free``: messages take no time, so others' lateness is left."""
    from planaria.exchange.gossip import random_groups
    from planaria.pipeline.network.collectives import COLLECTIVES, Links, pairs

    drawn = np.random.default_rng([seed, n])
    rate = np.full(n, np.inf) if free else place.rate * drawn.lognormal(0.0, place.rate_sigma, n)
    links = Links(rate, 0.0 if free else place.latency_s, place.latency_sigma, np.random.default_rng([seed, n, 1]))
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
            heard = pairs(now, said, links, random_groups(step, range(n), 2, seed))
        else:
            heard = COLLECTIVES[method.carrier](now, said, links)
        if late:
            coming = step + late, heard
        else:
            now = heard
    return float(now.max()) / steps


class Digits:
    """The images, and ``n`` replicas' nets side by side: every weight has a first axis of replicas."""

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
        """Of every replica's own batch."""
        rows = self.own.gather(1, torch.randint(OWN, (self.n, BATCH), generator=self.draw))
        x, y = self.images[rows], self.labels[rows]
        w = self.weights
        before = torch.baddbmm(w["b"].unsqueeze(1), x, w["a"])
        hidden = before.relu()
        logits = torch.baddbmm(w["d"].unsqueeze(1), hidden, w["c"])
        wrong = (logits.softmax(-1) - torch.nn.functional.one_hot(y, CLASSES)) / BATCH
        back = (wrong @ w["c"].transpose(1, 2)) * (before > 0)
        return {
            "a": x.transpose(1, 2) @ back,
            "b": back.sum(1),
            "c": hidden.transpose(1, 2) @ wrong,
            "d": wrong.sum(1),
        }

    def loss(self) -> float:
        """Of the mean model, on images that nobody trains on."""
        x, y = self.unseen
        w = {name: value.mean(0) for name, value in self.weights.items()}
        logits = (x @ w["a"] + w["b"]).relu() @ w["c"] + w["d"]
        return float(torch.nn.functional.cross_entropy(logits, y))


def losses(method: Method, n: int, rate: float, steps: int, seed: int) -> Iterator[float]:
    """The mean model's loss after each step of SGD with momentum 0.9 at ``rate``."""
    from planaria.exchange.kinds import EXCHANGES
    from planaria.exchange.lab import Replica, settle

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
            _fetch(nets, of)
        if agreed is not None and step % method.every == 0:
            coming = step + agreed.overlap, _heard(method, agreed, of, step // method.every - 1, seed)
        if agreed is not None and due and step == coming[0]:
            settle(agreed, of, coming[1])
            nets.weights = {name: torch.stack([of[i].fast[name] for i in range(n)]) for name in nets.weights}
        yield nets.loss()


def _heard(method: Method, agreed: Exchange, of: dict[int, Replica], round: int, seed: int) -> Any:
    """What each has heard in a round. Where all hear all, each is given their mean as if it were alone: adding up a
    thousand offers at each of a thousand replicas comes to the same."""
    from planaria.exchange.base import Offer
    from planaria.exchange.lab import offers

    if method.carrier == "pairs":
        return offers(agreed, of, round, seed)
    said = [agreed.offer(replica.outer, replica.fast).blocking for replica in of.values()]
    mean = torch.stack([one for one in said if one is not None]).mean(0)
    return {i: {i: Offer(mean)} for i in of}


def _fetch(nets: Digits, of: Mapping[int, Replica]) -> None:
    for i, replica in of.items():
        replica.fast = _row(nets, i)


def _row(nets: Digits, i: int) -> dict[str, Tensor]:
    return {name: value[i].clone() for name, value in nets.weights.items()}


def steps_to(target: float, found: Iterator[float]) -> float:
    """Steps until the loss is at most ``target``; infinite if it never is."""
    return next((float(step) for step, loss in enumerate(found, 1) if loss <= target), float("inf"))


EXCHANGE_SCALE_NAME = "exchange_scale"
TUNED, TRAINED = 64, (4, 64, 256, 1024)
"""replicas with which options are searched; with which learning is measured"""
RATES = (0.02, 0.04)
REACHED_AT = 0.2
"""of the steps: then all-reduce's loss is the target"""
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


def target(given: argparse.Namespace, n: int, seed: int) -> float:
    """All-reduce's loss after a part of the steps, at its best rate."""
    best = min(RATES, key=lambda rate: curve("all-reduce, ring", 0, n, rate, given.steps, seed)[-1])
    return curve("all-reduce, ring", 0, n, best, given.steps, seed)[math.ceil(REACHED_AT * given.steps) - 1]


def learned(given: argparse.Namespace, name: str, choice: int, n: int, rate: float, seed: int) -> float:
    """Steps until the target; the two all-reduces learn alike."""
    like = "all-reduce, ring" if name.startswith("all-reduce") else name
    return steps_to(target(given, n, seed), iter(curve(like, choice, n, rate, given.steps, seed)))


def tuned(given: argparse.Namespace, place: Place, name: str) -> tuple[int, float]:
    """The choice of the grid and the rate of least time to the target, on the seed of the search."""

    def took(one: tuple[int, float]) -> float:
        choice, rate = one
        return learned(given, name, choice, TUNED, rate, 0) * clock(place, GRID[name][choice], TUNED, given.clock, 0)

    return min(product(range(len(GRID[name])), RATES), key=took)


def step_parts(given: argparse.Namespace, place: Place, method: Method, n: int) -> tuple[float, float, float]:
    """Seconds a step: computing, waiting for others who compute longer, messages."""
    seeds = range(1, given.seeds + 1)
    whole = median(clock(place, method, n, given.clock, seed) for seed in seeds)
    waiting = median(clock(place, method, n, given.clock, seed, free=True) for seed in seeds)
    computing = place.step_s * math.exp(place.step_sigma**2 / 2)
    return computing, max(0.0, waiting - computing), max(0.0, whole - waiting)


def place_rows(given: argparse.Namespace, place: Place) -> Iterator[Row]:
    for name in GRID:
        choice, rate = tuned(given, place, name)
        method = GRID[name][choice]
        chosen = ", ".join(f"{k} {v}" for k, v in method.options.items() if k != "momentum") or "-"
        for n in given.replicas:
            parts = step_parts(given, place, method, n)
            beside = dict(zip(("compute s", "wait s", "messages s"), (f"{x:.2f}" for x in parts), strict=True))
            beside |= {"options": f"rate {rate:g}, {chosen}"}
            what = f"{place.name}, {name}, {n}"
            if n not in TRAINED or n > given.most:
                yield Row(f"{what}: seconds a step", [sum(parts)], "", None, beside)
                continue
            steps = [learned(given, name, choice, n, rate, seed) for seed in range(1, given.seeds + 1)]
            beside |= {"steps": " ".join(f"{s:g}" for s in steps)}
            yield Row(f"{what}: hours to the target", [s * sum(parts) / 3600 for s in steps], "", None, beside)


def over_rows(rows: Sequence[Row], given: argparse.Namespace, place: Place) -> Iterator[Row]:
    """Hours to the target of pairs over those of ways in which all hear all, with seeds with which both get there."""
    hours = {row.what.split(":")[0]: row.values for row in rows if "hours" in row.what}
    for rival, n in product(("all-reduce, ring", "DiLoCo, ring"), TRAINED):
        if n <= given.most and n in given.replicas:
            mine, other = (hours[f"{place.name}, {name}, {n}"] for name in ("NoLoCo, pairs", rival))
            ratios = [a / b for a, b in zip(mine, other, strict=True) if max(a, b) < math.inf]
            yield Row(f"{place.name}, {n}: hours of NoLoCo over {rival}", ratios, f"1; {len(ratios)} seeds get there")


def growth_rows(given: argparse.Namespace) -> Iterator[Row]:
    """Messages of a round among 4,096 over those among 64, where links are alike."""
    place = replace(PLACES[0], step_sigma=0.0, rate_sigma=0.0)
    for carrier, claim in (("pairs", Claim(high=1.5)), ("tree", Claim(low=1.5)), ("ring", None), ("star", None)):
        method = Method(carrier, carrier, {"every": 1})
        found = {n: [clock(place, method, n, 4, seed) for seed in range(given.seeds)] for n in (64, 4096)}
        ratios = [large / small for small, large in zip(found[64], found[4096], strict=True)]
        yield Row(f"a round of 4,096 over one of 64, {carrier}", ratios, "1", claim)


def predicted(kind: str, seed: int, flags: dict[str, float]) -> float:
    """Seconds of a run of ``stragglers`` by the clock, from the draws that its processes make."""
    from planaria.exchange.kinds import exchange
    from planaria.pipeline.network.collectives import Links, everyone, pairs
    from planaria.runtime.engine.sleeper import straggling

    n, rounds, every = int(flags["replicas"]), int(flags["rounds"]), int(flags["every"])
    config = recipe(kind, seed, n, rounds, every, flags["pass_ms"] / 1e3)
    free = Links(np.full(n, np.inf), 0.0, 0.0, np.random.default_rng(0))
    now = np.zeros(n)
    for number in range(rounds):
        now = now + np.array([every * 6 * flags["pass_ms"] / 1e3 * straggling(config, i, number) for i in range(n)])
        groups = exchange(config.exchange).groups(number, range(n), seed)
        now = everyone(now, 0.0, free) if kind == "diloco" else pairs(now, 0.0, free, groups)
    return float(now.max())


def real_row() -> Row:
    found = saved("stragglers")
    measured: Sequence[float] = found["rows"][0]["values"]
    ratios = []
    for seed, ratio in enumerate(measured, 1):
        both = [predicted(kind, seed, found["flags"]) for kind in ("diloco", "noloco")]
        ratios.append(both[0] / both[1] / ratio)
    limit = "measured on 16 processes: " + ", ".join(f"{x:.2f}" for x in measured)
    return Row("stragglers: rounds of all over pairs, predicted / measured", ratios, limit, Claim(0.85, 1.15))


def run_exchange_scale() -> int:
    """Time to a target for 4 to 4,096 replicas: steps that each way of agreeing needs, times what a step takes there.

    Steps are measured: replicas learn handwritten digits, with planaria's own exchanges; the
    options of each method are searched for, by time to the target on a seed apart and with 64 replicas, for each place
    by itself. The rarest rounds are every 20 steps, 50 of them in a run. What a step takes is simulated: log-normal
    steps, links and latencies, a collective priced as what carries it (ring, tree, star, or pairs), and lateness that
    is handed on from round to round. It is told in parts: computing, waiting for others, messages. Where the clock can
    be held against real processes, it is: the rounds of ``stragglers`` are predicted from the same draws. Nothing is
    claimed of who wins; claimed is that the clock predicts those rounds, and that a round in pairs does not grow with
    the number of replicas while one of all does.

    Needs the extra experts (scikit-learn's digits come with it).
    """
    flags = parser(EXCHANGE_SCALE_NAME, run_exchange_scale.__doc__)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=1000, help="of learning")
    flags.add_argument("--clock", type=int, default=100, help="steps of which the clock takes the mean")
    flags.add_argument("--replicas", type=int, nargs="+", default=[4, 64, 256, 1024, 4096])
    flags.add_argument("--most", type=int, default=1024, help="replicas whose learning is measured")
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    rows = [real_row(), *growth_rows(given)]
    for place in PLACES:
        found = list(place_rows(given, place))
        rows += [*found, *over_rows(found, given, place)]
    notes = [
        f"options: by time to the target with {TUNED} replicas, seed 0",
        f"target: all-reduce's loss at {REACHED_AT:g} of the steps; inf, or null in the file: not within the steps",
    ]
    return conclude(EXCHANGE_SCALE_NAME, given, rows, notes)


if __name__ == "__main__":
    start(stragglers=run_stragglers, scale=run_exchange_scale)
