"""``planaria compare --dry-run``: which arms, seeds and steps would be raced, and about how long that would take."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from planaria.config import recipe
from planaria.config.registry import blaming
from planaria.lab.compare.forecast import Pace, pace, remaining_s
from planaria.lab.compare.race_job import kept
from planaria.lab.compare.race_spec import TUNED, Arm
from planaria.lab.comparing import Asked, Ready, ready
from planaria.lab.trials.spread import seeds_shown
from planaria.report.tables import Table, show
from planaria.report.words import counted
from planaria.runtime.engine.own_classes import own_classes


def dry_run(asked: Asked, say: Callable[[str], None] | None) -> None:
    """Print what `planaria compare` would do. The text is prepared as for a run, and a few steps of each arm are timed;
    nothing is raced, and nothing is written but the data's cache.

    :raises UserError: for everything that a run would refuse.
    """
    all_ = ready(asked, say)
    there = kept(all_.races, all_.folder, own_classes)
    paces = {arm.name: _pace(arm, all_) for arm in all_.arms}
    workers = all_.comparison.workers or len(os.sched_getaffinity(0))
    base = all_.arms[0].config
    seeds = seeds_shown(all_.comparison.seeds)
    done = {arm.name: 0 for arm in all_.arms}
    for race, over in zip(all_.races, there, strict=True):
        done[race.arm] += over
    title = f"{base.name}: {counted(len(all_.arms), 'arm')}, {seeds}, {counted(base.train.steps, 'step')} each"
    head = ["arm", "differs in", "failures", "kept", "ms a step", "minutes a race"]
    rows = [_row(arm, all_, paces[arm.name], done[arm.name]) for arm in all_.arms]
    console = show([Table(title, head, rows, numbers_from=2)])
    if any(arm.searched for arm in all_.arms):
        console.print(f"search        the best point without failures becomes the arm {TUNED!r}", highlight=False)
    left = remaining_s(all_.races, there, paces, workers)
    console.print(f"races         {counted(len(there), 'race')}, {sum(there)} of them kept from before")
    console.print(
        f"takes         about {_duration(left)} with {counted(workers, 'process', 'processes')} at a time, if"
    )
    console.print("              nothing else uses the machine: by the processor time of a few steps of each arm")
    console.print(f"would be in   {all_.folder}", highlight=False)


def _pace(arm: Arm, all_: Ready) -> Pace:
    with blaming(partial(own_classes, arm.config)):
        return pace(arm.config, all_.dataset)


def _row(arm: Arm, all_: Ready, paced: Pace, done: int) -> list[str]:
    base, own = recipe.flat(all_.arms[0].config), recipe.flat(arm.config)
    differs = ", ".join(f"{k} = {v}" for k, v in own.items() if base.get(k) != v and k != "name") or "–"
    faults = [len(traces[0].faults) if arm.faults else 0 for traces in all_.traces.values()]
    struck = f"{min(faults)} to {max(faults)}" if min(faults) < max(faults) else f"{faults[0]}"
    cells = [f"{done} of {len(faults)}", f"{1e3 * paced.step_s:.0f}", f"{paced.of(arm.config) / 60:.1f}"]
    return [arm.name, differs, struck, *cells]


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(minutes, 1)} min" if seconds else "no time"
    )
