"""What races taught: how many steps failures add under each way of coping, as a curve over how often they strike."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from planaria.common import documents
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.lab.compare.race_results import Compared, Run, Scored
from planaria.recovery import RECOVERIES
from planaria.recovery.base import Recovery

POWERS = [k / 20 for k in range(6, 25)]
"""0.3 to 1.2: what a curve's power may be"""
WIDE = 2.0
"""rates that differ by less than this factor say nothing about the power"""
FEWEST = 4
"""races without which a curve has no spread worth the name"""
BEYOND = 1.25
"""times the highest rate raced: a curve is not believed further out"""
SIZES = 2.0
"""times smaller or larger than all models raced: what they taught is not of such ones"""


class Range(Record):
    """A number that was measured: its mean over seeds, and the least and the most."""

    mean: float
    low: float
    high: float


class Swapped(Range):
    """Steps to a loss with swapped routing, over those with full routing, without failures."""

    parameters: int
    """of the model raced"""

    def far(self, size: int) -> str:
        """Like :meth:`Curve.far`."""
        return _far(size, self.parameters, self.parameters)


class Observation(Record):
    """One race that met failures and reached the target."""

    way: str
    """what brought the stages back (:func:`way_of`)"""
    rate: float
    """failures met per step"""
    extra: float
    """steps to the target over those without failures on the same routes, less 1; noise can make it negative"""
    parameters: int
    """of the model"""


class Curve(Record):
    """Extra steps per useful step at a rate: ``scale · rate ** power``; the next failure often costs less."""

    scale: float
    power: float
    low: float
    """added: how far a race was below a curve fitted without it, at most (0 or less)"""
    high: float
    """added: the same above (0 or more)"""
    races: int
    least: float
    """the lowest rate raced, failures a step"""
    most: float
    smallest: int
    """parameters of the smallest model with races enough"""
    largest: int

    def extra(self, rate: float, side: str) -> float:
        """At ``rate`` failures a step; ``side`` is mean, low or high.

        Below the lowest rate raced the spread shrinks as that of a count does: what never fails has none.
        """
        beside = {"mean": 0.0, "low": self.low, "high": self.high}[side]
        return float(self.scale * rate**self.power + beside * min(1.0, rate / self.least) ** 0.5)

    def doubt(self, rate: float) -> str:
        """Why the curve says nothing of so many failures a step; empty if it does."""
        if self.races < FEWEST:
            return f"{self.races} races, of which at least {FEWEST} are needed"
        if rate > BEYOND * self.most:
            return f"{rate:.2g} failures a step, raced with up to {self.most:.2g}"
        return ""

    def far(self, size: int) -> str:
        """Why the curve says little of a model with ``size`` parameters; empty if about such ones were raced."""
        return _far(size, self.smallest, self.largest)


