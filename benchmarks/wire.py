"""What does rounding to bf16 on the wire do to training? A small byte model on real text, with and without.

Both arms of a seed start alike and see the same samples; the fleet's workers round in the same places, so one process
is enough. The claim: with bf16 activations and gradients on the wire, the median over seeds of the validation loss at
the end is at most 0.01 nats above that of fp32. Beside it a control: fp32 again, with the learning rate a millionth
higher. So far apart come two runs between which no rounding matters.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.ladder import engine_for
from planaria.config.schema import DataConfig, ModelConfig, OptimConfig, PipelineConfig, RunConfig, TrainConfig

NAME = "wire"
CLAIM = Claim(high=0.01)


def recipe(given: argparse.Namespace, wire: str, seed: int, rate: float = 2e-3) -> RunConfig:
    return RunConfig(
        name=NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(
            vocab=257, dim=given.dim, layers=given.stages, heads=4, hidden=given.dim * 11 // 4, context=64
        ),
        pipeline=PipelineConfig.model_validate(
            {"stages": given.stages, "microbatches": 4, "microbatch_size": 8, "wire": wire}
        ),
        data=DataConfig(source=str(given.text), tokenizer="bytes", cache=str(RUNS / "cache")),
        optim=OptimConfig(lr=rate, warmup=20, schedule="cosine"),
        train=TrainConfig(steps=given.steps, eval_every=0, eval_microbatches=32),
    )


def validated(config: RunConfig) -> float:
    """The validation loss at the end of training, in nats."""
    engine = engine_for(config)
    for _ in range(config.train.steps):
        engine.train_step()
    return engine.evaluate()


def rows_of(given: argparse.Namespace) -> list[Row]:
    whole = [validated(recipe(given, "fp32", seed)) for seed in given.seeds]
    limit = f"0; fp32 by seed: {', '.join(f'{loss:.4f}' for loss in whole)}"

    def gaps(*arm: Any) -> list[float]:
        others = [validated(recipe(given, arm[0], seed, *arm[1:])) for seed in given.seeds]
        return [other - loss for other, loss in zip(others, whole, strict=True)]

    return [
        Row("validation loss, bf16 - fp32, nats", gaps("bf16"), limit, CLAIM),
        Row("control: fp32 at another rate - fp32", gaps("fp32", 2e-3 * (1 + 1e-6)), limit),
    ]


def main() -> int:
    flags = parser(NAME, __doc__)
    text = Path(os.environ.get("PLANARIA_DATA", "data")) / "tinyshakespeare.txt"
    flags.add_argument("--text", type=Path, default=text)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--steps", type=int, default=400)
    flags.add_argument("--dim", type=int, default=64, help="width of the model")
    flags.add_argument("--stages", type=int, default=4, help="block stages of one layer each")
    return conclude(NAME, given := flags.parse_args(), rows_of(given))


if __name__ == "__main__":
    start(main)
