"""How far replicas lie apart at each learning rate: the small byte model of ``exchange_quality``, NoLoCo, AdamW.

arXiv 2506.10911 proves for SGD on a quadratic that the variance between replicas goes with the square of the learning
rate, so their spread with the rate itself (``exchange_law`` measures that). Here a language model learns with AdamW at
a constant rate after the warm-up. The spread is taken just after a round, as the mean over the rounds of the last
quarter of the run.

The claim: the slope of the logarithm of the spread over that of the learning rate is 0.6 to 1.1.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, product, repeat
from statistics import fmean

from benchmarks.common import Claim, Row, conclude, start
from benchmarks.exchange_quality import NOLOCO, flags_of, recipe
from benchmarks.ladder import engine_for
from planaria.config.schema import OptimConfig
from planaria.data.shards import prepare

NAME = "exchange_spread"
CLAIM = Claim(0.6, 1.1)


def train(given: argparse.Namespace, rate: float, seed: int) -> tuple[float, float]:
    """The spread between replicas, and the validation loss in nats, mean over replicas."""
    engine = engine_for(recipe(given, NOLOCO, seed, OptimConfig(lr=rate, warmup=20)))
    assert engine.replicas is not None
    spreads = []
    while engine.step < given.steps:
        engine.train_step()
        if engine.step % given.every == 0 and 4 * engine.step > 3 * given.steps:
            spreads.append(engine.replicas.spread())
    return fmean(spreads), engine.evaluate()


def measure(given: argparse.Namespace) -> dict[float, list[tuple[float, float]]]:
    """Learning rate → what each seed found."""
    found: dict[float, list[tuple[float, float]]] = {rate: [] for rate in given.rates}
    jobs = list(product(given.rates, given.seeds))
    with ProcessPoolExecutor(given.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = pool.map(train, repeat(given), [rate for rate, _ in jobs], [seed for _, seed in jobs])
        for (rate, seed), one in zip(jobs, outcomes, strict=True):
            found[rate].append(one)
            print(f"seed {seed}, learning rate {rate:g}: spread {one[0]:.3e}, loss {one[1]:.4f}", flush=True)
    return found


def slope(rates: list[float], spreads: list[float]) -> float:
    """Of the straight line through the logarithms that has the least squared error."""
    from numpy import log, polyfit

    return float(polyfit(log(rates), log(spreads), 1)[0])


def rows_of(found: dict[float, list[tuple[float, float]]]) -> list[Row]:
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


def main() -> int:
    flags = flags_of(NAME, __doc__)
    flags.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3], help="learning rates")
    given = flags.parse_args()
    config = recipe(given, NOLOCO, 0, OptimConfig())
    prepare(config.data, config.model.vocab, print)
    return conclude(NAME, given, rows_of(measure(given)), ["spread: RMS over replicas and weights, after a round"])


if __name__ == "__main__":
    start(main)
