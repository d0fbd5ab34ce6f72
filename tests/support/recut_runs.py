"""Runs in one process that resume in another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import planaria
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from support.tiny_engine import Recipe

SMALL = {"layers": 12, "dim": 16, "hidden": 24, "context": 8}


def recipe(config: Recipe, folder: Path, stages: int = 4, steps: int = 20, **sections: Any) -> RunConfig:
    plain = {
        "pipeline": {"stages": stages, "microbatches": 2, "microbatch_size": 2},
        "optim": {"clip": 0.0},
        "train": {"steps": steps},
        "observe": {"trackers": ""},
    }
    made = config(**plain | sections | {"model": SMALL | sections.get("model", {})})
    return made.model_copy(update={"engine": "inline", "out": str(folder / "runs")})


def begin(given: RunConfig) -> Path:
    """Train; return the run's folder."""
    return planaria.train(given, progress=False).folder


def updated(folder: Path, **flags: object) -> list[str]:
    """Resume the run; return its messages."""
    output: list[str] = []
    changes = {name.replace("__", "."): value for name, value in flags.items()}
    planaria.train(folder, resume=True, settings=changes, progress=False, notify=output.append)
    return output


def losses(folder: Path) -> dict[int, float]:
    return {m.step: m.loss for m in read_run(folder).trained}
