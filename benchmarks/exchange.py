"""Exchanges between replicas: perplexity, spread, latency of collectives, and directions of updates."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from benchmarks.exchange_in_process import TOP, Geometry, Measured
from benchmarks.harness import CORES, Claim, Flag, Measurement, Result, Row, benchmark, by_case, gaps, run_config, start
from benchmarks.ladder import engine_for
from planaria.config import recipe as recipes
from planaria.config import shipped
from planaria.config.schema import RunConfig
from planaria.data.shards import tokenise_corpus

# ---- completion times of collectives and pairwise exchanges, given when each replica is ready

Times = np.ndarray
"""seconds, [n]"""


@dataclass(frozen=True)
class ReplicaLinks:
    """Replicas' links, and the random latencies of messages."""

    rate: np.ndarray
    """[n] bytes per second, each way; infinite if only latency counts"""
    latency_s: float
    """median latency of one message"""
    sigma: float
    """standard deviation of its logarithm"""
    draw: np.random.Generator

    def latency(self, count: int | tuple[int, ...]) -> np.ndarray:
        return np.asarray(self.latency_s * self.draw.lognormal(0.0, self.sigma, count))

    def message_s(
        self, source: np.ndarray, target: np.ndarray, bytes: float, trials: tuple[int, ...] = ()
    ) -> np.ndarray:
        """Return the seconds of messages between these replicas, pair by pair, [trials…, pairs]."""
        takes = bytes / np.minimum(self.rate[source], self.rate[target])
        return np.asarray(self.latency((*trials, len(source))) + takes)


def ring(ready: Times, bytes: float, links: ReplicaLinks) -> Times:
    """Ring all-reduce: 2(n − 1) consecutive messages, each of an n-th of the bytes."""
    n = len(ready)
    before = np.arange(-1, n - 1)
    takes = bytes / n / np.minimum(links.rate[before], links.rate)
    done, free = ready, np.zeros(n)  # when each can send its next, and when the link to each is free
    for _ in range(2 * (n - 1)):
        free = np.maximum(done[before], free) + takes
        done = np.maximum(done, free + links.latency(n))
    return done


def tree(ready: Times, bytes: float, links: ReplicaLinks) -> Times:
    """All-reduce along a binomial tree, up and down; each waits for its own half and the other's message.

    ``ready`` may have axes of trials before its last, [trials…, n].
    """
    lead, n = ready.shape[:-1], ready.shape[-1]
    done, spans = ready.copy(), []
    span = 1
    while span < n:
        upper = np.arange(span, n, 2 * span)
        spans.append(upper)
        lower = upper - span
        arrival = done[..., upper] + links.message_s(upper, lower, bytes, lead)
        done[..., lower] = np.maximum(done[..., lower], arrival)
        span *= 2
    for upper in reversed(spans):
        span //= 2
        lower = upper - span
        done[..., upper] = done[..., lower] + links.message_s(lower, upper, bytes, lead)
    return done


def everyone(ready: Times, bytes: float, links: ReplicaLinks) -> Times:
    """All-to-all, starting with the next replica: n − 1 messages over each link, each way. Robust rules need single
    updates."""
    n = len(ready)
    me = np.arange(n)
    done, busy = ready.copy(), ready.copy()
    for k in range(1, n):
        target = (me + k) % n
        busy += bytes / np.minimum(links.rate, links.rate[target])
        done[target] = np.maximum(done[target], busy + links.latency(n))
    return np.asarray(np.maximum(done, busy))


def pairs(ready: Times, bytes: float, links: ReplicaLinks, groups: Sequence[Sequence[int]]) -> Times:
    """Members of each group exchange their updates; a group of one does not wait."""
    done = ready.copy()
    for size in {len(group) for group in groups} - {1}:
        of = np.array([group for group in groups if len(group) == size])
        for shift in range(1, size):
            own, theirs = of.ravel(), np.roll(of, shift, 1).ravel()
            done[own] = np.maximum(done[own], ready[theirs] + links.message_s(theirs, own, (size - 1) * bytes))
    return done


COLLECTIVES: dict[str, Callable[[Times, float, ReplicaLinks], Times]] = {
    "ring": ring,
    "tree": tree,
    "everyone": everyone,
}


