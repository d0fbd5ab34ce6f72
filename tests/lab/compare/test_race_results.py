from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.lab.compare.clock import ArmClock
from planaria.lab.compare.race import ArmCourse, LossEvent, ValidationPoint
from planaria.lab.compare.race_results import (
    ArmRun,
    ArmScore,
    curve,
    loss_at,
    score,
    smoothed_losses,
    ticks_to,
)
from support.report.plain_arms import arm_score, results

LOSSES = st.lists(st.floats(0.5, 10), min_size=3, max_size=30)


def points(*losses: float, every: int = 10) -> list[ValidationPoint]:
    return [ValidationPoint(tick=every * n, step=every * n, loss=loss) for n, loss in enumerate(losses, 1)]


def course(
    *losses: float, met: list[LossEvent] | None = None, saved: list[int] | None = None, stopped: str = ""
) -> ArmCourse:
    return ArmCourse(
        points=points(*losses), loss_events=met or [], ticks=10 * len(losses), saved=saved or [], stopped=stopped
    )


def clock(step_s: float = 36.0) -> ArmClock:
    return ArmClock(step_s=step_s, save_s=360.0, load_s=180.0, donated_s=1.0, replacement_s=60.0, bandwidth=100.0)


def met(tick: int, rolled_back: bool = False, moved: int = 0, lost: int = 0) -> LossEvent:
    return LossEvent(tick=tick, stages=[1], outcome="", moved_bytes=moved, rolled_back=rolled_back, steps_lost=lost)


def test_smoothed_is_the_mean_of_three_from_the_third_on() -> None:
    assert smoothed_losses(points(9.0, 6.0, 3.0, 0.0)) == [(30.0, 6.0), (40.0, 3.0)]
    assert smoothed_losses(points(9.0, 6.0)) == []


def test_ticks_to_interpolates_between_validations() -> None:
    falling = points(9.0, 6.0, 3.0, 0.0)  # smoothed: 6 at tick 30, 3 at tick 40
    assert ticks_to(falling, 4.5) == 35.0
    assert ticks_to(falling, 3.0) == 40.0
    assert ticks_to(falling, 6.0) == 30.0
    assert ticks_to(falling, 8.0) == 30.0, "nothing is known before the first smoothed loss"
    assert ticks_to(falling, 2.9) is None


def test_one_outlier_does_not_reach_the_target() -> None:
    assert ticks_to(points(9.0, 9.0, 9.0, 3.0, 9.0), 6.5) is None
    assert min(loss for _, loss in smoothed_losses(points(9.0, 9.0, 9.0, 3.0, 9.0))) == 7.0


def test_loss_at_is_the_last_one_not_after_a_tick() -> None:
    falling = points(9.0, 6.0, 3.0, 0.0)
    assert [loss_at(falling, tick) for tick in (30, 39, 40, 99)] == [6.0, 6.0, 3.0, 3.0]
    with pytest.raises(ValueError, match="no smoothed validation by tick 29"):
        loss_at(falling, 29)


@given(LOSSES, st.floats(0, 11), st.floats(0, 11))
def test_a_harder_target_is_not_reached_earlier(losses: list[float], one: float, other: float) -> None:
    hard, easy = (ticks_to(points(*losses), target) for target in sorted((one, other)))
    if hard is not None:
        assert easy is not None and easy <= hard


@given(LOSSES, st.floats(0, 5))
def test_a_better_course_is_not_later(losses: list[float], better: float) -> None:
    target = 4.0
    before = ticks_to(points(*losses), target)
    after = ticks_to(points(*(loss - better for loss in losses)), target)
    if before is not None:
        assert after is not None and after <= before + 1e-9


@given(LOSSES)
def test_every_smoothed_loss_is_reached_no_later_than_validated(losses: list[float]) -> None:
    known = smoothed_losses(points(*losses))
    for tick, loss in known:
        reached = ticks_to(points(*losses), loss)
        assert reached is not None and known[0][0] <= reached <= tick


def scored(own: ArmCourse, step_s: float = 36.0, target_at: float = 0.8) -> ArmRun:
    free = course(9.0, 7.0, 5.0, 3.0, 1.0)  # smoothed: 7 at 30, 5 at 40, 3 at 50
    (run,) = score({7: free}, {7: own}, (clock(), clock(step_s)), {7: "d"}, target_at, 2.0)
    return run


