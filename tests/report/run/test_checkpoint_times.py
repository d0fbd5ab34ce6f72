"""What checkpoints took, read off a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.run_record import RunRecord
from planaria.report.run.checkpoint_times import CheckpointTimes, saves


def record(*facts: Any) -> RunRecord:
    return RunRecord(Path(), RunConfig(), [(float(n), fact) for n, fact in enumerate(facts)], [], [])


def copied(step: int, seconds: float, stage: int = 1) -> e.StageCopied:
    return e.StageCopied(worker=f"w{stage}", stage=stage, generation=2, step=step, seconds=seconds)


def written(step: int, seconds: float, stage: int = 1) -> e.StageSaved:
    return e.StageSaved(worker=f"w{stage}", stage=stage, generation=2, step=step, bytes=9, seconds=seconds)


def seal(step: int) -> d.Seal:
    return d.Seal(step=step, folder="", stages=[0, 1])


def test_the_slowest_worker_counts_and_what_is_written_beside_is_told_apart() -> None:
    beside = [
        d.Save(generation=2, step=4, background=True), copied(4, 0.25), copied(4, 0.5, 0), written(4, 3.0, 0),
        written(4, 2.0), seal(4),
    ]  # fmt: skip
    last = [d.Save(generation=2, step=8), written(8, 1.0), written(8, 2.0, 0), seal(8)]
    assert saves(record(*beside, *last)) == CheckpointTimes(sealed=2, stood_s=2.5, beside_s=3.0)


def test_what_could_not_be_sealed_is_none() -> None:
    failed = e.SaveFailed(worker=e.CONTROLLER, stage=-1, generation=-1, step=4, detail="full")
    assert saves(record(d.Save(generation=2, step=4), seal(4), failed)) == CheckpointTimes()