NOLOCO, NO_PULL, LOCAL, MIXED = "noloco", "noloco, γ near 0", "local", "noloco, mixed routes"
SAME, HALF, EVERY = "diloco, heavy ball", "diloco, half the rounds", "allreduce"
HEAVY = {"momentum": "heavy_ball", "alpha": 0.3}


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed: validation losses in nats, and the spread between replicas."""

    mean: float
    spread: float


def arms(every: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → the kind of exchange, and its options."""
    return {
        EVERY: ("allreduce", {}),
        SAME: ("diloco", {"every": every, **HEAVY}),
        HALF: ("diloco", {"every": 2 * every, **HEAVY}),
        "diloco, nesterov": ("diloco", {"every": every}),
        NOLOCO: ("noloco", {"every": every}),
        MIXED: ("noloco", {"every": every}),
        "noloco, 8 bits": ("noloco", {"every": every, "bits": 8}),
        "pair mean": ("pair_mean", {"every": every}),
        NO_PULL: ("noloco", {"every": every, "gamma": 1e-6}),
        LOCAL: ("local", {}),
    }


def recipe(args: Namespace, arm: str, seed: int, **optim: Any) -> RunConfig:
    kind, options = arms(args.every)[arm]
    return run_config(
        "exchange_quality",
        seed=seed,
        model={"vocab": 260, "dim": args.dim, "layers": 2, "heads": 4, "hidden": args.dim * 11 // 4, "context": 64},
        pipeline={"stages": 2, "microbatches": 1, "microbatch_size": args.samples},
        routing={"mixed": arm == MIXED},
        data={"tokenizer": "bytes"},
        optim=optim,
        train={"steps": args.steps, "eval_microbatches": 16},
        exchange={"replicas": args.replicas, "kind": kind, "options": options},
    )


def prepared(args: Namespace) -> None:
    config = recipe(args, LOCAL, 0)
    tokenise_corpus(config.data, config.model.vocab, print)


def train(args: Namespace, arm: str, seed: int) -> Outcome:
    engine = engine_for(recipe(args, arm, seed, lr=args.lr, warmup=20, schedule="cosine"))
    while engine.step < args.steps:
        engine.train_step()
    assert engine.replicas is not None
    return Outcome(engine.evaluate(), engine.replicas.spread())


def measure(args: Namespace) -> dict[str, list[Outcome]]:
    found = by_case(args.workers, train, product(arms(args.every), args.seeds), args)
    return {arm: [found[arm, seed] for seed in args.seeds] for arm in arms(args.every)}


def rows_of(found: dict[str, list[Outcome]]) -> list[Row]:
    noloco = found[NOLOCO]
    claims = {SAME: Claim(high=1.03), HALF: Claim(high=1.01), LOCAL: Claim(high=0.97), NO_PULL: Claim(high=1 / 1.03)}
    rows = []
    for arm, outcomes in found.items():
        if arm == NOLOCO:
            continue
        ratios = [math.exp(n.mean - o.mean) for n, o in zip(noloco, outcomes, strict=True)]
        columns = {
            "noloco": f"{math.exp(fmean(o.mean for o in noloco)):.3f}",
            "perplexity": f"{math.exp(fmean(o.mean for o in outcomes)):.3f}",
            "spread": f"{fmean(o.spread for o in outcomes):.2e}",
        }
        rows.append(Row(f"noloco ÷ {arm}", ratios, "1", claims.get(arm), columns))
    for other, limit in ((NO_PULL, 0.15), (LOCAL, 0.10)):
        ratios = [n.spread / o.spread for n, o in zip(noloco, found[other], strict=True)]
        rows.append(Row(f"spread: noloco ÷ {other}", ratios, "0", Claim(high=limit)))
    return rows


SIZES = {
    "seeds": Flag([1, 2, 3]),
    "replicas": Flag(8),
    "steps": Flag(300),
    "every": Flag(15, "inner steps between rounds"),
    "dim": Flag(64),
    "samples": Flag(8, "of each replica in a step, of 64 bytes each"),
    "workers": Flag(CORES, "processes at the same time"),
}


@benchmark("exchange_quality", **SIZES, lr=2e-3)
def run_exchange_quality(args: Namespace) -> Measurement:
    """Compare exchanges by the perplexity of eight replicas of a small byte model that learn Python.

    All arms start alike, read the same samples and take as many steps; the learning rate follows a cosine. The
    perplexity is the mean over replicas. Rounds come every 15 steps, for
    DiLoCo also every 30.

    Claims, as ratios of mean perplexities: NoLoCo over DiLoCo at most 1.03, over half the rounds at most 1.01, over no
    exchange at most 0.97; without the pull to the group's mean (γ near 0) at least 1.03 of NoLoCo. NoLoCo's spread
    between replicas is at most 0.15 of that without the pull, and 0.10 of that without exchange.
    """
    prepared(args)
    return Result(rows_of(measure(args)), ["measured: ratios of validation perplexities; medians"])


CLAIM = Claim(0.6, 1.1)


def train_at(args: Namespace, rate: float, seed: int) -> tuple[float, float]:
    """The spread between replicas, and the validation loss in nats, mean over replicas."""
    engine = engine_for(recipe(args, NOLOCO, seed, lr=rate, warmup=20))
    assert engine.replicas is not None
    spreads = []
    while engine.step < args.steps:
        engine.train_step()
        if engine.step % args.every == 0 and 4 * engine.step > 3 * args.steps:
            spreads.append(engine.replicas.spread())
    return fmean(spreads), engine.evaluate()


def measure_spread(args: Namespace) -> dict[float, list[tuple[float, float]]]:
    """Learning rate → what each seed found."""
    found = by_case(args.workers, train_at, product(args.rates, args.seeds), args)
    return {rate: [found[rate, seed] for seed in args.seeds] for rate in args.rates}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def spread_rows(found: dict[float, list[tuple[float, float]]]) -> list[Row]:
    rates = sorted(found)
    by_seed = [[spread for spread, _ in outcomes] for outcomes in zip(*(found[rate] for rate in rates), strict=True)]
    rows = [Row("log spread over log learning rate", [slope(rates, s) for s in by_seed], "1: SGD, quadratic", CLAIM)]
    for low, high in pairwise(rates):
        here = [math.log(b[0] / a[0]) / math.log(high / low) for a, b in zip(found[low], found[high], strict=True)]
        rows.append(Row(f"from {low:g} to {high:g}", here, "1"))
    for rate in rates:
        columns = {"perplexity": f"{math.exp(fmean(x for _, x in found[rate])):.3f}"}
        rows.append(Row(f"spread at {rate:g}, in 1e-4", [1e4 * s for s, _ in found[rate]], "0", None, columns))
    return rows


@benchmark("exchange_spread", **SIZES, rates=Flag([5e-4, 1e-3, 2e-3, 4e-3], "learning rates"))
def run_exchange_spread(args: Namespace) -> Measurement:
    """Measure the spread between replicas by learning rate, for NoLoCo with AdamW on a small byte model.

    arXiv 2506.10911 proves for SGD on a quadratic that the variance between replicas is proportional to the squared
    learning rate. Here a language model learns with AdamW at a constant rate after the
    warm-up; the spread is taken after each round of the last quarter.

    Claim: the slope of log spread over log learning rate is 0.6 to 1.1.
    """
    prepared(args)
    notes = ["spread: RMS over replicas and weights, after a round"]
    return Result(spread_rows(measure_spread(args)), notes)


SPREADS = (0.1, 0.5, 1.0)  # variances of the logarithm of a message's time
COUNTS = (16, 64, 256, 1024)  # replicas that an all-reduce is simulated for
Collective = Callable[[np.random.Generator, int, float, int], np.ndarray]
"""(times, members, sigma, trials) → until all know the sum, [trials]"""


def along_a_tree(times: np.random.Generator, members: int, sigma: float, trials: int) -> np.ndarray:
    """Until all know the sum, [trials], where messages take their latency alone."""
    links = ReplicaLinks(np.full(members, np.inf), 1.0, sigma, times)
    return np.asarray(tree(np.zeros((trials, members)), 0.0, links).max(1))


def pair_mean_s(sigma: float) -> float:
    """E[max(T₁, T₂)] = e^{µ + σ²/2}(1 + erf(σ/2)) for log-normal T with µ = 0: a pair waits for both messages."""
    return math.exp(sigma**2 / 2) * (1.0 + math.erf(sigma / 2))


def tree_mean_s(members: int, sigma: float) -> float:
    """The exact mean of :func:`along_a_tree`, without drawing. [ours]

    On the way up, 2^k replicas have their sum when both halves have theirs and the one's message has arrived:
    U₀ = 0, Uₖ₊₁ = max(Uₖ, U'ₖ + T), all independent; so P(Uₖ₊₁ ≤ t) = P(Uₖ ≤ t) · P(Uₖ + T ≤ t). On the way down the
    same holds of the time until all know: whoever knows tells one of the other half. So E = 2 E[U_log₂N], here with
    the distributions on a grid of times.
    """
    step, count = 0.01, 1 << 17
    edges = (np.arange(count) + 0.5) * step
    below = np.array([0.5 * (1.0 + math.erf(math.log(edge) / (sigma * math.sqrt(2.0)))) for edge in edges])
    message = np.fft.rfft(np.diff(below, prepend=0.0), 2 * count)
    known = np.ones(count)
    for _ in range(members.bit_length() - 1):
        known = known * np.fft.irfft(np.fft.rfft(known, 2 * count) * message)[:count]
    return float(2.0 * step * (1.0 - known).sum())


def doubling(times: np.random.Generator, members: int, sigma: float, trials: int) -> np.ndarray:
    """Until all know the sum, [trials]: recursive doubling, where in each of log2 N rounds everyone swaps messages with
    someone new and goes on when it has its own half and the other's."""
    done = np.zeros((trials, members))
    for level in range(members.bit_length() - 1):
        theirs = done[:, np.arange(members) ^ (1 << level)] + times.lognormal(0.0, sigma, done.shape)
        done = np.maximum(done, theirs)
    return np.asarray(done.max(1))


DRAWN_LATENCIES: dict[str, Collective] = {"tree": along_a_tree, "recursive doubling": doubling}


def latencies(args: Namespace) -> dict[tuple[str, float, int], list[float]]:
    """(collective, variance, members) → how many times as long as a pair's meeting it takes, by seed."""
    found = {}
    for (name, collective), spread, members in product(DRAWN_LATENCIES.items(), SPREADS, COUNTS):
        sigma = math.sqrt(spread)
        found[name, spread, members] = [
            float(collective(np.random.default_rng(seed), members, sigma, args.trials).mean()) / pair_mean_s(sigma)
            for seed in range(args.seeds)
        ]
    return found


def latency_rows(args: Namespace, found: dict[tuple[str, float, int], list[float]]) -> list[Row]:
    """The formula against drawn times, and all together against the pair."""
    rows = []
    for spread in SPREADS:
        sigma = math.sqrt(spread)
        drawn = [
            float(np.random.default_rng(seed).lognormal(0.0, sigma, (2, args.trials * 100)).max(0).mean())
            for seed in range(args.seeds)
        ]
        ratios = [mean / pair_mean_s(sigma) for mean in drawn]
        rows.append(Row(f"E max of two / formula, sigma² {spread:g}", ratios, "1: exact", Claim(0.99, 1.01)))
    for (name, spread, members), measured in found.items():
        what, levels = f"{name} of {members} / pair, sigma² {spread:g}", f"log2 N = {members.bit_length() - 1}"
        if name == "tree":
            exact = tree_mean_s(members, math.sqrt(spread)) / pair_mean_s(math.sqrt(spread))
            rows.append(Row(what, measured, f"{exact:.2f}: exact; {levels}", Claim(0.98 * exact, 1.02 * exact)))
        else:
            rows.append(Row(what, measured, levels))
    return rows


@benchmark(
    "exchange_law",
    seeds=Flag(3, "repeats of every measurement"),
    trials=Flag(2000, "trees drawn for each mean"),
)
def run_law(args: Namespace) -> Measurement:
    """Simulate the latency of collectives over N replicas with log-normal message times.

    Claim: a tree takes its exact mean, relative to a pair's exchange, within 2 %. Recursive doubling is shown.
    """
    torch.set_num_threads(1)
    return latency_rows(args, latencies(args))


# ---- directions of replicas' updates, and the radial-directional average as a step size

LAST = 3
"""validations averaged as the final loss"""


@dataclass(frozen=True)
class Directions:
    """The final loss of one run in nats, and the medians over its rounds."""

    loss: float
    ratio: float
    cosine: float
    leading: float


Options = tuple[tuple[str, Any], ...]
"""options of DiLoCo that differ from the race's"""


def train_measured(args: Namespace, kind: str, lr: float, options: Options, seed: int) -> Directions:
    """Train an arm of the recipe `exchanges` with other ``options`` of its DiLoCo."""
    tree = recipes.read(shipped.find("exchanges"))
    given = {"every": args.every, "momentum": "heavy_ball", "alpha": 0.3, **dict(options)}
    exchange = tree["exchange"] | {"kind": "benchmarks.exchange_in_process:Measured", "options": given}
    sections = {name: table for name, table in tree.items() if name not in ("compare", "exchange", "optim", "train")}
    optim, training = tree["optim"] | {"kind": kind, "lr": lr}, tree["train"] | {"steps": args.steps}
    config = run_config("exchange_directions", seed=seed, exchange=exchange, optim=optim, train=training, **sections)
    engine, rounds, losses = engine_for(config), list[Geometry](), list[float]()
    while engine.step < args.steps:
        if engine.train_step().rounds:
            rounds.append(Measured.take())
        if engine.step % config.train.eval_every == 0 and engine.step > args.steps - LAST * config.train.eval_every:
            losses.append(engine.evaluate())
    return Directions(
        fmean(losses),
        median(one.ratio for one in rounds),
        median(one.cosine for one in rounds),
        median(one.leading / one.squares for one in rounds),
    )


def direction_arms(ratio: float) -> dict[str, Options]:
    return {
        "mean": (),
        "RDA": (("aggregator", "rda"),),
        "mean × ratio": (("factor", ratio),),
        "mean × ratio, embeddings too": (("beta", 0.7 * ratio),),
    }


def direction_rows(rate: str, found: Mapping[str, Sequence[Directions]]) -> Iterator[Row]:
    for arm, runs in found.items():
        yield Row(f"{rate}: loss, {arm}", [run.loss for run in runs], "")
    for arm in [arm for arm in found if arm.startswith("mean")] if "RDA" in found else ():
        yield Row(f"{rate}: RDA − {arm}", gaps(*([run.loss for run in found[name]] for name in ("RDA", arm))), "0")
    runs = found["mean"]
    yield Row(f"{rate}: mean norm over norm of the mean", [run.ratio for run in runs], "2: orthogonal")
    yield Row(f"{rate}: cosine of two updates", [run.cosine for run in runs], "0: orthogonal")
    yield Row(f"{rate}: energy in 1/{TOP} of the singular values", [run.leading for run in runs], f"{1 / TOP:g}: equal")


@benchmark(
    "exchange_directions",
    seeds=Flag([1, 2, 3]),
    rates=Flag([2e-3, 4e-3], "inner learning rates of AdamW"),
    muon=Flag(3.2e-2, "inner learning rate of Muon, whose updates are only measured"),
    ratio_seed=Flag(4, "seed of the runs that measure the ratio"),
    steps=120,
    every=15,
    workers=Flag(CORES, "processes at the same time"),
)
def run_directions(args: Namespace) -> Measurement:
    """Measure the directions of replicas' updates in DiLoCo, and whether RDA is a step size.

    Model, data and outer step are those of the recipe `exchanges`: four replicas, rounds every 15 steps. The ratio of
    the mean norm to the norm of the mean is measured with the plain mean and ``--ratio-seed``, as the median over
    rounds. Then it is fixed: other seeds train with the mean, RDA, and the mean times this ratio. If the last two tie,
    RDA is a step-size rule. Embeddings are left out of the ratio and, except in the last arm, of the multiplication.
    """
    ratios = {rate: train_measured(args, "adamw", rate, (), args.ratio_seed).ratio for rate in args.rates}
    cases = [("adamw", rate, arm) for rate in args.rates for arm in direction_arms(ratios[rate]).values()]
    cases.append(("muon", args.muon, ()))
    found = by_case(args.workers, train_measured, [(*case, seed) for case in cases for seed in args.seeds], args)
    rows: list[Row] = []
    for rate, ratio in ratios.items():
        arms = direction_arms(ratio)
        runs = {arm: [found["adamw", rate, options, seed] for seed in args.seeds] for arm, options in arms.items()}
        rows += [Row(f"{rate:g}: ratio with seed {args.ratio_seed}", [ratio], ""), *direction_rows(f"{rate:g}", runs)]
    rows += direction_rows("Muon", {"mean": [found["muon", args.muon, (), seed] for seed in args.seeds]})
    return Result(rows, ["losses: means of the last three validations, in nats; values by seed"])


if __name__ == "__main__":
    start(quality=run_exchange_quality, spread=run_exchange_spread, law=run_law, directions=run_directions)
