"""What cutting a model into stages costs one process: the inline engine against a plain loop over one module.

Both train the same weights on the same microbatches with the same AdamW and clipping, on one thread, and take turns.
The claim: the engine's step takes at most 1.05 of the plain loop's time, and their losses are the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data
from benchmarks.plain import PlainLoop
from planaria.config import ModelConfig, PipelineConfig, RunConfig, TrainConfig
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.engine.inline import InlineEngine
from planaria.model.stages import flops_per_token, parameter_count

NAME = "inline"
CLAIM, SAME = Claim(high=1.05), Claim(high=0.0)


def timed(step: Callable[[], float], losses: list[float], steps: int) -> float:
    """Seconds of ``steps`` steps; their losses are added to ``losses``."""
    began = time.monotonic()
    losses += [step() for _ in range(steps)]
    return time.monotonic() - began


def compare(config: RunConfig, steps: int, repeats: int) -> list[Row]:
    """Time and loss of both, side by side."""
    torch.set_num_threads(1)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    engine, plain = InlineEngine(config, stream), PlainLoop(config, stream)
    staged_losses: list[float] = []
    plain_losses: list[float] = []
    sides = [
        lambda: timed(lambda: engine.train_step().loss, staged_losses, steps),
        lambda: timed(plain.train_step, plain_losses, steps),
    ]
    interleaved(sides, 1)
    staged, whole = interleaved(sides, repeats)
    flops = flops_per_token(config.model) * config.pipeline.samples * config.model.context * steps
    what = f"step of {config.pipeline.stages} stages × {config.pipeline.microbatches} microbatches"
    ratios = [a / b for a, b in zip(staged, whole, strict=True)]
    gaps = [abs(a - b) for a, b in zip(staged_losses, plain_losses, strict=True)]
    return [
        Row(
            what=f"{what}, {parameter_count(config.model) / 1e6:.2f} M parameters",
            values=ratios,
            limit=f"the plain loop: 1 ({flops / min(whole) / 1e9:.0f} GFLOP/s at best)",
            claim=CLAIM,
            beside={
                "engine": milliseconds([s / steps for s in staged]),
                "plain": milliseconds([s / steps for s in whole]),
            },
        ),
        Row(f"|loss - plain loss|, worst of {len(gaps)} steps, nats", gaps, "0: the same sums", SAME, judged="worst"),
    ]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--steps", type=int, default=2, help="in one repeat")
    flags.add_argument("--repeats", type=int, default=15, help="of each side")
    flags.add_argument("--dim", type=int, default=128, help="width of the model")
    flags.add_argument("--stages", type=int, default=4, help="block stages of one layer each")
    flags.add_argument("--microbatches", type=int, default=8)
    flags.add_argument("--microbatch-size", type=int, default=4)
    given = flags.parse_args()
    config = RunConfig(
        name=NAME,
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=given.dim, layers=given.stages, hidden=given.dim * 11 // 4),
        pipeline=PipelineConfig(
            stages=given.stages, microbatches=given.microbatches, microbatch_size=given.microbatch_size
        ),
        data=bytes_data(),
        train=TrainConfig(steps=given.steps * (given.repeats + 1), eval_every=0),
    )
    return conclude(NAME, given, compare(config, given.steps, given.repeats), ["measured: engine / plain loop"])


if __name__ == "__main__":
    start(main)
