"""Checkpoints: everything rolls back, and how often to make one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_states import losses, replica

from planaria.recovery.checkpoint import Checkpoint, best_interval


def test_whatever_is_lost_all_roll_back() -> None:
    strategy = Checkpoint()
    for lost in losses(4):
        answer = strategy.donors(lost, replica(4, age=0))
        assert answer.rollback and not answer.donors and not answer.refused
    assert strategy.copies(4) == ()


@given(st.floats(1.0, 1e7), st.floats(1e-9, 1e-6))
def test_cheap_checkpoints_are_made_at_youngs_interval(mean_time: float, ratio: float) -> None:
    save = ratio * mean_time
    assert best_interval(save, mean_time) == pytest.approx(math.sqrt(2 * save * mean_time), rel=1e-3)


@pytest.mark.parametrize(
    ("save", "mean_time", "interval"),
    [
        (0.0, 3600.0, 0.0),
        (2.0, 100.0, 18.68888888888889),  # √400 = 20; 20 · (1 + 0.1/3 + 0.01/9) − 2
        (200.0, 100.0, 100.0),
        (500.0, 100.0, 100.0),
    ],
)
def test_known_values(save: float, mean_time: float, interval: float) -> None:
    assert best_interval(save, mean_time) == pytest.approx(interval)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(save: float, mean_time: float, unit: float) -> None:
    assert best_interval(unit * save, unit * mean_time) == pytest.approx(unit * best_interval(save, mean_time))


@pytest.mark.parametrize("times", [(-1.0, 10.0), (1.0, 0.0), (1.0, -5.0)])
def test_times_that_are_none_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="times must be positive"):
        best_interval(*times)


@pytest.mark.parametrize("save", [0.02, 0.1, 0.3])
def test_no_interval_a_fifth_shorter_or_longer_loses_less(save: float) -> None:
    """Against failures that strike at random: what is done between the last checkpoint and a failure is lost."""
    gaps = np.random.default_rng(34107).exponential(1.0, 1_000_000)

    def done(interval: float) -> float:
        """Share of the time that went into training that lasts."""
        return float(np.floor(gaps / (interval + save)).sum() * interval / gaps.sum())

    best = best_interval(save, 1.0)
    assert done(best) > max(done(0.8 * best), done(1.2 * best))
    # The exact share for exponential failures of mean 1 (the mean number of whole segments in a gap, times their work).
    assert done(best) == pytest.approx(best / math.expm1(best + save), rel=0.01)
