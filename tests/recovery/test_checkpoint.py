"""The checkpoint strategy, the best interval, and simulated whole-model rollback."""

from __future__ import annotations

import math
import random
from typing import Literal

import numpy as np
import pytest
from benchmarks.rollback import RollbackCost, rollback
from hypothesis import given
from hypothesis import strategies as st

from planaria.lab.compare.rollback import rollback_mean
from planaria.recovery.checkpoint import Checkpoint, best_interval
from support.stage_states import losses, replica


def test_any_loss_rolls_all_stages_back() -> None:
    strategy = Checkpoint()
    for lost in losses(4):
        answer = strategy.donors(lost, replica(4, age=0))
        assert answer.rollback and not answer.donors and not answer.refused
    assert strategy.copies(4) == ()


@given(st.floats(1.0, 1e7), st.floats(1e-9, 1e-6))
def test_cheap_checkpoints_have_youngs_interval(mean_time: float, ratio: float) -> None:
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
def test_the_best_interval_has_known_values(save: float, mean_time: float, interval: float) -> None:
    assert best_interval(save, mean_time) == pytest.approx(interval)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_the_best_interval_is_independent_of_the_unit(save: float, mean_time: float, unit: float) -> None:
    assert best_interval(unit * save, unit * mean_time) == pytest.approx(unit * best_interval(save, mean_time))


@pytest.mark.parametrize("times", [(-1.0, 10.0), (1.0, 0.0), (1.0, -5.0)])
def test_invalid_times_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="times must be positive"):
        best_interval(*times)


@pytest.mark.parametrize("save", [0.02, 0.1, 0.3])
def test_intervals_20_percent_shorter_or_longer_lose_more(save: float) -> None:
    """With random failures, work between the last checkpoint and a failure is lost."""
    gaps = np.random.default_rng(34107).exponential(1.0, 1_000_000)

    def done(interval: float) -> float:
        """Return the share of time spent on training that is kept."""
        return float(np.floor(gaps / (interval + save)).sum() * interval / gaps.sum())

    best = best_interval(save, 1.0)
    assert done(best) > max(done(0.8 * best), done(1.2 * best))
    # The exact share for exponential failures of mean 1 (the mean number of whole segments in a gap, times their work).
    assert done(best) == pytest.approx(best / math.expm1(best + save), rel=0.01)


Counted = Literal["steps", "ticks"]
USEFUL, EVERY = st.integers(0, 200), st.integers(1, 60)
COUNTED: st.SearchStrategy[Counted] = st.sampled_from(["steps", "ticks"])
STRUCK = st.frozensets(st.integers(0, 300), max_size=40)


@pytest.mark.parametrize(
    ("useful", "every", "struck", "by_steps", "by_ticks"),
    [
        # Saved at 2; the third step is lost before tick 3 and done again. Then saves after steps 4, or ticks 4 and 6.
        (5, 2, {3}, RollbackCost(6, 2, 1), RollbackCost(6, 3, 1)),
        # Two steps are lost before tick 2. By steps the save comes after tick 5; by ticks after 3, with one step in it.
        (4, 3, {2}, RollbackCost(6, 1, 1), RollbackCost(6, 2, 1)),
        # Before tick 4 another two, or one, since the other was saved.
        (4, 3, {2, 4}, RollbackCost(8, 1, 2), RollbackCost(7, 2, 2)),
        # Right after a save nothing is lost, but all roll back.
        (6, 3, {3}, RollbackCost(6, 2, 1), RollbackCost(6, 2, 1)),
        # Initial weights are still there before the first tick.
        (3, 5, {0}, RollbackCost(3, 0, 0), RollbackCost(3, 0, 0)),
        # Nothing is saved in time: restart until the failures are over.
        (3, 5, {1, 2, 3}, RollbackCost(6, 0, 3), RollbackCost(6, 1, 3)),
        # Failures after the end have no effect.
        (2, 1, {2, 3}, RollbackCost(2, 2, 0), RollbackCost(2, 2, 0)),
    ],
)
def test_rollback_costs_match_manual_examples(
    useful: int, every: int, struck: set[int], by_steps: RollbackCost, by_ticks: RollbackCost
) -> None:
    assert rollback(useful, every, struck) == by_steps
    assert rollback(useful, every, struck, "ticks") == by_ticks


