"""What a comparison would take on this machine, from a few steps of each arm: an estimate, before anything is raced."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from planaria.common.documents import Record
from planaria.config.schema import RunConfig
from planaria.data.shards import Data
from planaria.data.stream import Stream
from planaria.lab.compare.race_job import Race
from planaria.runtime.engine.inline import InlineEngine

WARM, TIMED = 1, 3
"""steps before and while the clock runs: the first one makes an optimizer's state"""
BEGINS_S = 4.0
"""seconds that a race's process takes to import and open everything, about what one core does"""


class Pace(Record):
    """Seconds of one arm on one core."""

    step_s: float
    validation_s: float

    def of(self, config: RunConfig) -> float:
        """Of a whole race; rollbacks take none back, as a race is over after so many steps carried out."""
        every = config.train.eval_every
        validations = config.train.steps // every if every else 0
        return BEGINS_S + config.train.steps * self.step_s + validations * self.validation_s


def pace(config: RunConfig, dataset: Data) -> Pace:
    """How fast an arm trains and validates here, by its first steps. Its copies are sent too; nothing is lost.

    Counted in processor time, which other processes do not lengthen much: a core of its own would take as long.
    """
    torch.set_num_threads(1)
    streams = (Stream(dataset, split, config.model.context, config.seed) for split in ("train", "validation"))
    engine = InlineEngine(config, *streams)
    for _ in range(WARM):
        engine.train_step()
    began = time.process_time()
    for _ in range(TIMED):
        engine.train_step()
    trained = time.process_time()
    engine.evaluate()
    return Pace(step_s=(trained - began) / TIMED, validation_s=time.process_time() - trained)


def remaining_s(races: Sequence[Race], kept: Sequence[bool], paces: Mapping[str, Pace], workers: int) -> float:
    """Seconds until all ``races`` are over that are not ``kept``, by each arm's pace, with so many processes at once:
    no less than an even share of the work, and than the longest race. Such an order of jobs takes at most the sum of
    both (Graham 1966, doi 10.1002/j.1538-7305.1966.tb01709.x)."""
    left = [paces[race.arm].of(race.config) for race, done in zip(races, kept, strict=True) if not done]
    return max(sum(left) / workers, max(left)) if left else 0.0