class Experience(Record):
    """What failures cost in races that were run: the part of a prediction that cannot be calculated."""

    swapped: Swapped
    observed: dict[str, list[Observation]]
    """by the races that they were taken from"""

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Way → its curve; exact ways, and those nobody has raced yet, have none.

        Models of all sizes share one: races of one size alone are too few, and scatter too much.
        """
        everything = [one for found in self.observed.values() for one in found]
        ways = dict.fromkeys(one.way for one in everything)
        return {way: fit([one for one in everything if one.way == way]) for way in ways}


def way_of(name: str, strategy: Recovery) -> str:
    """The name under which experience keeps what a strategy does."""
    return f"{name} ({strategy.variety})" if strategy.variety else name


def fit(observed: Sequence[Observation]) -> Curve:
    """The curve with the least squares of what it says the extra steps were; linear unless rates differ widely.

    Its spread is the jackknife's: what each race is off a curve that was fitted to all others.
    """
    scale, power = _least_squares(observed)
    off = [0.0]
    for left_out in observed:
        others = [one for one in observed if one is not left_out] or [left_out]
        own, bent = _least_squares(others)
        off.append(left_out.extra - own * left_out.rate**bent)
    rates, of_size = [one.rate for one in observed], Counter(one.parameters for one in observed)
    sizes = [size for size, races in of_size.items() if races >= FEWEST] or [*of_size]
    return Curve(
        scale=scale,
        power=power,
        low=min(off),
        high=max(off),
        races=len(observed),
        least=min(rates),
        most=max(rates),
        smallest=min(sizes),
        largest=max(sizes),
    )


def _far(size: int, smallest: int, largest: int) -> str:
    if smallest / SIZES <= size <= SIZES * largest:
        return ""
    raced = " to ".join(dict.fromkeys(f"{one / 1e6:.2g}" for one in (smallest, largest)))
    own = f"{size / 1e6:.3g} million" if size < 1e9 else f"{size / 1e9:.3g} billion"
    return f"raced with {raced} million parameters, and this model has {own}"


def _least_squares(observed: Sequence[Observation]) -> tuple[float, float]:
    """Scale, which is not below 0, and power."""
    rates, extras = [one.rate for one in observed], [one.extra for one in observed]
    powers = POWERS if max(rates) >= WIDE * min(rates) else [1.0]
    found = []
    for power in powers:
        shape = [rate**power for rate in rates]
        scale = max(0.0, sum(s * e for s, e in zip(shape, extras, strict=True)) / sum(s * s for s in shape))
        wrong = sum((scale * s - e) ** 2 for s, e in zip(shape, extras, strict=True))
        found.append((wrong, power, scale))
    _, power, scale = min(found)
    return scale, power


def learn(found: Compared, source: str, size: int) -> list[Observation]:
    """What a comparison of models with ``size`` parameters teaches, by its own seeds: every race that met failures.

    A race counts for the first strategy of its arm's chain, beside the arm that nothing struck and that differs in
    nothing else; exact strategies and controls teach nothing, and arms without such a partner neither.

    :raises UserError: when arms missed the target.
    """
    calm = [arm for arm in found.arms if not arm.faults]
    observed = []
    for arm in found.arms:
        by, first = _first(arm)
        unharmed = next((one for one in calm if one.alike == arm.alike), None)
        if arm.faults and unharmed and not first.exact and not first.control:
            way = way_of(by, first)
            observed += [_observation(way, size, arm.name, *pair, source) for pair in _pairs(arm, unharmed)]
    return observed


def swapping(found: Compared, source: str, size: int) -> Swapped:
    """Steps to the target with swapped routes over those with full ones, without failures.

    :raises UserError: when the comparison lacks an arm with swapped routes and no failures, or arms missed the target.
    """
    free = found.arms[0]
    swapped = next((arm for arm in found.arms if arm.routing == "swapped" and not arm.faults), None)
    if swapped is None:
        raise UserError(f"{source}: no arm has swapped routing and faults = false; nothing tells what swapping costs")
    ratios = [_ticks(run, swapped.name, source) / _ticks(own, free.name, source) for run, own in _pairs(swapped, free)]
    return Swapped(mean=statistics.fmean(ratios), low=min(ratios), high=max(ratios), parameters=size)


def _first(arm: Scored) -> tuple[str, Recovery]:
    """The first strategy of an arm's chain, with the options that the arm gives it."""
    place = "recovery.options."
    said = {key.removeprefix(place): value for key, value in arm.changes.items() if key.startswith(place)}
    options = {key: _value(text) for key, text in said.items()}
    by = arm.changes.get("recovery.strategy", "checkfree").split(",")[0].strip()
    return by, RECOVERIES.make(by, RECOVERIES.declared([by], options))


def _value(text: str) -> object:
    """What a recipe's option was, of the word that a comparison keeps."""
    try:
        return documents.parse_toml(f"value = {text.lower()}", "an option")["value"]
    except UserError:
        return text


def _observation(way: str, size: int, arm: str, run: Run, unharmed: Run, source: str) -> Observation:
    ticks = _ticks(run, arm, source)
    extra = ticks / _ticks(unharmed, arm, source) - 1
    return Observation(way=way, rate=run.failures / ticks, extra=extra, parameters=size)


def _pairs(one: Scored, other: Scored) -> Sequence[tuple[Run, Run]]:
    return list(zip(one.runs, other.runs, strict=True))


def _ticks(run: Run, arm: str, source: str) -> float:
    if run.ticks is None:
        raise UserError(f"{source}: {arm} did not reach the target with seed {run.seed}; train longer, or aim lower")
    return run.ticks
