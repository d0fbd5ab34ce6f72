"""Time spent on a run's checkpoints."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from planaria.control.facts.decisions import Save, Seal
from planaria.control.facts.events import CONTROLLER, SaveFailed, StageCopied, StageSaved
from planaria.control.log.run_record import RunRecord, cached


@dataclass(frozen=True)
class CheckpointTimes:
    """Checkpoints of a run. Seconds are those of the slowest worker per save, and 0 in older logs."""

    sealed: int = 0
    paused_s: float = 0.0
    """time that training paused"""
    background_s: float = 0.0
    """time that files were written during training"""
    unequal: int = 0
    """checkpoints whose replicas should be equal but differ"""


@cached
def saves(record: RunRecord) -> CheckpointTimes:
    """Return the checkpoints of a run."""
    sealed = 0
    unequal = 0
    in_background = dict[tuple[int, int], bool]()
    paused: dict[tuple[int, int], float] = defaultdict(float)
    written: dict[tuple[int, int], float] = defaultdict(float)
    for _, fact in record.history:
        if isinstance(fact, Save):
            in_background[fact.step, fact.generation] = fact.background
        elif isinstance(fact, StageCopied | StageSaved):
            key = fact.step, fact.generation
            pauses = isinstance(fact, StageCopied) or not in_background.get(key, False)
            times = paused if pauses else written
            times[key] = max(times[key], fact.seconds)
        elif isinstance(fact, Seal):
            sealed += 1
            unequal += bool(fact.unequal)
        elif isinstance(fact, SaveFailed) and fact.worker == CONTROLLER:  # sealing failed
            sealed -= 1
    return CheckpointTimes(sealed, sum(paused.values()), sum(written.values()), unequal)
