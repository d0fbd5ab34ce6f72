"""What do trackers cost a run? Step times with the recipe's trackers, and without any.

The same small run is trained on the fleet in turns: with nobody told of its numbers, and with trackers that are told of
every step, each in a thread of its own in the controller's process (``report/live/beside.py``). Compared are the
medians of the steps' times, pair by pair. The claim: at most 1.01 of the time without.

``slow`` is a tracker that is made here: each of its calls computes for ``--call-ms`` and so holds the interpreter. It
is not among the trackers that the claim is made for, since nobody would ship it; it shows what a bad one does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import add_model_flags, real_stages, require_finished, run_fleet, step_seconds
from planaria.report.live.tracker import Tracker

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig

NAME = "trackers_cost"
CLAIM = Claim(high=1.01)
SLOW = f"benchmarks.{NAME}:Slow"


class Slow(Tracker):
    """Computes for a while in each call."""

    call_ms: float = 20.0

    def open(self, folder: Path) -> None:
        """It keeps nothing."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        until = time.thread_time() + self.call_ms / 1e3
        while time.thread_time() < until:
            pass

    def close(self) -> None:
        """It has nothing left to send."""


def step_s(config: RunConfig, tracked: bool, warm: int) -> float:
    """Seconds of a step, the median."""
    record = run_fleet(config, tracked=tracked)
    require_finished(record)
    return statistics.median(step_seconds(record, warm))


def observed(config: RunConfig, names: str, call_ms: float) -> RunConfig:
    """The recipe with these trackers."""
    options = {"call_ms": call_ms} if SLOW in names else {}
    told = config.observe.model_copy(update={"trackers": names, "options": options})
    return config.model_copy(update={"observe": type(told).model_validate(told.model_dump())})


def main() -> int:
    flags = parser(NAME, __doc__)
    add_model_flags(flags)
    flags.add_argument("--steps", type=int, default=150, help="in one repeat")
    flags.add_argument("--warm", type=int, default=20, help="the first of these, which do not count")
    flags.add_argument("--repeats", type=int, default=7, help="of each side")
    flags.add_argument("--trackers", nargs="+", default=["tensorboard"], help="sides; 'a, b' is one with both")
    flags.add_argument("--slow", action="store_true", help="one more side, with the slow tracker")
    flags.add_argument("--call-ms", type=float, default=20.0, help="what a call of the slow tracker computes")
    given = flags.parse_args()
    config = real_stages(given, NAME, given.steps, spares=0, save_every=0)
    names = [*given.trackers, *([SLOW] if given.slow else [])]
    recipes = {name: observed(config, name, given.call_ms) for name in names}
    sides = [partial(step_s, config, False, given.warm)]
    sides += [partial(step_s, recipe, True, given.warm) for recipe in recipes.values()]
    alone, *others = interleaved(sides, given.repeats)
    rows = []
    for name, found in zip(names, others, strict=True):
        ratios = [told / without for told, without in zip(found, alone, strict=True)]
        beside = {"without": milliseconds(alone), "with": milliseconds(found)}
        claim = None if name == SLOW else CLAIM
        rows.append(Row(name.rpartition(":")[2], ratios, "1", claim, beside))
    return conclude(NAME, given, rows, ["measured: median time of a step with trackers / without"])


if __name__ == "__main__":
    start(main)
