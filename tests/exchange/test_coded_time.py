"""Gradient coding over time: patterns, rounds that close, replays by hand, and the choice of a scheme."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.exchange.coded.base import History, Scheme, Uncoded
from planaria.exchange.coded.choose import (
    always_slow_workers,
    candidate_schemes,
    choose,
    expected_seconds,
    reordered_profiles,
)
from planaria.exchange.coded.gc import GC
from planaria.exchange.coded.sgc import MSGC, SRSGC, bursty_throughout, is_arbitrary, is_bursty
from planaria.exchange.coded.simulate import FinishTimes, replay, time_round, uncoded_seconds, windows


def even(rounds: int, n: int, *slow: tuple[int, int, float]) -> FinishTimes:
    """Each worker takes 1 s for its 1/n, of which 0.2 s are fixed; (round, worker, times) are slow."""
    seconds = np.ones((rounds, n))
    for at, worker, times in slow:
        seconds[at, worker] = times
    return FinishTimes(seconds, 1 / n, 0.8 * n)


def lagging(rounds: int, n: int, seed: int, fixed: float = 0.2) -> FinishTimes:
    """One worker in ten is five times as slow in a round."""
    rng = np.random.default_rng(seed)
    return FinishTimes(np.where(rng.random((rounds, n)) < 0.1, 5.0, 1.0), 1 / n, (1 - fixed) * n)


# ---- patterns


@settings(max_examples=200)
@given(
    st.lists(st.frozensets(st.integers(0, 4), max_size=3), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 5)
)
def test_patterns_match_their_definitions(window: list[frozenset[int]], times: int, most: int) -> None:
    rounds = {who: [at for at, late in enumerate(window) if who in late] for who in range(5)}
    distinct = sum(bool(at) for at in rounds.values())
    assert is_bursty(window, times, most) == (
        distinct <= most and all(not at or at[-1] - at[0] < times for at in rounds.values())
    )
    assert is_arbitrary(window, times, most) == (distinct <= most and all(len(at) <= times for at in rounds.values()))


def test_every_window_counts() -> None:
    history: History = [frozenset(late) for late in ({1}, set(), {1}, {2})]
    assert bursty_throughout(history, 1, 2, 2) and not bursty_throughout(history, 1, 3, 2)
    assert not bursty_throughout(history, 1, 2, 1), "rounds 2 and 3"


# ---- rounds


@pytest.mark.parametrize(
    ("finish", "bears", "late", "ends"),
    [
        ([1.0, 1.5, 1.9, 1.2], 0, set(), 1.9),  # no worker is beyond 2 κ
        ([1.0, 1.5, 7.0, 1.2], 1, {2}, 2.0),  # the deadline
        ([1.0, 5.0, 7.0, 1.2], 1, {2}, 5.0),  # one is waited for
        ([1.0, 5.0, 7.0, 1.2], 0, set(), 7.0),
        ([1.0, 5.0, 7.0, 9.0], 3, {1, 2, 3}, 2.0),
    ],
)
def test_a_round_closes_at_its_deadline_or_later(finish: list[float], bears: int, late: set[int], ends: float) -> None:
    assert time_round(np.array(finish), range(4), 2.0, lambda who: len(who) <= bears) == (late, ends)


def test_replays_match_manual_examples() -> None:
    profile = even(6, 4, (1, 2, 5.0))
    assert replay(Uncoded(), profile, 6).rounds == pytest.approx((1, 5, 1, 1, 1, 1))
    double = 0.2 + 2 * 0.8
    found = replay(GC(stragglers=1), profile, 6)
    assert found.rounds == pytest.approx([double] * 6), "closed as soon as each group is there"
    assert found.history[1] >= {2} and found.work == pytest.approx(6 * 2 / 4)
    retried = replay(MSGC(burst=1, window=2, stragglers=4), profile, 6)
    assert retried.history[1] == {2} and retried.waits == 0
    assert retried.rounds == pytest.approx((1, 2, double, 1, 1, 1)), "round 2 retries; round 6 has nothing to do"
    full = replay(MSGC(burst=1, window=2, stragglers=4), profile, 6, published=True)
    assert full.rounds == pytest.approx((double, 2 * double, double, double, double, double))


def test_a_worker_that_stays_slow_is_waited_for_if_needed() -> None:
    profile = even(4, 4, *((at, 1, 5.0) for at in range(4)))
    found = replay(MSGC(burst=1, window=2, stragglers=2), profile, 4)
    assert found.waits == 2 and [bool(late) for late in found.history] == [True, False] * 2 + [True]
    times = FinishTimes(np.array([[1.0, 5.0, 1.0]]), 1 / 3, 2.4).finish_times(0, np.full(3, 2 / 3))
    assert times == pytest.approx([1.8, 9.0, 1.8])


def test_windows_are_replayed_step_by_step_and_barriers_take_the_slowest_worker() -> None:
    profile = even(8, 4, (0, 0, 5.0), (2, 1, 5.0), (5, 0, 3.0))
    assert windows(Uncoded(), profile, 4, 2) == pytest.approx([5 + 1 + 5 + 1, 1 + 3 + 1 + 1])
    assert uncoded_seconds(profile, 4, 2) == pytest.approx([8, 6]), "delays of two workers do not add up"
    scheme = MSGC(burst=1, window=2, stragglers=4)
    first = replay(scheme, profile, 4)
    assert windows(scheme, profile, 4, 2)[0] == pytest.approx(first.seconds)
    assert first.work == pytest.approx(4 / 4 + 2 / 16), "what two workers were late with is computed twice"


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_all_work_is_done_and_our_rule_waits_no_longer_than_the_published(seed: int) -> None:
    profile = lagging(40, 6, seed)
    for scheme in (MSGC(burst=1, window=3, stragglers=2), MSGC(burst=2, window=3, stragglers=1)):
        assert replay(scheme, profile, 40).work == pytest.approx(40 * scheme.load(6))
    ours, published = (replay(GC(stragglers=2), profile, 40, published=way).seconds for way in (False, True))
    assert ours <= published


# ---- the choice


def test_a_code_is_chosen_only_where_it_pays() -> None:
    quiet = choose(even(20, 6), max_delay=2)
    assert quiet.best.name == "none" and "no code saves" in quiet.why
    found = choose(lagging(40, 6, 1), max_delay=2)
    none = next(update for update in found.candidates if update.name == "none")
    assert found.best is found.candidates[0] and found.best.seconds < 0.9 * none.seconds and "saves" in found.why
    each = [expected_seconds(found.best.scheme, profile) for profile in reordered_profiles(lagging(40, 6, 1))]
    assert len(set(each)) > 1 and np.mean(each, axis=0) == pytest.approx((found.best.seconds, found.best.error))
    assert {update.name for update in found.candidates} == {"none", "gc", "srsgc", "msgc"}


def test_short_probes_of_equal_workers_are_replayed_in_several_orders() -> None:
    probe, long = lagging(40, 6, 1), lagging(400, 6, 1)
    unlike = FinishTimes(probe.seconds * np.where(np.arange(6) < 3, 1.6, 1.0), probe.load, probe.slope)
    assert [len(reordered_profiles(profile)) for profile in (probe, long, unlike)] == [4, 1, 1]
    for other in reordered_profiles(probe):
        assert sorted(map(tuple, other.seconds.T)) == sorted(map(tuple, probe.seconds.T)), "each has its own delays"
    assert not any(
        np.array_equal(a.seconds, b.seconds) for a, b in itertools.combinations(reordered_profiles(probe), 2)
    )


def test_steps_with_one_barrier_and_microbatches_limit_the_choice() -> None:
    assert choose(lagging(320, 6, 2), window=32, max_delay=1, microbatches=6).best.name == "none"
    found = choose(lagging(30, 6, 1), microbatches=6)
    assert all(update.microbatches == 6 for update in found.candidates) and len(found.candidates) > 2


def test_a_machine_that_is_always_slow_gets_no_code() -> None:
    seconds = np.ones((30, 6))
    seconds[:, 4] = 5.0
    profile = FinishTimes(seconds, 1 / 6, 0.8 * 6)
    found = choose(profile, max_delay=2)
    assert always_slow_workers(profile, 2.0) == found.always_slow == (4,)
    assert found.best.name == "none" and "replicas 4 are slow in most rounds, so coding does not pay" in found.why


def test_the_grid_has_valid_schemes_without_duplicates() -> None:
    for n in (4, 8, 16):
        found = [scheme for _, scheme in candidate_schemes(n)]
        assert len(set(map(repr, found))) == len(found)
        assert all(not scheme.why_unsupported(n) and scheme.delay() <= 3 for scheme in found)
        every = {
            (made.burst, made.spare()) for _, made in candidate_schemes(n, published=True) if isinstance(made, SRSGC)
        }
        assert sorted(every) == sorted((made.burst, made.spare()) for made in found if isinstance(made, SRSGC))
    few, many = (replay(SRSGC(burst=1, window=w, stragglers=1), lagging(40, 4, 3), 40) for w in (2, 3))
    assert few == many, "of equal B and s"


def test_all_schemes_agree_without_stragglers() -> None:
    profile, n = even(10, 6), 6
    for scheme in (Uncoded(), GC(), SRSGC(), MSGC(stragglers=n), MSGC()):
        assert isinstance(scheme, Scheme)
        work = 1 if isinstance(scheme, MSGC) and scheme.stragglers == n else scheme.load(n) * n
        assert replay(scheme, profile, 10).work == pytest.approx(10 * work / n)
