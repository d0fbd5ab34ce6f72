"""What losing a middle stage does to the loss: CheckFree's rebuilt stage beside a run that lost nothing.

A small model learns Python from Python's own standard library. From the same trained state, with the same data to come,
each middle stage in turn is lost, rebuilt from its neighbours and trained on. The claim: 50 steps later the validation
loss is within 0.05 nats of the fault-free one, as the mean over the middle stages, for every seed.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from planaria.config import ModelConfig, OptimConfig, PipelineConfig, RunConfig, TrainConfig
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.engine.inline import InlineEngine
from planaria.errors import RunStopped
from planaria.model.state import StageState

NAME = "middle_stage"
CLAIM = Claim(high=0.05)


def recipe(given: argparse.Namespace, seed: int) -> RunConfig:
    """One layer a stage; the vocabulary is the demo's, so that its tokenizer and corpus are found in the cache."""
    return RunConfig(
        name=NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(dim=given.dim, layers=given.stages, hidden=given.dim * 11 // 4),
        pipeline=PipelineConfig(stages=given.stages, microbatches=4, microbatch_size=4),
        optim=OptimConfig(lr=2e-3, warmup=20),
        train=TrainConfig(steps=given.steps + given.after),
    )


def engine_for(config: RunConfig) -> InlineEngine:
    torch.set_num_threads(1)
    dataset = prepare(config.data, config.model.vocab, print)
    context = config.model.context
    return InlineEngine(
        config, Stream(dataset, "train", context, config.seed), Stream(dataset, "validation", context, config.seed)
    )


def remember(engine: InlineEngine) -> dict[int, StageState]:
    """A copy of everything that is trained."""
    return {stage: copy.deepcopy(runner.state()) for stage, runner in engine.runners.items()}


def after(engine: InlineEngine, step: int, state: dict[int, StageState], steps: int, lost: int | None) -> list[float]:
    """Validation losses in ``state``, one stage ``lost`` and rebuilt if given: at once, and ``steps`` steps later."""
    for stage, runner in engine.runners.items():
        runner.load(state[stage])
    engine.step = step
    if lost is not None and (reason := engine.lose([lost])):
        raise RunStopped(reason)
    losses = [engine.evaluate()]
    for _ in range(steps):
        engine.train_step()
    return [*losses, engine.evaluate()]


def seed_row(given: argparse.Namespace, seed: int) -> Row:
    """The verdict on one seed: per middle stage, how much worse than fault-free."""
    engine = engine_for(recipe(given, seed))
    for _ in range(given.steps):
        engine.train_step()
    step, state = engine.step, remember(engine)
    free = after(engine, step, state, given.after, lost=None)
    struck = {stage: after(engine, step, state, given.after, stage) for stage in range(2, given.stages)}
    later = [losses[1] - free[1] for losses in struck.values()]
    at_once = [losses[0] - free[0] for losses in struck.values()]
    print(f"seed {seed}: {', '.join(f'stage {s} {x:+.3f}' for s, x in zip(struck, later, strict=True))}", flush=True)
    return Row(
        what=f"seed {seed}: {len(struck)} middle stages, each lost at step {step}",
        values=[statistics.mean(later)],
        limit="fault-free: 0",
        claim=CLAIM,
        beside={
            "loss before": free[0],
            "fault-free later": free[1],
            "at once": statistics.mean(at_once),
            "later, by stage": f"{min(later):+.3f} … {max(later):+.3f}",
        },
    )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=300, help="before the loss")
    flags.add_argument("--after", type=int, default=50, help="steps after the loss")
    flags.add_argument("--stages", type=int, default=6, help="block stages of one layer each")
    flags.add_argument("--dim", type=int, default=96, help="width of the model; 96 is about a million parameters")
    given = flags.parse_args()
    rows = [seed_row(given, seed) for seed in given.seeds]
    means = [row.value for row in rows]
    mean = f"mean of {len(means)} seeds {statistics.mean(means):+.3f}; the worst"
    rows.append(Row(mean, means, "fault-free: 0", CLAIM, judged="worst"))
    return conclude(NAME, given, rows, ["validation loss minus the fault-free one's, nats per token"])


if __name__ == "__main__":
    start(main)
