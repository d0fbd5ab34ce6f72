"""What each rule makes of a lost middle stage: how much worse the model is at once, and 50 steps later.

A small model learns Python from Python's own standard library, once for each seed. From the same trained state, with
the same data to come, each middle stage in turn is lost and brought back by each rule: CheckFree's average, the same as
its published code weighs it, the plain average, a neighbour's copy, new random weights, nothing at all (identity), and
the strategies that keep copies. These train the last few steps before the loss themselves, so that their copies are
whole; so does the run that loses nothing, which all are held against.

The claims, as means over the middle stages and in every seed: the plain average does at most 0.95 of the harm at once
that a neighbour's copy does, and 50 steps after the loss averages leave at most 0.05 nats. There is none on random
weights: at a million parameters a fresh residual stage is nearly the identity, in large models it is said to be far
worse than anything here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat
from pathlib import Path

import torch

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from planaria.common.errors import RunStopped, UserError
from planaria.config.options import Options
from planaria.config.schema import (
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.recovery.echo import Echo
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage
from planaria.runtime.engine.inline import InlineEngine

NAME = "ladder"
ORDER, LATER = Claim(high=0.95), Claim(high=0.05)
AVERAGES = ("checkfree", "checkfree as in its code", "uniform")
# Twins are as exact without their forward passes, and half as slow.
RULES = {
    "checkfree": RecoveryConfig(),
    "checkfree as in its code": RecoveryConfig(options=Options({"omega": "l2", "measured": "postclip"})),
    "uniform": RecoveryConfig(strategy="uniform"),
    "copy": RecoveryConfig(strategy="copy"),
    "random": RecoveryConfig(strategy="random"),
    "identity": RecoveryConfig(strategy="identity"),
    "echo, 8 bits": RecoveryConfig(strategy="echo", options=Options({"bits": 8})),
    "echo, 4 bits": RecoveryConfig(strategy="echo", options=Options({"bits": 4})),
    "echo, 2 bits": RecoveryConfig(strategy="echo", options=Options({"bits": 2})),
    "redundant": RecoveryConfig(strategy="redundant", options=Options({"forward": False})),
}
WARM = Echo().every
"""steps after which every copy is whole"""


@dataclass(frozen=True)
class Harm:
    """Validation losses above the run's that lost nothing, in nats, for each middle stage."""

    at_once: list[float]
    later: list[float]


