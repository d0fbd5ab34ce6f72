"""What each way of agreeing does to the model: eight replicas of a small byte model learn Python, three seeds an arm.

All arms start alike, see the same samples and take as many steps; the learning rate falls to a tenth by a cosine. The
validation perplexity is the mean over replicas, and that of the mean of their weights: the one model. Rounds come every
15 steps, for DiLoCo also every 30, as its paper's rivals compare it.

The claims, as ratios of mean perplexities: NoLoCo over DiLoCo with as many rounds at most 1.03, with half as many at
most 1.01; NoLoCo over no exchange at most 0.97; without the pull to the group's mean (γ near 0) at least 1.03 of
NoLoCo. Of the spread between replicas: NoLoCo's at most 0.15 of that without the pull, and 0.10 of that without
exchange. The one model is no worse than the mean replica.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat
from statistics import fmean
from typing import Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.ladder import engine_for
from planaria.config.options import Options
from planaria.config.schema import (
    DataConfig,
    ExchangeConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from planaria.data.shards import prepare

NAME = "exchange_quality"
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


def recipe(given: argparse.Namespace, arm: str, seed: int, optim: OptimConfig) -> RunConfig:
    kind, options = arms(given.every)[arm]
    return RunConfig(
        name=NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=260, dim=given.dim, layers=2, heads=4, hidden=given.dim * 11 // 4, context=64),
        pipeline=PipelineConfig(stages=2, microbatches=1, microbatch_size=given.samples),
        routing=RoutingConfig(mixed=arm == MIXED),
        data=DataConfig(tokenizer="bytes"),
        optim=optim,
        train=TrainConfig(steps=given.steps, eval_microbatches=16),
        exchange=ExchangeConfig(replicas=given.replicas, kind=kind, options=Options(options)),
    )


def train(given: argparse.Namespace, arm: str, seed: int) -> Outcome:
    engine = engine_for(recipe(given, arm, seed, OptimConfig(lr=given.lr, warmup=20, schedule="cosine")))
    while engine.step < given.steps:
        engine.train_step()
    assert engine.replicas is not None
    return Outcome(engine.evaluate(), engine.evaluate_consensus(), engine.replicas.spread())


def measure(given: argparse.Namespace) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {arm: [] for arm in arms(given.every)}
    jobs = list(product(found, given.seeds))
    with ProcessPoolExecutor(given.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = pool.map(train, repeat(given), [arm for arm, _ in jobs], [seed for _, seed in jobs])
        for (arm, seed), one in zip(jobs, outcomes, strict=True):
            found[arm].append(one)
            print(f"seed {seed}, {arm}: {one.mean:.4f}, the one model {one.consensus:.4f}", flush=True)
    return found


def rows_of(found: dict[str, list[Outcome]]) -> list[Row]:
    noloco = found[NOLOCO]
    claims = {
        SAME: Claim(high=1.03),
        HALF: Claim(high=1.01),
        LOCAL: Claim(high=0.97),
        NO_PULL: Claim(high=1 / 1.03),
    }
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


def flags_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The sizes of the run, but for its learning rate."""
    flags = parser(name, doc)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--replicas", type=int, default=8)
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--every", type=int, default=15, help="inner steps between rounds")
    flags.add_argument("--dim", type=int, default=64)
    flags.add_argument("--samples", type=int, default=8, help="of each replica in a step, of 64 bytes each")
    flags.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    return flags


def main() -> int:
    flags = flags_of(NAME, __doc__)
    flags.add_argument("--lr", type=float, default=2e-3)
    given = flags.parse_args()
    config = recipe(given, LOCAL, 0, OptimConfig())
    prepare(config.data, config.model.vocab, print)
    return conclude(NAME, given, rows_of(measure(given)), ["measured: ratios of validation perplexities; medians"])


if __name__ == "__main__":
    start(main)
