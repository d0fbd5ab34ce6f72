"""Extra steps that failures cost under each recovery strategy, as curves over the failure rate, learned from races."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from planaria.common.documents import Record, former_names
from planaria.recovery.base import Recovery

POWERS = [k / 20 for k in range(6, 25)]
"""candidate powers of a curve, 0.3 to 1.2"""
MIN_RATE_RATIO = 2.0
"""minimum ratio of rates that determines the power"""
MIN_RACES = 4
"""minimum number of races for a curve"""
MAX_RATE_FACTOR = 1.25
"""multiple of the highest raced rate up to which a curve is trusted"""
MAX_SIZE_FACTOR = 2.0
"""factor below the smallest or above the largest raced model within which experience applies"""


class Range(Record):
    """A measured number: mean, minimum and maximum over seeds."""

    mean: float
    low: float
    high: float


class SwappedSteps(Range):
    """Steps to a loss with swapped routing over those with full routing, without failures."""

    parameters: int
    """parameters of the raced model"""

    def why_size_not_covered(self, size: int) -> str:
        """See :meth:`Curve.why_size_not_covered`."""
        return _why_size_not_covered(size, self.parameters, self.parameters)


class Observation(Record):
    """One race with failures that reached the target."""

    _former = former_names(strategy="way")
    strategy: str
    """the recovery strategy (:func:`strategy_of`)"""
    rate: float
    """failures per step"""
    extra: float
    """steps to the target over those without failures on the same routes, less 1; noise can make it negative"""
    parameters: int
    """parameters of the model"""


class Curve(Record):
    """Extra steps per useful step at a rate: ``scale · rate ** power``; further failures often cost less."""

    scale: float
    power: float
    low: float
    """addend: the largest amount by which a race was below a curve fitted without it (≤ 0)"""
    high: float
    """addend: the same above (≥ 0)"""
    races: int
    min_rate: float
    """lowest raced rate, failures per step"""
    max_rate: float
    min_parameters: int
    """parameters of the smallest model with enough races"""
    max_parameters: int

    def extra(self, rate: float, side: str) -> float:
        """Return the extra steps at ``rate`` failures per step; ``side`` is mean, low or high.

        Below the lowest raced rate the spread shrinks as √rate, to 0 without failures.
        """
        deviation = {"mean": 0.0, "low": self.low, "high": self.high}[side]
        return float(self.scale * rate**self.power + deviation * min(1.0, rate / self.min_rate) ** 0.5)

    def why_rate_not_covered(self, rate: float) -> str:
        """Return why the curve does not cover this rate, or an empty string if it does."""
        if self.races < MIN_RACES:
            return f"{self.races} races, of which at least {MIN_RACES} are needed"
        if rate > MAX_RATE_FACTOR * self.max_rate:
            return f"{rate:.2g} failures a step, raced with up to {self.max_rate:.2g}"
        return ""

    def why_size_not_covered(self, size: int) -> str:
        """Return why the curve does not cover a model of ``size`` parameters, or an empty string if it does."""
        return _why_size_not_covered(size, self.min_parameters, self.max_parameters)


class Experience(Record):
    """Costs of failures measured in races: the part of a prediction that cannot be calculated."""

    swapped: SwappedSteps
    observed: dict[str, list[Observation]]
    """observations by the races they come from"""

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Strategy → its curve; exact and unraced strategies have none.

        Models of all sizes share a curve, since races of one size are too few and noisy.
        """
        everything = [observation for observations in self.observed.values() for observation in observations]
        strategies = dict.fromkeys(observation.strategy for observation in everything)
        return {
            strategy: fit([observation for observation in everything if observation.strategy == strategy])
            for strategy in strategies
        }


def strategy_of(name: str, strategy: Recovery) -> str:
    """Return the name under which experience stores a strategy."""
    return f"{name} ({strategy.quality_key})" if strategy.quality_key else name


def fit(observed: Sequence[Observation]) -> Curve:
    """Fit a curve by least squares; linear unless rates differ widely.

    Its spread is the jackknife's: the deviation of each race from a curve fitted to all others.
    """
    scale, power = _least_squares(observed)
    deviations = [0.0]
    for omitted in observed:
        others = [observation for observation in observed if observation is not omitted] or [omitted]
        scale_without, power_without = _least_squares(others)
        deviations.append(omitted.extra - scale_without * omitted.rate**power_without)
    rates = [observation.rate for observation in observed]
    races_of_size = Counter(observation.parameters for observation in observed)
    sizes = [size for size, races in races_of_size.items() if races >= MIN_RACES] or [*races_of_size]
    return Curve(
        scale=scale,
        power=power,
        low=min(deviations),
        high=max(deviations),
        races=len(observed),
        min_rate=min(rates),
        max_rate=max(rates),
        min_parameters=min(sizes),
        max_parameters=max(sizes),
    )


def _why_size_not_covered(size: int, smallest: int, largest: int) -> str:
    if smallest / MAX_SIZE_FACTOR <= size <= MAX_SIZE_FACTOR * largest:
        return ""
    raced = " to ".join(dict.fromkeys(f"{bound / 1e6:.2g}" for bound in (smallest, largest)))
    size_text = f"{size / 1e6:.3g} million" if size < 1e9 else f"{size / 1e9:.3g} billion"
    return f"raced with {raced} million parameters, and this model has {size_text}"


def _least_squares(observed: Sequence[Observation]) -> tuple[float, float]:
    """Return scale, not below 0, and power."""
    rates, extras = [observation.rate for observation in observed], [observation.extra for observation in observed]
    powers = POWERS if max(rates) >= MIN_RATE_RATIO * min(rates) else [1.0]
    fits = []
    for power in powers:
        shape = [rate**power for rate in rates]
        scale = max(0.0, sum(s * e for s, e in zip(shape, extras, strict=True)) / sum(s * s for s in shape))
        squared_error = sum((scale * s - e) ** 2 for s, e in zip(shape, extras, strict=True))
        fits.append((squared_error, power, scale))
    _, power, scale = min(fits)
    return scale, power
