"""What a run's checkpoints took: how long training stood still for them, and how long files were written meanwhile."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from planaria.control.decisions import Save, Seal
from planaria.control.events import CONTROLLER, SaveFailed, StageCopied, StageSaved
from planaria.control.run_record import RunRecord


@dataclass(frozen=True)
class Saves:
    """Of a whole run. Seconds are those of the slowest worker in each save, and 0 in logs of an older planaria."""

    sealed: int = 0
    stood_s: float = 0.0
    """that training stood still"""
    beside_s: float = 0.0
    """that files were written while it went on"""
    unequal: int = 0
    """checkpoints of replicas that were to be equal and were not"""


def saves(record: RunRecord) -> Saves:
    """Read off the run's log, once."""
    return record.once(_saves)


def _saves(record: RunRecord) -> Saves:
    sealed, unequal, beside = 0, 0, dict[tuple[int, int], bool]()
    stood: dict[tuple[int, int], float] = defaultdict(float)
    written: dict[tuple[int, int], float] = defaultdict(float)
    for _, fact in record.history:
        if isinstance(fact, Save):
            beside[fact.step, fact.generation] = fact.background
        elif isinstance(fact, StageCopied | StageSaved):
            key = fact.step, fact.generation
            whole = isinstance(fact, StageCopied) or not beside.get(key, False)
            into = stood if whole else written
            into[key] = max(into[key], fact.seconds)
        elif isinstance(fact, Seal):
            sealed += 1
            unequal += bool(fact.unequal)
        elif isinstance(fact, SaveFailed) and fact.worker == CONTROLLER:  # it was to be sealed, and could not be
            sealed -= 1
    return Saves(sealed, sum(stood.values()), sum(written.values()), unequal)