def recipe(given: argparse.Namespace, seed: int, recovery: RecoveryConfig) -> RunConfig:
    """One layer a stage; the corpus and its tokenizer come from the user's cache if they are there."""
    return RunConfig(
        name=NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(
            vocab=given.vocab, dim=given.dim, layers=given.stages, hidden=given.dim * 11 // 4, context=64
        ),
        pipeline=PipelineConfig(stages=given.stages, microbatches=2, microbatch_size=given.samples // 2),
        optim=OptimConfig(lr=2e-3, warmup=20),
        train=TrainConfig(eval_microbatches=16),
        recovery=recovery,
    )


def engine_for(config: RunConfig) -> InlineEngine:
    """An engine on one thread, with the corpus' two streams."""
    torch.set_num_threads(1)
    dataset = prepare(config.data, config.model.vocab)
    context = config.model.context
    return InlineEngine(
        config, Stream(dataset, "train", context, config.seed), Stream(dataset, "validation", context, config.seed)
    )


def trained(seed: int) -> Path:
    """Where the state lies that all rules start from."""
    return RUNS / NAME / f"seed-{seed}"


def train(given: argparse.Namespace, seed: int) -> None:
    """Train up to the steps that strategies with copies take themselves."""
    engine = engine_for(recipe(given, seed, RecoveryConfig()))
    for _ in range(given.steps - WARM):
        engine.train_step()
    for stage, runner in engine.runners.items():
        write_stage(trained(seed), stage, engine.step, runner.state())


def losses_of(given: argparse.Namespace, seed: int, rule: str | None) -> list[tuple[float, float]]:
    """Validation losses (at once, later) for each middle stage that is lost; with no rule, once, losing nothing."""
    engine = engine_for(recipe(given, seed, RULES[rule] if rule else RecoveryConfig()))
    state = {stage: read_stage(trained(seed), stage, given.steps - WARM) for stage in engine.runners}
    found = []
    for stage in range(2, given.stages) if rule else [None]:
        engine.step = given.steps - WARM
        engine.become(state)
        for _ in range(WARM):
            engine.train_step()
        if stage is not None and (plan := engine.lose([stage])).reason:
            raise RunStopped(f"{rule}: {plan.reason}")
        at_once = engine.evaluate()
        for _ in range(given.after):
            engine.train_step()
        found.append((at_once, engine.evaluate()))
    return found


def measure(given: argparse.Namespace) -> tuple[dict[int, tuple[float, float]], dict[str, dict[int, Harm]]]:
    """The losses of the run that lost nothing, by seed, and each rule's harm, by seed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        list(pool.map(train, repeat(given), given.seeds))
        print(f"trained {len(given.seeds)} seeds for {given.steps - WARM} steps", flush=True)
        arms = list(product([None, *RULES], given.seeds))
        rules, seeds = [rule for rule, _ in arms], [seed for _, seed in arms]
        losses: dict[tuple[str | None, int], list[tuple[float, float]]] = {}
        for (rule, seed), found in zip(arms, pool.map(losses_of, repeat(given), seeds, rules), strict=True):
            losses[rule, seed] = found
            print(f"seed {seed}, {rule or 'nothing lost'}: {shown(found)}", flush=True)
    free = {seed: losses[None, seed][0] for seed in given.seeds}
    harm = {
        rule: {
            seed: Harm(
                [now - free[seed][0] for now, _ in losses[rule, seed]],
                [later - free[seed][1] for _, later in losses[rule, seed]],
            )
            for seed in given.seeds
        }
        for rule in RULES
    }
    return free, harm


def shown(losses: list[tuple[float, float]]) -> str:
    return ", ".join(f"{now:.3f} → {later:.3f}" for now, later in losses)


def rows_of(harm: dict[str, dict[int, Harm]]) -> list[Row]:
    """A row for each rule, and the order of the two simplest."""
    rows = []
    for rule, by_seed in harm.items():
        at_once = [x for each in by_seed.values() for x in each.at_once]
        later = [x for each in by_seed.values() for x in each.later]
        rows.append(
            Row(
                what=rule,
                values=[statistics.mean(each.later) for each in by_seed.values()],
                limit="nothing lost: 0",
                claim=LATER if rule in AVERAGES else None,
                beside={
                    "at once": f"{statistics.mean(at_once):+.3f}",
                    "at once, each": f"{min(at_once):+.3f} … {max(at_once):+.3f}",
                    "later": f"{statistics.mean(later):+.3f}",
                    "later, each": f"{min(later):+.3f} … {max(later):+.3f}",
                },
                judged="worst",
            )
        )
    means = {rule: [statistics.mean(each.at_once) for each in harm[rule].values()] for rule in ("uniform", "copy")}
    ratios = [uniform / copy for uniform, copy in zip(means["uniform"], means["copy"], strict=True)]
    return [*rows, Row("at once: uniform / copy", ratios, "none known", ORDER, judged="worst")]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=300, help="before the loss")
    flags.add_argument("--after", type=int, default=50, help="steps after the loss")
    flags.add_argument("--stages", type=int, default=6, help="block stages of one layer each")
    flags.add_argument("--dim", type=int, default=96, help="width of the model; 96 is 0.8 million parameters")
    flags.add_argument(
        "--vocab", type=int, default=1024, help="that of the recipe recovery, whose tokenizer may be in the cache"
    )
    flags.add_argument("--samples", type=int, default=10, help="in one step, of 64 tokens each")
    flags.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    given = flags.parse_args()
    if given.steps < WARM:
        raise UserError(f"--steps {given.steps}: copies are whole after {WARM} steps; give {WARM} or more")
    prepare(recipe(given, 0, RecoveryConfig()).data, given.vocab, print)
    free, harm = measure(given)
    notes = [
        f"measured: validation loss {given.after} steps after the loss of a stage, minus that of the run that lost "
        "nothing; nats per token, mean over the middle stages, worst seed",
        "the run that lost nothing: "
        + ", ".join(f"seed {seed} {now:.3f}, then {later:.3f}" for seed, (now, later) in free.items()),
    ]
    return conclude(NAME, given, rows_of(harm), notes)


if __name__ == "__main__":
    start(main)
