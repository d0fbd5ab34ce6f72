"""Arms × seeds on the same failures, from a recipe to every number as JSON and a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.common import atomic
from planaria.data.shards import Data, prepare
from planaria.faults.trace import Trace, write
from planaria.lab.arm_clocks import checked
from planaria.lab.compare.clock import Clock
from planaria.lab.compare.race_job import Race, run_races
from planaria.lab.compare.race_results import Compared
from planaria.lab.compare.race_spec import Arm, Comparison, load, traces_for
from planaria.lab.found import compared
from planaria.lab.report.comparison import write_comparison
from planaria.lab.trials.arms import of_arm
from planaria.lab.trials.kept import make_folder
from planaria.report.live.jobs_progress import JobsProgress
from planaria.runtime.engine import runs
from planaria.runtime.engine.own_classes import own_classes
from planaria.runtime.engine.prepare import epochs, streams

REPORT, NUMBERS = "report.html", "comparison.json"


@dataclass(frozen=True)
class Asked:
    """What a program or a command asks to be compared."""

    path: Path
    flags: Mapping[str, object]
    """laid over all arms"""
    seeds: Sequence[int] | None = None
    only: Sequence[str] | None = None
    """arms"""
    trace: Mapping[str, Any] | None = None
    """laid over compare.trace"""


@dataclass(frozen=True)
class Ready:
    """A comparison about which nothing is left to complain."""

    comparison: Comparison
    arms: list[Arm]
    clocks: Mapping[str, Clock]
    dataset: Data
    traces: Mapping[int, Sequence[Trace]]
    races: list[Race]
    folder: Path


def ready(asked: Asked, say: Callable[[str], None] | None) -> Ready:
    """Everything that is checked and prepared before the first race; ``say`` hears of the text's preparation.

    :raises UserError: naming the first thing that is wrong, its place and the mend.
    """
    path = asked.path
    comparison, arms = load(path, asked.flags, asked.seeds, asked.only, asked.trace)
    arms, clocks = checked(path, comparison, arms)
    base = arms[0].config
    dataset = prepare(base.data, base.model.vocab, say)
    for arm in arms:
        with of_arm(f"{path}: compare.arms.{arm.name}"):
            tuple(epochs(arm.config, streams(arm.config, dataset)[0], arm.config.train.steps * arm.config.samples))
    most = max(arm.config.exchange.replicas for arm in arms)
    traces = {seed: traces_for(comparison, base, seed, most) for seed in comparison.seeds}
    races = [_race(arm, seed, dataset, traces[seed], clocks) for seed in comparison.seeds for arm in arms]
    return Ready(comparison, arms, clocks, dataset, traces, races, Path(base.out) / f"{base.name}-compare")


def raced(asked: Asked, quiet: bool, say: Callable[[str], None] | None) -> tuple[Compared, Path]:
    """Run the comparison, or what is left of it: what it found, and its folder."""
    all_ = ready(asked, say)
    folder, comparison = all_.folder, all_.comparison
    make_folder(folder)
    with runs.held(folder):
        with JobsProgress(quiet) as progress:
            courses = run_races(all_.races, folder, comparison, progress, own_classes)
        for seed, drawn in all_.traces.items():
            write(drawn[0], folder / f"trace-{seed}.json")
            for replica, trace in enumerate(drawn[1:], 1):
                write(trace, folder / f"trace-{seed}-replica-{replica}.json")
        found = compared(asked.path, comparison, all_.arms, all_.clocks, all_.traces, all_.races, courses)
        atomic.write_text(folder / NUMBERS, found.model_dump_json(indent=1))
    write_comparison(found, folder / REPORT)
    return found, folder


def _race(arm: Arm, seed: int, dataset: Data, traces: Sequence[Trace], clocks: Mapping[str, Clock]) -> Race:
    config = arm.config.model_copy(update={"seed": seed})
    return Race(
        arm=arm.name,
        config=config,
        dataset=str(dataset.folder),
        trace=traces[0],
        faults=arm.faults,
        further=list(traces[1 : config.exchange.replicas]),
        behind=clocks[arm.name].behind,
    )