def test_the_ratio_of_the_fault_free_arm_is_one() -> None:
    run = scored(course(9.0, 7.0, 5.0, 3.0, 1.0))
    assert (run.target, run.ticks, run.ratio, run.hours_ratio) == (5.0, 40.0, 1.0, 1.0)
    assert run.hours == pytest.approx(40 * 36 / 3600)
    assert (run.final, run.failures, run.saves, run.steps_lost, run.stopped) == (3.0, 0, 0, 0, "")


def test_time_and_failures_count_until_the_target_only() -> None:
    own = course(
        9.0, 8.0, 7.0, 6.0, 5.0, 4.0,  # smoothed: 8, 7, 6, 5 at ticks 30 … 60
        met=[met(15, moved=1000), met(25, rolled_back=True, lost=5), met(60, rolled_back=True, lost=10)],
        saved=[20, 60],
    )  # fmt: skip
    run = scored(own, step_s=72.0)
    assert (run.ticks, run.ratio) == (60.0, 1.5)
    assert (run.failures, run.saves, run.steps_lost) == (2, 2, 15)
    donated, loaded = 36 + 60 + 2.0 * 1000 / 100, 36 + 60 + 180
    assert run.hours == pytest.approx((60 * 72 + 2 * 360 + donated + loaded) / 3600)
    assert run.hours_ratio == pytest.approx((run.hours or 0) / 0.4)


def test_an_arm_that_missed_the_target_counts_everything_and_has_no_times() -> None:
    own = course(9.0, 9.0, 9.0, 9.0, met=[met(35)], saved=[40], stopped="tick 40: no")
    run = scored(own)
    assert (run.ticks, run.hours, run.ratio, run.hours_ratio) == (None, None, None, None)
    assert (run.failures, run.saves, run.final, run.stopped) == (1, 1, 9.0, "tick 40: no")


def test_an_arm_may_stop_before_it_has_a_loss() -> None:
    assert scored(course(9.0, 9.0, stopped="tick 25: no")).final is None


def test_without_prices_there_are_no_hours_and_no_ratio_of_hours() -> None:
    free = course(9.0, 7.0, 5.0)
    still = ArmClock(0.0, 0.0, 0.0, 0.0, 0.0, math.inf)
    (run,) = score({1: free}, {1: free}, (still, still), {1: "d"}, 1.0, 1.0)
    assert (run.hours, run.hours_ratio, run.ratio) == (0.0, None, 1.0)


def test_a_curve_jumps_where_time_was_lost() -> None:
    own = course(9.0, 7.0, 5.0, 3.0, met=[met(35, rolled_back=True)], saved=[30])
    recovery = 18 + 60 + 180
    (before, high), (after, low) = curve(own, clock(), 2.0)
    assert (high, low) == (7.0, 5.0)
    assert before == pytest.approx((30 * 36 + 360) / 3600)
    assert after == pytest.approx((40 * 36 + 360 + recovery) / 3600)


@given(LOSSES, st.lists(st.integers(1, 300), max_size=8), st.lists(st.integers(1, 300), max_size=8))
def test_time_is_monotonic(losses: list[float], struck: list[int], saved: list[int]) -> None:
    own = course(*losses, met=[met(tick, moved=100) for tick in sorted(struck)], saved=sorted(saved))
    hours = [at for at, _ in curve(own, clock(), 1.0)]
    assert all(a < b for a, b in itertools.pairwise(hours))


def arm(name: str, *hours: float | None) -> ArmScore:
    run = scored(course(9.0, 7.0, 5.0, 3.0, 1.0))
    return arm_score(name, *(run.model_copy(update={"hours": h, "ticks": h and run.ticks}) for h in hours))


def test_arms_are_ranked_after_the_first_by_misses_and_hours() -> None:
    arms = [arm("free", 9.0, 9.0), arm("never", None, None), arm("slow", 5.0, 5.0), arm("once", None, 1.0),
            arm("quick", 1.0, 8.0)]  # fmt: skip
    assert [a.name for a in results(*arms).ranked()] == ["free", "quick", "slow", "once", "never"]
