"""Races of seconds, as jobs."""

from __future__ import annotations

from pathlib import Path

from planaria.config.schema import RunConfig
from planaria.data.shards import Dataset
from planaria.faults.trace import Fault, Trace
from planaria.lab.compare.race_job import Race

STEPS = 6


def config(folder: Path) -> RunConfig:
    tables = {
        "seed": 0, "model": {"vocab": 257, "dim": 16, "layers": 2, "heads": 2, "context": 16, "hidden": 16},
        "pipeline": {"stages": 2, "microbatches": 1, "microbatch_size": 2},
        "train": {"steps": STEPS, "eval_every": 2, "eval_microbatches": 1}, "checkpoint": {"every": 0},
        "recovery": {"strategy": "redundant"},
        "data": {"source": str(folder / "text.txt"), "tokenizer": "bytes", "cache": str(folder / "cache")},
    }  # fmt: skip
    return RunConfig.model_validate(tables)


def one(folder: Path, dataset: Dataset, arm: str = "echo", **changes: object) -> Race:
    trace = Trace(faults=(Fault(step=3, stage=1),))
    own = config(folder).model_copy(update=changes)
    return Race(arm=arm, config=own, dataset=str(dataset.folder), trace=trace, faults=arm != "free")
