"""What do weights that share numbers cost and save? Models of one shape, and of one stored size, on Python's sources.

One process trains all arms on the same samples: the dense model of the shape; the same with an eighth of its layers'
numbers, an array for each layer or one for all; and a dense model that stores as many numbers. The claim: with an array
for each layer the last validation loss is at least 0.03 nats below that of the dense model of as many numbers, with
every seed.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start

NAME = "sharing"
SHAPE = {"vocab": 260, "dim": 64, "layers": 4, "heads": 4, "hidden": 176, "context": 128}
SMALL = {**SHAPE, "dim": 28, "hidden": 66, "heads": 2}
"""dense, and of as many numbers as the models of an eighth, tables included"""
ARMS: dict[str, dict[str, Any]] = {
    "dense": SHAPE,
    "an eighth, by layer": {**SHAPE, "share": 8},
    "an eighth, one array": {**SHAPE, "share": 8, "share_over": "model"},
    "dense, as many numbers": SMALL,
}


def sources(megabytes: float = 4.0) -> Path:
    """Python's library, one file after the other."""
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / "python.txt"
    if not path.exists():
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "\n".join(file.read_text(errors="ignore") for file in files)[: int(megabytes * 1e6)]
        path.write_text(text)
    return path


def train(arm: str, seed: int, given: argparse.Namespace) -> tuple[float, float]:
    """The last validation loss, in nats a byte; seconds of processor time."""
    import planaria
    from planaria.config.schema import RunConfig

    config = RunConfig.model_validate(
        {
            "name": f"{NAME}-{arm.replace(' ', '-').replace(',', '')}-{seed}",
            "out": str(RUNS),
            "engine": "inline",
            "seed": seed,
            "model": ARMS[arm],
            "pipeline": {"stages": 4, "microbatches": 2, "microbatch_size": 4},
            "data": {"source": str(sources()), "tokenizer": "bytes", "cache": str(RUNS / "cache"), "validation": 0.05},
            "optim": {"lr": 2e-3, "warmup": 50},
            "train": {"steps": given.steps, "eval_every": given.steps, "eval_microbatches": 32},
            "recovery": {"strategy": "checkpoint"},
            "checkpoint": {"every": 0},
        }
    )
    began = time.process_time()
    shutil.rmtree(RUNS / config.name, ignore_errors=True)
    run = planaria.train(config, progress=False)
    return list(run.validations.values())[-1], time.process_time() - began


def main() -> int:
    from planaria.config.schema import ModelConfig
    from planaria.models.stages import parameter_count

    flags = parser(NAME, __doc__)
    flags.add_argument("--steps", type=int, default=600)
    flags.add_argument("--seeds", type=int, default=3)
    given = flags.parse_args()
    train("dense", 0, argparse.Namespace(steps=2))  # what is loaded for the first run is no arm's
    found = {arm: [train(arm, seed, given) for seed in range(1, given.seeds + 1)] for arm in ARMS}
    loss = {arm: [one for one, _ in values] for arm, values in found.items()}

    def less(arm: str) -> list[float]:
        return [small - own for small, own in zip(loss["dense, as many numbers"], loss[arm], strict=True)]

    rows = [
        Row("nats below a dense model of as many numbers: by layer", less("an eighth, by layer"), "", Claim(low=0.03),
            judged="least"),
        Row("the same, one array for all stages", less("an eighth, one array"), ""),
        Row("the same, dense model of the shape", less("dense"), "the most there is to gain"),
    ]  # fmt: skip
    for arm in ARMS:
        stored = {"stored": parameter_count(ModelConfig.model_validate(ARMS[arm]))}
        rows.append(Row(f"validation loss, {arm}", loss[arm], "", beside=stored))
    for arm in ("an eighth, by layer", "an eighth, one array"):
        ratio = [own / dense for (_, own), (_, dense) in zip(found[arm], found["dense"], strict=True)]
        rows.append(Row(f"processor time over dense: {arm}", ratio, "1"))
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
