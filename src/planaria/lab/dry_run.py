"""``planaria compare --dry-run``: the arms, seeds and steps of a comparison, and an estimate of its duration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from planaria.common.documents import Record
from planaria.config import recipe
from planaria.config.registry import blaming
from planaria.config.schema import RunConfig
from planaria.data.shards import Data
from planaria.data.stream import Stream
from planaria.lab.compare.race_job import Race, cached_races
from planaria.lab.compare.race_spec import TUNED, Arm
from planaria.lab.compare.run_comparison import ComparisonRequest, PreparedComparison, prepare_races
from planaria.lab.reference.engine import InlineEngine
from planaria.lab.trials.spread import seeds_shown
from planaria.report.phrases import counted
from planaria.report.tables import Table, show
from planaria.runtime.custom_classes import custom_classes


def dry_run(requested: ComparisonRequest, notify: Callable[[str], None] | None) -> None:
    """Print what ``planaria compare`` would do; time a few steps of each arm, and write only the data cache.

    :raises UserError: for everything that a run would reject.
    """
    prepared = prepare_races(requested, notify)
    cached = cached_races(prepared.races, prepared.folder, custom_classes)
    paces = {}
    for arm in prepared.arms:
        with blaming(partial(custom_classes, arm.config)):
            paces[arm.name] = measure_speed(arm.config, prepared.dataset)
    workers = prepared.comparison.workers or len(os.sched_getaffinity(0))
    base = prepared.arms[0].config
    seeds = seeds_shown(prepared.comparison.seeds)
    done = {arm.name: 0 for arm in prepared.arms}
    for race, over in zip(prepared.races, cached, strict=True):
        done[race.arm] += over
    title = f"{base.name}: {counted(len(prepared.arms), 'arm')}, {seeds}, {counted(base.train.steps, 'step')} each"
    head = ["arm", "differs in", "failures", "kept", "ms a step", "minutes a race"]
    rows = [_row(arm, prepared, paces[arm.name], done[arm.name]) for arm in prepared.arms]
    console = show([Table(title, head, rows, numbers_from=2)])
    if any(arm.searched for arm in prepared.arms):
        console.print(f"search        the best point without failures becomes the arm {TUNED!r}", highlight=False)
    left = remaining_s(prepared.races, cached, paces, workers)
    console.print(f"races         {counted(len(cached), 'race')}, {sum(cached)} of them kept from before")
    console.print(
        f"takes         about {_duration(left)} with {counted(workers, 'process', 'processes')} at a time, if"
    )
    console.print("              nothing else uses the machine: by the processor time of a few steps of each arm")
    console.print(f"would be in   {prepared.folder}", highlight=False)


def _row(arm: Arm, prepared: PreparedComparison, paced: Pace, done: int) -> list[str]:
    base, own = recipe.flatten(prepared.arms[0].config), recipe.flatten(arm.config)
    differs = ", ".join(f"{k} = {v}" for k, v in own.items() if base.get(k) != v and k != "name") or "–"
    faults = [len(traces[0].faults) if arm.faults else 0 for traces in prepared.traces.values()]
    struck = f"{min(faults)} to {max(faults)}" if min(faults) < max(faults) else f"{faults[0]}"
    cells = [f"{done} of {len(faults)}", f"{1e3 * paced.step_s:.0f}", f"{paced.of(arm.config) / 60:.1f}"]
    return [arm.name, differs, struck, *cells]


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(minutes, 1)} min" if seconds else "no time"
    )


WARM, TIMED = 1, 3
"""steps before and during the timing; the first one allocates optimizer state"""
BEGINS_S = 4.0
"""seconds that a race's process takes to import and open everything, using about one core"""


class Pace(Record):
    """Seconds of one arm on one core."""

    step_s: float
    validation_s: float

    def of(self, config: RunConfig) -> float:
        """Return the seconds of a whole race, which ends after a number of executed steps, rollbacks or not."""
        every = config.train.eval_every
        validations = config.train.steps // every if every else 0
        return BEGINS_S + config.train.steps * self.step_s + validations * self.validation_s


def measure_speed(config: RunConfig, dataset: Data) -> Pace:
    """Measure how fast an arm trains and validates here, by its first steps without losses; copies are sent.

    Processor time approximates an idle machine, since other processes hardly affect it.
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
    """Estimate the seconds until all races not ``kept`` are done, with ``workers`` processes.

    The maximum of an even share of the work and the longest race; a schedule takes at most their sum (Graham 1966,
    doi 10.1002/j.1538-7305.1966.tb01709.x).
    """
    left = [paces[race.arm].of(race.config) for race, done in zip(races, kept, strict=True) if not done]
    return max(sum(left) / workers, max(left)) if left else 0.0
