"""The laws of gossip between replicas, by simulation with the functions that training uses (docs/noloco.md).

Stability: replicas that pull themselves together over momentum stay together below the bound on gamma and drift apart
above it; a recipe beyond it is refused. Variance: with SGD on a noisy quadratic, the variance between replicas goes
with the square of the learning rate. Latency: a tree of messages between N replicas, drawn with log-normal times,
takes as many times as long as a message to and fro in a pair as its exact mean says, ± 2 % (recursive doubling is shown
beside it); and waiting for all costs more than for one. With ``--save``, the latencies are also drawn
(docs/images/exchange_law.svg).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import numpy as np
import torch

from benchmarks.common import IMAGES, Claim, Row, conclude, parser, start, write
from benchmarks.figure import RULE, Line, svg
from planaria.common.errors import UserError
from planaria.exchange import EXCHANGES
from planaria.exchange.gossip import contraction, largest_gamma, random_groups
from planaria.exchange.lab import Replica, meet, replicas
from planaria.exchange.noloco import NoLoCo
from planaria.pipeline.network.collectives import Links, tree

NAME = "exchange_law"
MEMBERS = 64
WIDTH = 64
"""numbers in the one parameter of each replica"""
MOMENTA = (0.3, 0.5, 0.9)
RATES = (0.00025, 0.0005, 0.001, 0.002)
"""learning rates of the inner SGD, whose curvature is 1"""
SPREADS = (0.1, 0.5, 1.0)
"""variances of the logarithm of a message's time"""
COLOURS = ("#3f7fb5", "#2f9a6c", "#e29a3d")
COUNTS = (16, 64, 256, 1024)
"""replicas that an all-reduce is simulated for"""
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
    of = replicas(made, {"w": torch.zeros(WIDTH)}, MEMBERS)
    for member, replica in of.items():
        generator = torch.Generator().manual_seed(1000 * seed + member)
        replica.fast = {"w": torch.randn(WIDTH, generator=generator)}
        replica.outer = made.start(replica.fast)
    seen = [disagreement(of)]
    for round in range(rounds):
        meet(made, of, round, seed)
        seen.append(disagreement(of))
    first = rounds // 5
    return float((seen[-1] / seen[first]) ** (1.0 / (rounds - first)))


def stability_rows(given: argparse.Namespace) -> list[Row]:
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
    rows.append(
        Row("a recipe of alpha 0.9, gamma 0.7 is refused", [refused], "1: yes", Claim(low=1.0), {"gamma": "0.7"})
    )
    return rows


def stationary(made: NoLoCo, members: int, rate: float, inner: int, seed: int, rounds: int) -> float:
    """Variance between replicas that take SGD steps on ½x² with unit gradient noise, mean over the later rounds."""
    of = replicas(made, {"w": torch.zeros(WIDTH)}, members)
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for round in range(rounds):
        for replica in of.values():
            for _ in range(inner):
                gradient = replica.fast["w"] + torch.randn(WIDTH, generator=generator)
                replica.fast["w"] = replica.fast["w"] - rate * gradient
        meet(made, of, round, seed)
        seen.append(disagreement(of))
    return sum(seen[rounds // 3 :]) / len(seen[rounds // 3 :])


def noise_factor(made: NoLoCo, members: int) -> float:
    """Stationary variance between replicas for drifts of variance 1 and no curvature: the recursion's fixed point."""
    noise = made.beta**2 * (1 / made.group - 1 / members) * members / (members - 1)
    return float(np.linalg.solve(np.eye(3) - moments(made, members), np.full(3, noise))[0])


def variance_rows(given: argparse.Namespace) -> list[Row]:
    """The slope over four learning rates, and the variance itself at the smallest."""
    made, members, inner = NoLoCo(), 16, 10
    slopes, factors = [], []
    for seed in range(given.seeds):
        found = [stationary(made, members, rate, inner, seed, given.rounds) for rate in RATES]
        slopes.append(float(np.polyfit(np.log(RATES), np.log(found), 1)[0]))
        factors.append(found[0] / (inner * RATES[0] ** 2))
    exact = noise_factor(made, members)
    return [
        Row("log variance over log learning rate, slope", slopes, "2: drifts go with the rate", Claim(1.9, 2.1)),
        Row(
            "variance between replicas / variance of a drift",
            factors,
            f"{exact:.3f}: exact without curvature",
            Claim(0.9 * exact, 1.1 * exact),
        ),
    ]


def along_a_tree(times: np.random.Generator, members: int, sigma: float, trials: int) -> np.ndarray:
    """Until all know the sum, [trials], where messages take their latency alone."""
    links = Links(np.full(members, np.inf), 1.0, sigma, times)
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


def latencies(given: argparse.Namespace) -> dict[tuple[str, float, int], list[float]]:
    """(collective, variance, members) → how many times as long as a pair's meeting it takes, by seed."""
    found = {}
    for (name, collective), spread, members in product(COLLECTIVES.items(), SPREADS, COUNTS):
        sigma = math.sqrt(spread)
        found[name, spread, members] = [
            float(collective(np.random.default_rng(seed), members, sigma, given.trials).mean()) / pair_mean_s(sigma)
            for seed in range(given.seeds)
        ]
    return found


def latency_rows(given: argparse.Namespace, found: dict[tuple[str, float, int], list[float]]) -> list[Row]:
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
    lines = [
        Line(
            f"{name}, σ² = {spread:g}",
            [median(found[name, spread, members]) for members in COUNTS],
            colour,
            "" if name == "tree" else "7 4",
        )
        for name in COLLECTIVES
        for spread, colour in zip(SPREADS, COLOURS, strict=True)
    ]
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


def barrier_rows(given: argparse.Namespace) -> list[Row]:
    """Steady replicas, and some that take five times as long in a twentieth of the rounds."""
    settings: Sequence[tuple[int, int, float, Claim | None]] = (
        (8, 100, 0.0, None), (64, 100, 0.0, None), (64, 1, 0.0, None),
        (8, 100, 0.05, Claim(low=1.1)), (64, 100, 0.05, Claim(low=1.1)),
    )  # fmt: skip
    return [
        Row(
            f"wait for all / for one: N {members}, {inner} steps, {straggle:.0%} are 5 times slower",
            [barrier(members, inner, straggle, seed, given.barriers) for seed in range(given.seeds)],
            "1: nobody waits",
            claim,
        )
        for members, inner, straggle, claim in settings
    ]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, default=3, help="repeats of every measurement")
    flags.add_argument("--rounds", type=int, default=150, help="of gossip, in each simulation of replicas")
    flags.add_argument("--trials", type=int, default=2000, help="trees drawn for each mean")
    flags.add_argument("--barriers", type=int, default=500, help="rounds of waiting")
    given = flags.parse_args()
    torch.set_num_threads(1)
    found = latencies(given)
    rows = [*stability_rows(given), *variance_rows(given), *latency_rows(given, found), *barrier_rows(given)]
    if given.save:
        write(IMAGES / f"{NAME}.svg", latency_figure(found))
    notes = [
        f"stability: {MEMBERS} replicas in pairs, {WIDTH} numbers each, no training; bound: equation (3)",
        "variance: 16 replicas, 10 SGD steps a round on ½x² with unit noise; alpha 0.5, beta = gamma = 0.7;",
        f"  rates {RATES[0]:g} … {RATES[-1]:g}, small against 1 / curvature / steps (beyond, the slope falls below 2)",
    ]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
