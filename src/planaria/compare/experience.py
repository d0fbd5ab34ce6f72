"""What races taught: how many steps failures add under each way of coping, as a curve over how often they strike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property

from planaria import documents
from planaria.compare.race_results import Compared, Run, Scored
from planaria.documents import Record
from planaria.errors import UserError
from planaria.recovery import RECOVERIES
from planaria.recovery.base import Recovery

POWERS = [k / 20 for k in range(6, 25)]
"""0.3 to 1.2: what a curve's power may be"""
WIDE = 2.0
"""rates that differ by less than this factor say nothing about the power"""


class Range(Record):
    """A number that was measured: its mean over seeds, and the least and the most."""

    mean: float
    low: float
    high: float


class Observation(Record):
    """One race that met failures and reached the target."""

    way: str
    """what brought the stages back (:func:`way_of`)"""
    rate: float
    """failures met per step"""
    extra: float
    """steps to the target over those without failures on the same routes, less 1; noise can make it negative"""


class Curve(Record):
    """Extra steps per useful step at a rate: ``scale · rate ** power``; the next failure often costs less."""

    scale: float
    power: float
    low: float
    """the least that a race had, over the curve"""
    high: float

    def extra(self, rate: float, side: str) -> float:
        """At ``rate`` failures a step; ``side`` is mean, low or high."""
        beside = {"mean": 1.0, "low": self.low, "high": self.high}[side]
        return float(self.scale * rate**self.power * beside)


class Experience(Record):
    """What failures cost in races that were run: the part of a prediction that cannot be calculated."""

    sources: list[str]
    """the races it was taken from"""
    swapped: Range
    """steps to a loss with swapped routing, over those with full routing, without failures"""
    observed: list[Observation]

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Way → its curve; exact ways, and those nobody has raced yet, have none."""
        ways = dict.fromkeys(one.way for one in self.observed)
        return {way: fit([one for one in self.observed if one.way == way]) for way in ways}


def way_of(name: str, strategy: Recovery) -> str:
    """The name under which experience keeps what a strategy does."""
    return f"{name} ({strategy.variety})" if strategy.variety else name


def fit(observed: Sequence[Observation]) -> Curve:
    """The curve with the least squares of what it says the extra steps were; linear unless rates differ widely."""
    rates, extras = [one.rate for one in observed], [one.extra for one in observed]
    powers = POWERS if max(rates) >= WIDE * min(rates) else [1.0]
    found = []
    for power in powers:
        shape = [rate**power for rate in rates]
        scale = max(0.0, sum(s * e for s, e in zip(shape, extras, strict=True)) / sum(s * s for s in shape))
        wrong = sum((scale * s - e) ** 2 for s, e in zip(shape, extras, strict=True))
        found.append((wrong, power, scale))
    _, power, scale = min(found)
    beside = [max(0.0, e) / (scale * rate**power) for rate, e in zip(rates, extras, strict=True)] if scale else [0.0]
    return Curve(scale=scale, power=power, low=min(beside), high=max(beside))


def learn(found: Compared, source: str) -> Experience:
    """What a comparison teaches, by its own seeds: what swapping costs, and every race that met failures.

    A race counts for the first strategy of its arm's chain; exact strategies and controls teach nothing.

    :raises UserError: when the comparison lacks an arm with swapped routes and no failures, or arms missed the target.
    """
    free = found.arms[0]
    swapped = [arm for arm in found.arms if arm.routing == "swapped" and not arm.faults]
    if not swapped:
        raise UserError(f"{source}: no arm has swapped routing and faults = false; nothing tells what swapping costs")
    observed = []
    for arm in found.arms:
        by, first = _first(arm)
        if arm.faults and not first.exact and not first.control:
            unharmed = swapped[0] if arm.routing == "swapped" else free
            observed += [_observation(way_of(by, first), arm.name, *pair, source) for pair in _pairs(arm, unharmed)]
    ratios = [
        _ticks(run, swapped[0].name, source) / _ticks(own, free.name, source) for run, own in _pairs(swapped[0], free)
    ]
    spread = Range(mean=statistics.fmean(ratios), low=min(ratios), high=max(ratios))
    return Experience(sources=[source], swapped=spread, observed=observed)


def _first(arm: Scored) -> tuple[str, Recovery]:
    """The first strategy of an arm's chain, with the options that the arm gives it."""
    place = "recovery.options."
    said = {key.removeprefix(place): value for key, value in arm.changes.items() if key.startswith(place)}
    options = {key: documents.parse_toml(f"value = {value.lower()}", place)["value"] for key, value in said.items()}
    by = arm.changes.get("recovery.strategy", "checkfree").split(",")[0].strip()
    return by, RECOVERIES.make(by, RECOVERIES.declared([by], options))


def _observation(way: str, arm: str, run: Run, unharmed: Run, source: str) -> Observation:
    ticks = _ticks(run, arm, source)
    return Observation(way=way, rate=run.failures / ticks, extra=ticks / _ticks(unharmed, arm, source) - 1)


def _pairs(one: Scored, other: Scored) -> Sequence[tuple[Run, Run]]:
    return list(zip(one.runs, other.runs, strict=True))


def _ticks(run: Run, arm: str, source: str) -> float:
    if run.ticks is None:
        raise UserError(f"{source}: {arm} did not reach the target with seed {run.seed}; train longer, or aim lower")
    return run.ticks
