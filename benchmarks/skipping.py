"""What skipping does to the model: trained full, with a quarter or a third of its stages skipped, or made shallower.

A small model learns Python from Python's own standard library, three seeds an arm, all on the same samples. The first
of its layers stays with the ends, the others are stages of one layer each; a quarter and a third are shares of all of
them, as SkipPipe counts. The shallow arm simply has a third fewer layers. All arms are validated whole, in natural
order, after as many steps as the full arm (equal steps) and after as much computing, counted in floating-point
operations of layers and head (equal compute). Then stages are left out of the trained models: a quarter and a half of
them, over subsets drawn alike for all arms.

The claims, as ratios of perplexities: a third skipped over full at most 1.12 at equal steps and 1.00 at equal compute;
with half of the stages left out, at most 1.10 of the whole model's for the arm that skipped a third, and at least 1.40
for the full one; with a quarter left out, at most 1.03 for the arm that skipped.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat

import torch

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.ladder import engine_for
from planaria.config.schema import ModelConfig, OptimConfig, PipelineConfig, RoutingConfig, RunConfig, TrainConfig
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.models.stages import Llama, global_name, parameter_count
from planaria.pipeline.routing.skipping import visits
from planaria.runtime.engine.inline import InlineEngine
from planaria.runtime.engine.omission import omissions
from planaria.runtime.engine.samples import batches

NAME = "skipping"
FULL, QUARTER, THIRD, SHALLOW = "full", "a quarter skipped", "a third skipped", "a third shallower"
SKIP = {FULL: 0.0, QUARTER: 0.25, THIRD: 0.33, SHALLOW: 0.0}
OMITTED = (0.25, 0.5)
SUBSETS = 24


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed."""

    at_steps: float
    """validation loss in nats after as many steps as the full arm took"""
    at_compute: float
    """validation loss in nats after as much computing"""
    omitted: dict[float, float]
    """share of the stages left out → perplexity over that of the whole model, at equal steps"""


def recipe(given: argparse.Namespace, arm: str, seed: int) -> RunConfig:
    layers = given.layers - round(given.layers / 3) if arm == SHALLOW else given.layers
    return RunConfig(
        name=NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(
            vocab=given.vocab, dim=given.dim, layers=layers, ends_layers=1, hidden=given.dim * 11 // 4, context=64
        ),
        pipeline=PipelineConfig(stages=layers - 1, microbatches=6, microbatch_size=given.samples // 6),
        routing=RoutingConfig(kind="skipping", skip=SKIP[arm]) if SKIP[arm] else RoutingConfig(),
        optim=OptimConfig(lr=given.lr, warmup=20),
        train=TrainConfig(eval_microbatches=24),
    )


def compute(config: RunConfig) -> float:
    """Parameters that one token meets in a step of training: its layers and the head."""
    model, stages = config.model, config.pipeline.stages
    layer = parameter_count(model.model_copy(update={"layers": 2})) - parameter_count(
        model.model_copy(update={"layers": 1})
    )
    return model.vocab * model.dim + layer * (1 + visits(stages, config.routing.skip))


def train(given: argparse.Namespace, arm: str, seed: int) -> Outcome:
    config = recipe(given, arm, seed)
    engine = engine_for(config)
    budget = round(given.steps * compute(recipe(given, FULL, seed)) / compute(config))
    while engine.step < given.steps:
        engine.train_step()
    at_steps = engine.evaluate()
    omitted = left_out(engine)
    while engine.step < budget:
        engine.train_step()
    return Outcome(at_steps, engine.evaluate(), omitted)


def left_out(engine: InlineEngine) -> dict[float, float]:
    config = engine.config
    stages = config.pipeline.stages
    weights = {
        global_name(config.model, stages, stage, name): tensor.clone()
        for stage, runner in engine.runners.items()
        for name, tensor in runner.state().weights.items()
    }
    model = Llama(config.model, stages, initialise=False)
    model.load_global_state(weights)
    stream = Stream(prepare(config.data, config.model.vocab), "validation", config.model.context, config.seed)
    size = config.pipeline.microbatch_size
    with torch.inference_mode():
        found = omissions(model, batches(stream, 0, size), 24, OMITTED, SUBSETS, config.seed)
    return {one.share: one.over_full for one in found if one.stages}


def measure(given: argparse.Namespace) -> dict[str, list[Outcome]]:
    spawn = multiprocessing.get_context("spawn")
    arms = list(product(given.arms, given.seeds))
    found: dict[str, list[Outcome]] = {arm: [] for arm in given.arms}
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        outcomes = pool.map(train, repeat(given), [arm for arm, _ in arms], [seed for _, seed in arms])
        for (arm, seed), one in zip(arms, outcomes, strict=True):
            found[arm].append(one)
            print(
                f"seed {seed}, {arm}: {one.at_steps:.3f} at equal steps, {one.at_compute:.3f} at equal compute",
                flush=True,
            )
    return found


def rows_of(given: argparse.Namespace, found: dict[str, list[Outcome]]) -> list[Row]:
    rows = []
    claims = {THIRD: (Claim(high=1.12), Claim(high=1.0))}
    for arm, outcomes in found.items():
        config = recipe(given, arm, 0)
        beside: dict[str, float | int | str] = {
            "steps": f"{given.steps}, {round(given.steps * compute(recipe(given, FULL, 0)) / compute(config))}",
            "perplexity": _perplexities([o.at_steps for o in outcomes], [o.at_compute for o in outcomes]),
        }
        steps = [math.exp(o.at_steps - f.at_steps) for o, f in zip(outcomes, found[FULL], strict=True)]
        cost = [math.exp(o.at_compute - f.at_steps) for o, f in zip(outcomes, found[FULL], strict=True)]
        at_steps, at_compute = claims.get(arm, (None, None))
        rows.append(Row(f"{arm} ÷ full, equal steps", steps, "1", at_steps, beside, "worst"))
        rows.append(Row(f"{arm} ÷ full, equal compute", cost, "1", at_compute, {}, "worst"))
    bears = {(THIRD, 0.5): Claim(high=1.1), (THIRD, 0.25): Claim(high=1.03), (FULL, 0.5): Claim(low=1.4)}
    for arm, share in product(found, OMITTED):
        ratios = [outcome.omitted[share] for outcome in found[arm]]
        rows.append(
            Row(f"{arm}: {share:.0%} of the stages left out", ratios, "1", bears.get((arm, share)), {}, "worst")
        )
    return rows


def _perplexities(*losses: list[float]) -> str:
    return ", ".join(f"{math.exp(statistics.mean(each)):.2f}" for each in losses)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--arms", nargs="+", default=list(SKIP), choices=list(SKIP), help="full must be among them")
    flags.add_argument("--steps", type=int, default=500, help="of the full arm")
    flags.add_argument("--layers", type=int, default=12, help="one of them at the ends")
    flags.add_argument("--dim", type=int, default=96, help="width; with 12 layers, 96 is 1.4 million parameters")
    flags.add_argument("--vocab", type=int, default=1024)
    flags.add_argument("--lr", type=float, default=1e-3, help="of all arms: full's best of 5e-4, 1e-3, 2e-3, 4e-3")
    flags.add_argument("--samples", type=int, default=18, help="in one step, of 64 tokens each")
    flags.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    given = flags.parse_args()
    prepare(recipe(given, FULL, 0).data, given.vocab, print)
    notes = ["measured: perplexity over the full arm's after its steps, or over the whole model's; the worst seed"]
    return conclude(NAME, given, rows_of(given, measure(given)), notes)


if __name__ == "__main__":
    start(main)
