"""Statistics over seeds: mean [least … most]."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Mean, minimum and maximum over the seeds."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Return the spread of one number per seed; raise ValueError for none."""
        return cls(statistics.fmean(numbers), min(numbers), max(numbers))


def spread(seed_numbers: Iterable[float | None]) -> Spread | None:
    """Return the spread of one number per seed, or None if any seed lacks it."""
    numbers = list(seed_numbers)
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return None
    return Spread.of(known)


def format_spread(seed_spread: Spread | None, form: str = ".3f") -> str:
    """Format ``mean [least … most]``; the mean alone if all three read alike, a dash for None."""
    if seed_spread is None:
        return "–"
    mean, least, most = (format(number, form) for number in seed_spread)
    return mean if least == most else f"{mean} [{least} … {most}]"


def format_seeds(seeds: Iterable[int]) -> str:
    """Format ``seed 1`` or ``seeds 1, 2``."""
    numbers = [str(seed) for seed in seeds]
    return f"seed{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def bootstrap(samples: Sequence[float], seed: int = 0, draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean, from ``draws`` resamples (Efron 1979).

    doi 10.1214/aos/1176344552. It is too narrow for few values: with five normal ones, a 95 % interval covers the true
    mean in about 85 % of cases.
    """
    means = np.random.default_rng(seed).choice(np.asarray(samples), (draws, len(samples))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
