"""Gossip and the model: perplexity of each exchange, spread between replicas, and growth of their disagreement."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product, repeat
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from benchmarks.collectives import ReplicaLinks, tree
from benchmarks.common import CORES, IMAGES, in_processes, run_config, write
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, start
from benchmarks.ladder import engine_for
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.data.shards import prepare
from planaria.exchange.gossip import contraction, largest_gamma, random_groups
from planaria.exchange.in_process import Replica, exchange_once, replicas
from planaria.exchange.noloco import NoLoCo
from planaria.exchange.registry import EXCHANGES

EXCHANGE_QUALITY_NAME = "exchange_quality"
NOLOCO, NO_PULL, LOCAL, MIXED = "noloco", "noloco, γ near 0", "local", "noloco, mixed routes"
SAME, HALF, EVERY = "diloco, heavy ball", "diloco, half the rounds", "allreduce"
HEAVY = {"momentum": "heavy_ball", "alpha": 0.3}


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed: validation losses in nats, and the spread between replicas."""

    mean: float
    consensus: float
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


def recipe(given: Namespace, arm: str, seed: int, **optim: Any) -> RunConfig:
    kind, options = arms(given.every)[arm]
    return run_config(
        EXCHANGE_QUALITY_NAME,
        seed=seed,
        model={"vocab": 260, "dim": given.dim, "layers": 2, "heads": 4, "hidden": given.dim * 11 // 4, "context": 64},
        pipeline={"stages": 2, "microbatches": 1, "microbatch_size": given.samples},
        routing={"mixed": arm == MIXED},
        data={"tokenizer": "bytes"},
        optim=optim,
        train={"steps": given.steps, "eval_microbatches": 16},
        exchange={"replicas": given.replicas, "kind": kind, "options": options},
    )


def prepared(given: Namespace) -> None:
    config = recipe(given, LOCAL, 0)
    prepare(config.data, config.model.vocab, print)


def train(given: Namespace, arm: str, seed: int) -> Outcome:
    engine = engine_for(recipe(given, arm, seed, lr=given.lr, warmup=20, schedule="cosine"))
    while engine.step < given.steps:
        engine.train_step()
    assert engine.replicas is not None
    return Outcome(engine.evaluate(), engine.evaluate_consensus(), engine.replicas.spread())


def measure(given: Namespace) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {arm: [] for arm in arms(given.every)}
    jobs = list(product(found, given.seeds))
    outcomes = in_processes(given.workers, train, repeat(given), [arm for arm, _ in jobs], [seed for _, seed in jobs])
    for (arm, seed), one in zip(jobs, outcomes, strict=True):
        found[arm].append(one)
        print(f"seed {seed}, {arm}: {one.mean:.4f}, the one model {one.consensus:.4f}", flush=True)
    return found


def rows_of(found: dict[str, list[Outcome]]) -> list[Row]:
    noloco = found[NOLOCO]
    claims = {SAME: Claim(high=1.03), HALF: Claim(high=1.01), LOCAL: Claim(high=0.97), NO_PULL: Claim(high=1 / 1.03)}
    rows = []
    for arm, outcomes in found.items():
        if arm == NOLOCO:
            continue
        ratios = [math.exp(n.mean - o.mean) for n, o in zip(noloco, outcomes, strict=True)]
        beside: dict[str, float | int | str] = {
            "noloco": f"{math.exp(fmean(o.mean for o in noloco)):.3f}",
            "perplexity": f"{math.exp(fmean(o.mean for o in outcomes)):.3f}",
            "of the one model": f"{math.exp(fmean(o.consensus for o in outcomes)):.3f}",
            "spread": f"{fmean(o.spread for o in outcomes):.2e}",
        }
        rows.append(Row(f"noloco ÷ {arm}", ratios, "1", claims.get(arm), beside))
    for other, limit in ((NO_PULL, 0.15), (LOCAL, 0.10)):
        ratios = [n.spread / o.spread for n, o in zip(noloco, found[other], strict=True)]
        rows.append(Row(f"spread: noloco ÷ {other}", ratios, "0", Claim(high=limit)))
    one = [math.exp(n.consensus - n.mean) for n in noloco]
    rows.append(Row("noloco: the one model ÷ the mean replica", one, "1", Claim(high=1.0), {}, "worst"))
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


@benchmark(EXCHANGE_QUALITY_NAME, **SIZES, lr=2e-3)
def run_exchange_quality(given: Namespace) -> Measurement:
    """Compare exchanges by the perplexity of eight replicas of a small byte model that learn Python.

    All arms start alike, read the same samples and take as many steps; the learning rate follows a cosine. The
    perplexity is the mean over replicas; "the one model" is the mean of their weights. Rounds come every 15 steps, for
    DiLoCo also every 30.

    Claims, as ratios of mean perplexities: NoLoCo over DiLoCo at most 1.03, over half the rounds at most 1.01, over no
    exchange at most 0.97; without the pull to the group's mean (γ near 0) at least 1.03 of NoLoCo. NoLoCo's spread
    between replicas is at most 0.15 of that without the pull, and 0.10 of that without exchange. The one model is no
    worse than the mean replica.
    """
    prepared(given)
    return Result(rows_of(measure(given)), ["measured: ratios of validation perplexities; medians"])


EXCHANGE_SPREAD_NAME = "exchange_spread"
CLAIM = Claim(0.6, 1.1)


def exchange_spread_train(given: Namespace, rate: float, seed: int) -> tuple[float, float]:
    """The spread between replicas, and the validation loss in nats, mean over replicas."""
    engine = engine_for(recipe(given, NOLOCO, seed, lr=rate, warmup=20))
    assert engine.replicas is not None
    spreads = []
    while engine.step < given.steps:
        engine.train_step()
        if engine.step % given.every == 0 and 4 * engine.step > 3 * given.steps:
            spreads.append(engine.replicas.spread())
    return fmean(spreads), engine.evaluate()


def exchange_spread_measure(given: Namespace) -> dict[float, list[tuple[float, float]]]:
    """Learning rate → what each seed found."""
    found: dict[float, list[tuple[float, float]]] = {rate: [] for rate in given.rates}
    jobs = list(product(given.rates, given.seeds))
    rates, seeds = [rate for rate, _ in jobs], [seed for _, seed in jobs]
    outcomes = in_processes(given.workers, exchange_spread_train, repeat(given), rates, seeds)
    for (rate, seed), one in zip(jobs, outcomes, strict=True):
        found[rate].append(one)
        print(f"seed {seed}, learning rate {rate:g}: spread {one[0]:.3e}, loss {one[1]:.4f}", flush=True)
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def exchange_spread_rows_of(found: dict[float, list[tuple[float, float]]]) -> list[Row]:
    rates = sorted(found)
    by_seed = [[spread for spread, _ in outcomes] for outcomes in zip(*(found[rate] for rate in rates), strict=True)]
    rows = [Row("log spread over log learning rate", [slope(rates, s) for s in by_seed], "1: SGD, quadratic", CLAIM)]
    for low, high in pairwise(rates):
        here = [math.log(b[0] / a[0]) / math.log(high / low) for a, b in zip(found[low], found[high], strict=True)]
        rows.append(Row(f"from {low:g} to {high:g}", here, "1"))
    for rate in rates:
        beside: dict[str, float | int | str] = {"perplexity": f"{math.exp(fmean(x for _, x in found[rate])):.3f}"}
        rows.append(Row(f"spread at {rate:g}, in 1e-4", [1e4 * s for s, _ in found[rate]], "0", None, beside))
    return rows


@benchmark(EXCHANGE_SPREAD_NAME, **SIZES, rates=Flag([5e-4, 1e-3, 2e-3, 4e-3], "learning rates"))
def run_exchange_spread(given: Namespace) -> Measurement:
    """Measure the spread between replicas by learning rate, for NoLoCo with AdamW on a small byte model.

    arXiv 2506.10911 proves for SGD on a quadratic that the variance between replicas is proportional to the squared
    learning rate (`exchange law` measures that). Here a language model learns with AdamW at a constant rate after the
    warm-up; the spread is taken after each round of the last quarter.

    Claim: the slope of log spread over log learning rate is 0.6 to 1.1.
    """
    prepared(given)
    notes = ["spread: RMS over replicas and weights, after a round"]
    return Result(exchange_spread_rows_of(exchange_spread_measure(given)), notes)


WIDTH, HEIGHT = 800, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 566, 48, 340
INK, RULE = "#7d8896", "#8b95a1"


@dataclass(frozen=True)
class Line:
    """One line: a value for each count, and what stands beside its end."""

    name: str
    values: Sequence[float]
    colour: str
    dashes: str = ""  # as SVG's ``stroke-dasharray``


def svg(title: str, what: str, x: str, y: str, counts: Sequence[int], lines: Sequence[Line]) -> str:
    """The figure; ``what`` tells those who cannot see it what it shows. Counts are spaced by their logarithm."""
    top = 5.0 * math.ceil(max(value for line in lines for value in line.values) / 5.0)
    low, high = math.log(counts[0]), math.log(counts[-1])

    def across(count: int) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log(count) - low) / (high - low)

    def up(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="title what" font-family="system-ui, -apple-system, \'Segoe UI\', Roboto, sans-serif" '
        f'font-size="14" fill="{INK}">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="what">{escape(what)}</desc>',
        _text(LEFT, 26, title, "start", ' font-size="16"'),
        _text((LEFT + RIGHT) / 2, HEIGHT - 12, x),
        f'<text transform="translate(18 {(TOP + BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y)}</text>',
    ]
    for value in range(0, int(top) + 1, 5):
        parts.append(f'<path d="M{LEFT},{up(value):.1f} H{RIGHT}" stroke="{RULE}" stroke-opacity="0.3"/>')
        parts.append(_text(LEFT - 8, up(value) + 5, str(value), "end"))
    parts += [_text(across(count), BOTTOM + 22, f"{count:,}") for count in counts]
    ends = _apart([up(line.values[-1]) for line in lines])
    for line, end in zip(lines, ends, strict=True):
        points = [(across(count), up(value)) for count, value in zip(counts, line.values, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dashes}/>')
        parts.append(_text(RIGHT + 10, end + 5, line.name, "start", f' fill="{line.colour}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _apart(heights: Sequence[float], gap: float = 17.0) -> list[float]:
    """Heights for labels, in the same order: as near to these as can be reached by pushing upwards, and legible."""
    placed: dict[int, float] = {}
    above = math.inf
    for index in sorted(range(len(heights)), key=lambda i: -heights[i]):
        above = placed[index] = min(heights[index], above - gap)
    return [placed[index] for index in range(len(heights))]


LAW_NAME = "exchange_law"
MEMBERS = 64
EXCHANGE_LAW_WIDTH = 64  # numbers in the one parameter of each replica
MOMENTA = (0.3, 0.5, 0.9)
RATES = (0.00025, 0.0005, 0.001, 0.002)  # learning rates of the inner SGD, whose curvature is 1
SPREADS = (0.1, 0.5, 1.0)  # variances of the logarithm of a message's time
COLOURS = ("#3f7fb5", "#2f9a6c", "#e29a3d")
COUNTS = (16, 64, 256, 1024)  # replicas that an all-reduce is simulated for
Collective = Callable[[np.random.Generator, int, float, int], np.ndarray]
"""(times, members, sigma, trials) → until all know the sum, [trials]"""


def disagreement(of: dict[int, Replica]) -> float:
    """Variance between replicas, mean over numbers."""
    return torch.stack([replica.outer["slow"]["w"] for replica in of.values()]).var(0).mean().item()


def moments(made: NoLoCo, members: int) -> np.ndarray:
    """The exact recursion in E|d|², E⟨d, δ⟩, E|δ|² of δ ← αδ − γPd, d ← d + δ without noise, [3, 3]."""
    c, alpha, gamma = contraction(members, made.group), made.alpha, made.gamma
    delta = np.array([c * gamma**2, -2 * alpha * gamma * c, alpha**2])
    cross = np.array([-gamma * c, alpha, 0.0])
    return np.stack([np.array([1.0, 0.0, 0.0]) + 2 * cross + delta, cross + delta, delta])


def growth(made: NoLoCo, seed: int, rounds: int) -> float:
    """By what the disagreement of replicas without any training grows in a round, after a first fifth of the rounds."""
    of = replicas(made, {"w": torch.zeros(EXCHANGE_LAW_WIDTH)}, MEMBERS)
    for member, replica in of.items():
        generator = torch.Generator().manual_seed(1000 * seed + member)
        replica.fast = {"w": torch.randn(EXCHANGE_LAW_WIDTH, generator=generator)}
        replica.outer = made.start(replica.fast)
    seen = [disagreement(of)]
    for round in range(rounds):
        exchange_once(made, of, round, seed)
        seen.append(disagreement(of))
    first = rounds // 5
    return float((seen[-1] / seen[first]) ** (1.0 / (rounds - first)))


def stability_rows(given: Namespace) -> list[Row]:
    """Growth at 0.85 and 1.15 of the bound, and a recipe that is refused."""
    rows = []
    for alpha in MOMENTA:
        bound = largest_gamma(alpha, contraction(MEMBERS, 2))
        for share, claim in ((0.85, Claim(high=0.9999)), (1.15, Claim(low=1.0001))):
            made = NoLoCo.model_construct(alpha=alpha, beta=0.0, gamma=share * bound)
            exact = np.abs(np.linalg.eigvals(moments(made, MEMBERS))).max()
            measured = [growth(made, seed, given.rounds) for seed in range(given.seeds)]
            what = f"growth a round, alpha {alpha:g}, gamma {share:g} of the bound"
            rows.append(Row(what, measured, f"{exact:.3f}: exact", claim, {"gamma": f"{made.gamma:.3f}"}))
    refused = 0
    try:
        EXCHANGES.make("noloco", {"alpha": 0.9, "gamma": 0.7})
    except UserError:
        refused = 1
    what = "a recipe of alpha 0.9, gamma 0.7 is refused"
    rows.append(Row(what, [refused], "1: yes", Claim(low=1.0), {"gamma": "0.7"}))
    return rows


def stationary(made: NoLoCo, members: int, rate: float, inner: int, seed: int, rounds: int) -> float:
    """Variance between replicas that take SGD steps on ½x² with unit gradient noise, mean over the later rounds."""
    of = replicas(made, {"w": torch.zeros(EXCHANGE_LAW_WIDTH)}, members)
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for round in range(rounds):
        for replica in of.values():
            for _ in range(inner):
                gradient = replica.fast["w"] + torch.randn(EXCHANGE_LAW_WIDTH, generator=generator)
                replica.fast["w"] = replica.fast["w"] - rate * gradient
        exchange_once(made, of, round, seed)
        seen.append(disagreement(of))
    return sum(seen[rounds // 3 :]) / len(seen[rounds // 3 :])


def noise_factor(made: NoLoCo, members: int) -> float:
    """Stationary variance between replicas for drifts of variance 1 and no curvature: the recursion's fixed point."""
    noise = made.beta**2 * (1 / made.group - 1 / members) * members / (members - 1)
    return float(np.linalg.solve(np.eye(3) - moments(made, members), np.full(3, noise))[0])


def variance_rows(given: Namespace) -> list[Row]:
    """The slope over four learning rates, and the variance itself at the smallest."""
    made, members, inner = NoLoCo(), 16, 10
    slopes, factors = [], []
    for seed in range(given.seeds):
        found = [stationary(made, members, rate, inner, seed, given.rounds) for rate in RATES]
        slopes.append(slope(RATES, found))
        factors.append(found[0] / (inner * RATES[0] ** 2))
    exact = noise_factor(made, members)
    limit = f"{exact:.3f}: exact without curvature"
    return [
        Row("log variance over log learning rate, slope", slopes, "2: drifts go with the rate", Claim(1.9, 2.1)),
        Row("variance between replicas / variance of a drift", factors, limit, Claim(0.9 * exact, 1.1 * exact)),
    ]


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


COLLECTIVES: dict[str, Collective] = {"tree": along_a_tree, "recursive doubling": doubling}


def latencies(given: Namespace) -> dict[tuple[str, float, int], list[float]]:
    """(collective, variance, members) → how many times as long as a pair's meeting it takes, by seed."""
    found = {}
    for (name, collective), spread, members in product(COLLECTIVES.items(), SPREADS, COUNTS):
        sigma = math.sqrt(spread)
        found[name, spread, members] = [
            float(collective(np.random.default_rng(seed), members, sigma, given.trials).mean()) / pair_mean_s(sigma)
            for seed in range(given.seeds)
        ]
    return found


def latency_rows(given: Namespace, found: dict[tuple[str, float, int], list[float]]) -> list[Row]:
    """The formula against drawn times, and all together against the pair."""
    rows = []
    for spread in SPREADS:
        sigma = math.sqrt(spread)
        drawn = [
            float(np.random.default_rng(seed).lognormal(0.0, sigma, (2, given.trials * 100)).max(0).mean())
            for seed in range(given.seeds)
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


def latency_figure(found: dict[tuple[str, float, int], list[float]]) -> str:
    """Medians over the seeds, as SVG."""
    lines = []
    for name, (spread, colour) in product(COLLECTIVES, zip(SPREADS, COLOURS, strict=True)):
        values = [median(found[name, spread, members]) for members in COUNTS]
        lines.append(Line(f"{name}, σ² = {spread:g}", values, colour, "" if name == "tree" else "7 4"))
    lines.append(Line("log₂ N", [math.log2(members) for members in COUNTS], RULE, "2 4"))
    return svg(
        "All-reduce over a pair's meeting, log-normal message times",
        "How many times as long as a meeting of two an all-reduce of N replicas takes, by a tree and by recursive "
        "doubling, for three spreads of message times. All lie above log2 N, and the further the wider the spread.",
        "replicas N",
        "times as long as a pair",
        COUNTS,
        lines,
    )


def barrier(members: int, inner: int, straggle: float, seed: int, rounds: int) -> float:
    """Time of all over time of pairs when each round waits: inner steps log-normal (1, ½), messages at once."""
    drawn = np.random.default_rng(seed)
    together, pairs = 0.0, np.zeros(members)
    for round in range(rounds):
        took = drawn.lognormal(1.0, math.sqrt(0.5), (members, inner)).sum(1)
        took *= np.where(drawn.random(members) < straggle, 5.0, 1.0)
        together += took.max()
        pairs += took
        for group in random_groups(round, range(members), 2, seed):
            pairs[list(group)] = pairs[list(group)].max()
    return float(together / pairs.max())


def barrier_rows(given: Namespace) -> list[Row]:
    """Steady replicas, and some that take five times as long in a twentieth of the rounds."""
    settings: Sequence[tuple[int, int, float, Claim | None]] = (
        (8, 100, 0.0, None), (64, 100, 0.0, None), (64, 1, 0.0, None),
        (8, 100, 0.05, Claim(low=1.1)), (64, 100, 0.05, Claim(low=1.1)),
    )  # fmt: skip
    rows = []
    for members, inner, straggle, claim in settings:
        times = [barrier(members, inner, straggle, seed, given.barriers) for seed in range(given.seeds)]
        what = f"wait for all / for one: N {members}, {inner} steps, {straggle:.0%} are 5 times slower"
        rows.append(Row(what, times, "1: no member waits", claim))
    return rows


@benchmark(
    LAW_NAME,
    seeds=Flag(3, "repeats of every measurement"),
    rounds=Flag(150, "of gossip, in each simulation of replicas"),
    trials=Flag(2000, "trees drawn for each mean"),
    barriers=Flag(500, "rounds of waiting"),
)
def run_law(given: Namespace) -> Measurement:
    """Simulate the laws of gossip between replicas with the functions that training uses (docs/systems.md).

    Stability: disagreement shrinks below the bound on gamma and grows above it; a recipe beyond it is refused.
    Variance: with SGD on a noisy quadratic, the variance between replicas is proportional to the squared learning rate.
    Latency: a tree over N replicas with log-normal message times takes its exact mean, relative to a pair's exchange,
    within 2 %; recursive doubling is shown. Waiting for all costs more than for one. ``--save`` also draws
    docs/images/exchange_law.svg.
    """
    torch.set_num_threads(1)
    found = latencies(given)
    rows = [*stability_rows(given), *variance_rows(given), *latency_rows(given, found), *barrier_rows(given)]
    if given.save:
        write(IMAGES / f"{LAW_NAME}.svg", latency_figure(found))
    notes = [
        f"stability: {MEMBERS} replicas in pairs, {EXCHANGE_LAW_WIDTH} numbers each, no training; bound: equation (3)",
        "variance: 16 replicas, 10 SGD steps a round on ½x² with unit noise; alpha 0.5, beta = gamma = 0.7;",
        f"  rates {RATES[0]:g} … {RATES[-1]:g}, small against 1 / curvature / steps (beyond, the slope falls below 2)",
    ]
    return Result(rows, notes)


if __name__ == "__main__":
    start(quality=run_exchange_quality, spread=run_exchange_spread, law=run_law)
