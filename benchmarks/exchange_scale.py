"""Time to a target for 4 to 4,096 replicas: steps that each way of agreeing needs, times what a step takes there.

Steps are measured: replicas learn handwritten digits (benchmarks/scale_lab.py), with planaria's own exchanges; the
options of each method are searched for, by time to the target on a seed apart and with 64 replicas, for each place by
itself. The rarest rounds are every 20 steps, 50 of them in a run. What a step takes is simulated: log-normal steps,
links and latencies, a collective priced as what carries it (ring, tree, star, or pairs), and lateness that is handed on
from round to round. It is told in parts: computing, waiting for others, messages. Where the clock can be held against
real processes, it is: the rounds of ``stragglers`` are predicted from the same draws. Nothing is claimed of who wins;
claimed is that the clock predicts those rounds, and that a round in pairs does not grow with the number of replicas
while one of all does.

Needs the extra experts (scikit-learn's digits come with it).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from statistics import median

import numpy as np

from benchmarks.common import Claim, Row, conclude, parser, saved, start
from benchmarks.scale_lab import Method, Place, clock, losses, steps_to

NAME = "exchange_scale"
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
    from benchmarks.stragglers import recipe
    from planaria.exchange import exchange
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
