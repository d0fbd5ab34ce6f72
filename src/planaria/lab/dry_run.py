"""``planaria compare --dry-run``: the arms, seeds and steps of a comparison, and an estimate of its duration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from planaria.common.documents import Record
from planaria.config import recipe
from planaria.config.registry import blame_custom_code
from planaria.config.schema import RunConfig
from planaria.data.shards import Data
from planaria.data.stream import Stream
from planaria.lab.compare.race_job import Race, cached_races
from planaria.lab.compare.race_spec import TUNED, Arm
from planaria.lab.compare.run_comparison import ComparisonRequest, PreparedComparison, prepare_races
from planaria.lab.reference.engine import ReferenceEngine
from planaria.report.observe.bars import CountProgress
from planaria.report.phrases import format_count, format_wall_time
from planaria.report.tables import Table, show
from planaria.runtime.custom_classes import custom_classes
from planaria.trials.spread import format_seeds


def dry_run(requested: ComparisonRequest, notify: Callable[[str], None] | None) -> None:
    """Print the plan of ``planaria compare``; time a few steps of the arms, and write only the data cache.

    :raises UserError: for every error that a run would report.
    """
    prepared = prepare_races(requested, notify)
    cached = cached_races(prepared.races, prepared.folder, custom_classes)
    paces = measure_arms(prepared.arms, prepared.dataset, quiet=notify is None)
    workers = prepared.comparison.workers or len(os.sched_getaffinity(0))
    base = prepared.arms[0].config
    seeds = format_seeds(prepared.comparison.seeds)
    done = {arm.name: 0 for arm in prepared.arms}
    for race, over in zip(prepared.races, cached, strict=True):
        done[race.arm] += over
    steps = format_count(base.train.steps, "step")
    title = f"{base.name}: {format_count(len(prepared.arms), 'arm')}, {seeds}, {steps} each"
    head = ["arm", "differs in", "failures", "kept", "ms a step", "minutes a race"]
    rows = [_row(arm, prepared, paces[arm.name], done[arm.name]) for arm in prepared.arms]
    console = show([Table(title, head, rows, numbers_from=2)])
    if any(arm.searched for arm in prepared.arms):
        console.print(f"search        the best point without failures becomes the arm {TUNED!r}", highlight=False)
    left = remaining_s(prepared.races, cached, paces, workers)
    console.print(f"races         {format_count(len(cached), 'race')}, {sum(cached)} of them kept from before")
    at_once = format_count(workers, "process", "processes")
    console.print(f"takes         about {format_wall_time(left)} with {at_once} at a time, if")
    console.print("              nothing else uses the machine: by the processor time of a few steps")
    console.print(f"would be in   {prepared.folder}", highlight=False)


def _row(arm: Arm, prepared: PreparedComparison, pace: Pace, done: int) -> list[str]:
    base, own = recipe.flatten(prepared.arms[0].config), recipe.flatten(arm.config)
    differs = ", ".join(f"{k} = {v}" for k, v in own.items() if base.get(k) != v and k != "name") or "–"
    faults = [len(traces[0].faults) if arm.faults else 0 for traces in prepared.traces.values()]
    fault_counts = f"{min(faults)} to {max(faults)}" if min(faults) < max(faults) else f"{faults[0]}"
    cells = [f"{done} of {len(faults)}", f"{1e3 * pace.step_s:.0f}", f"{pace.of(arm.config) / 60:.1f}"]
    return [arm.name, differs, fault_counts, *cells]


SAME_WORK = {
    "name",
    "seed",
    "optim.lr",
    "exchange.options.alpha",
    "exchange.options.beta",
    "exchange.options.gamma",
    "exchange.options.mix",
}
"""settings that change what a step computes, but not how long it takes"""
WARMUP_STEPS = 1
"""steps before the timing; the first one allocates optimizer state"""
TIMED_STEPS = 3
"""steps that are timed"""
PROCESS_START_S = 4.0
"""seconds of one core that a race's process takes to start"""


class Pace(Record):
    """Seconds of one arm on one core."""

    step_s: float
    validation_s: float

    def of(self, config: RunConfig) -> float:
        """Return the seconds of a whole race, which ends after a number of executed steps, rollbacks or not."""
        every = config.train.eval_every
        validations = config.train.steps // every if every else 0
        return PROCESS_START_S + config.train.steps * self.step_s + validations * self.validation_s


def measure_arms(arms: Sequence[Arm], dataset: Data, quiet: bool) -> dict[str, Pace]:
    """Return each arm's pace. Arms that differ only in :data:`SAME_WORK` share one measurement."""
    alike: dict[str, list[Arm]] = {}
    for arm in arms:
        timed = {key: value for key, value in recipe.flatten(arm.config).items() if key not in SAME_WORK}
        alike.setdefault(repr(timed), []).append(arm)
    paces = {}
    with CountProgress("timing steps", "kinds of arms", len(alike), quiet=quiet) as progress:
        for group in alike.values():
            with blame_custom_code(partial(custom_classes, group[0].config)):
                pace = measure_speed(group[0].config, dataset)
            paces.update({arm.name: pace for arm in group})
            progress.advance()
    return paces


def measure_speed(config: RunConfig, dataset: Data) -> Pace:
    """Measure how fast an arm trains and validates here, by its first steps without losses; copies are sent.

    Processor time approximates an idle machine, since other processes hardly affect it.
    """
    torch.set_num_threads(1)
    streams = (Stream(dataset, split, config.model.context, config.seed) for split in ("train", "validation"))
    engine = ReferenceEngine(config, *streams)
    for _ in range(WARMUP_STEPS):
        engine.train_step()
    began = time.process_time()
    for _ in range(TIMED_STEPS):
        engine.train_step()
    trained = time.process_time()
    engine.evaluate()
    return Pace(step_s=(trained - began) / TIMED_STEPS, validation_s=time.process_time() - trained)


def remaining_s(races: Sequence[Race], kept: Sequence[bool], paces: Mapping[str, Pace], workers: int) -> float:
    """Estimate the seconds until all races not ``kept`` are done, with ``workers`` processes.

    The maximum of an even share of the work and the longest race; a schedule takes at most their sum (Graham 1966,
    doi 10.1002/j.1538-7305.1966.tb01709.x).
    """
    left = [paces[race.arm].of(race.config) for race, done in zip(races, kept, strict=True) if not done]
    return max(sum(left) / workers, max(left)) if left else 0.0