@given(USEFUL, EVERY, COUNTED)
def test_without_failures_every_step_is_useful(useful: int, every: int, counted: Counted) -> None:
    assert rollback(useful, every, (), counted) == RollbackCost(useful, useful // every, 0)


@given(USEFUL, STRUCK, COUNTED)
def test_with_a_save_after_every_step_failures_lose_nothing(
    useful: int, struck: frozenset[int], counted: Counted
) -> None:
    met = len(struck & set(range(1, useful)))
    assert rollback(useful, 1, struck, counted) == RollbackCost(useful, useful, met)


@given(USEFUL, EVERY, STRUCK, COUNTED)
def test_a_failure_loses_less_than_an_interval(
    useful: int, every: int, struck: frozenset[int], counted: Counted
) -> None:
    outcome = rollback(useful, every, struck, counted)
    assert useful <= outcome.ticks <= useful + outcome.rollbacks * (every - 1)
    assert outcome.rollbacks == len(struck & set(range(1, outcome.ticks)))


@given(USEFUL, EVERY, STRUCK, STRUCK, COUNTED)
def test_more_failures_never_help(
    useful: int, every: int, struck: frozenset[int], more: frozenset[int], counted: Counted
) -> None:
    few, many = (rollback(useful, every, faults, counted) for faults in (struck, struck | more))
    assert few.ticks <= many.ticks


@pytest.mark.parametrize("counted", ["steps", "ticks"])
@pytest.mark.parametrize(("every", "p"), [(1, 0.1), (7, 0.02), (50, 0.02)])
def test_a_long_simulation_matches_the_mean(every: int, p: float, counted: Counted) -> None:
    useful, rng = 100_000, random.Random(34107)
    struck = {tick for tick in range(4 * useful) if rng.random() < p}
    outcome = rollback(useful, every, struck, counted)
    assert outcome.ticks < 4 * useful
    assert outcome.ticks / useful == pytest.approx(rollback_mean(every, p, counted), rel=0.02)


@pytest.mark.parametrize(
    ("p", "every_100", "every_10"), [(0.0009, 1.31, 1.03), (0.002, 1.74, 1.06), (0.004, 2.64, 1.11)]
)
def test_the_mean_matches_checkfrees_table(p: float, every_100: float, every_10: float) -> None:
    any_of_six = 1 - (1 - p) ** 6
    assert rollback_mean(100, any_of_six, "ticks") == pytest.approx(every_100, rel=0.02)
    assert rollback_mean(10, any_of_six, "ticks") == pytest.approx(every_10, rel=0.01)


def test_without_failures_the_mean_is_one() -> None:
    assert rollback_mean(100, 0.0) == rollback_mean(100, 0.0, "ticks") == 1.0


@pytest.mark.parametrize("counted", ["steps", "ticks"])
def test_rare_failures_lose_half_an_interval_each(counted: Counted) -> None:
    lost = rollback_mean(100, 1e-6, counted) - 1.0
    assert lost == pytest.approx(1e-6 * 99 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("useful", "every", "struck", "behind", "course"),
    [
        # Begun after two ticks, durable after three: lost then, but not now.
        (5, 2, {2}, 1, RollbackCost(7, 3, 1)),
        (5, 2, {3}, 1, RollbackCost(6, 2, 1)),
        (5, 2, {4}, 2, RollbackCost(7, 3, 1)),
        (5, 2, {4}, 1, RollbackCost(7, 3, 1)),
        # A save later than the next postpones it: at 2, durable after 5; then at 5, not at 4.
        (6, 2, (), 3, RollbackCost(6, 2, 0)),
    ],
)
def test_rollback_costs_with_background_saves_match_manual_examples(
    useful: int, every: int, struck: set[int], behind: int, course: RollbackCost
) -> None:
    assert rollback(useful, every, struck, behind=behind) == course


@pytest.mark.parametrize(("every", "p", "behind"), [(7, 0.02, 3), (7, 0.02, 7), (20, 0.03, 12), (1, 0.1, 1)])
def test_a_long_simulation_with_background_saves_matches_the_mean(every: int, p: float, behind: int) -> None:
    useful, rng = 200_000, random.Random(34107)
    struck = {tick for tick in range(6 * useful) if rng.random() < p}
    outcome = rollback(useful, every, struck, behind=behind)
    assert outcome.ticks < 6 * useful
    assert outcome.ticks / useful == pytest.approx(rollback_mean(every, p, behind=behind), rel=0.02)


@given(USEFUL, EVERY, STRUCK, st.integers(0, 30))
def test_a_later_checkpoint_never_helps(useful: int, every: int, struck: frozenset[int], behind: int) -> None:
    assert rollback(useful, every, struck).ticks <= rollback(useful, every, struck, behind=behind).ticks


def test_invalid_background_saves_are_refused() -> None:
    with pytest.raises(ValueError, match="not be later than the next"):
        rollback_mean(3, 0.1, behind=4)
    with pytest.raises(ValueError, match="counted in steps"):
        rollback(3, 1, (), "ticks", behind=1)
