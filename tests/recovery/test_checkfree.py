"""CheckFree: donors, weights, moments, and refused stages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.models.state import StageState
from planaria.recovery.checkfree import CheckFree, NeighbourMean, merge, merge_moments
from support.stage_states import INPUTS, assert_same, assert_same_state, replica, state, weights


def checkfree(**fields: Any) -> CheckFree:
    return CheckFree.model_validate(fields)


def donor(seed: int, preclip: float | None, postclip: float | None) -> StageState:
    return StageState(weights(seed), grad_norm=preclip, clipped_norm=postclip)


@pytest.mark.parametrize(
    ("omega", "measured", "share"),
    [
        # Norms before clipping are 3 and 1, after it 2 and 1.
        ("l2sq", "preclip", 9 / 10),
        ("l2", "preclip", 3 / 4),
        ("l2sq", "postclip", 4 / 5),
        ("l2", "postclip", 2 / 3),
    ],
)
def test_omega_follows_the_recipe(omega: str, measured: str, share: float) -> None:
    strategy = checkfree(omega=omega, measured=measured)
    rebuilt = strategy.rebuild(3, {2: donor(1, 3.0, 2.0), 4: donor(2, 1.0, 1.0)}, INPUTS)
    expected = {name: share * weights(1)[name] + (1.0 - share) * weights(2)[name] for name in weights(1)}
    assert_same(rebuilt.weights, expected)


@pytest.mark.parametrize("norms", [(None, 1.0), (1.0, None), (None, None), (0.0, 0.0)])
@pytest.mark.parametrize("measured", ["preclip", "postclip"])
def test_without_gradients_the_mean_is_plain(norms: tuple[float | None, float | None], measured: str) -> None:
    donors = {1: donor(1, norms[0], norms[0]), 3: donor(2, norms[1], norms[1])}
    rebuilt = checkfree(measured=measured).rebuild(2, donors, INPUTS)
    assert_same(rebuilt.weights, {n: 0.5 * weights(1)[n] + 0.5 * weights(2)[n] for n in weights(1)})


def test_uniform_weighs_both_neighbours_equally() -> None:
    rebuilt = NeighbourMean().rebuild(2, {1: donor(1, 9.0, 1.0), 3: donor(2, 1.0, 1.0)}, INPUTS)
    assert_same(rebuilt.weights, {n: 0.5 * weights(1)[n] + 0.5 * weights(2)[n] for n in weights(1)})


def test_the_order_of_donors_does_not_matter() -> None:
    one, other = donor(1, 3.0, 2.0), donor(2, 1.0, 1.0)
    assert_same_state(
        checkfree().rebuild(2, {1: one, 3: other}, INPUTS), checkfree().rebuild(2, {3: other, 1: one}, INPUTS)
    )


def test_a_rebuilt_stage_has_a_higher_learning_rate_and_no_norms() -> None:
    donors = {1: state(1), 3: state(2)}
    assert checkfree().rebuild(2, donors, INPUTS).lr_scale == 1.1
    rebuilt = checkfree(lr_scale=1.5).rebuild(2, donors, INPUTS)
    assert (rebuilt.lr_scale, rebuilt.grad_norm, rebuilt.clipped_norm) == (1.5, None, None)


# Moments


def rebuilt_as_given(moments: str, before: StageState, after: StageState) -> StageState:
    """Rebuild stage 2 from its neighbours."""
    strategy = checkfree(moments=moments)
    given = {stage: strategy.donate(2, own, {}) for stage, own in ((1, before), (3, after))}
    assert all(bool(each.moments) == (moments != "fresh") for each in given.values()), "moments are sent only if used"
    return strategy.rebuild(2, given, INPUTS)


def test_fresh_moments_reset_the_clock() -> None:
    found = rebuilt_as_given("fresh", state(1, updates=9), state(2, updates=4))
    assert (found.moments, found.clocks) == ({}, {})


def test_mean_moments_are_weighted_like_the_weights() -> None:
    before, after = state(1, updates=9), state(2, updates=4)  # norms 1.5 and 2.5
    found = rebuilt_as_given("mean", before, after)
    omegas = (1.5**2, 2.5**2)
    moments, clocks = merge_moments(before, after, omegas, INPUTS.decays)
    expected = StageState(merge(before.weights, after.weights, *omegas), moments, clocks, lr_scale=1.1)
    assert_same_state(found, expected)
    assert found.clocks == {"a": 9, "b": 9}


def test_copied_moments_are_the_previous_stages() -> None:
    before, after = state(1, updates=9), state(2, updates=4)
    found = rebuilt_as_given("copy", before, after)
    assert_same_state(
        StageState(found.weights, found.moments, found.clocks),
        StageState(merge(before.weights, after.weights, 1.5**2, 2.5**2), before.moments, before.clocks),
    )


def test_no_steps_or_copies_are_needed() -> None:
    answer = CheckFree().donors(frozenset({2}), replica(4, age=0))
    assert (answer.donors, answer.refused, answer.rollback) == ({2: (1, 3)}, {}, None)
    assert CheckFree().copies(4) == ()


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ({0}, {0: "the ends worker (stage 0)"}),
        ({1}, {1: "stage 1 is the first block stage"}),
        ({6}, {6: "stage 6 is the last block stage"}),
        ({2, 3}, {2: "stages 2 and 3 are adjacent", 3: "stages 3 and 2 are adjacent"}),
        ({2, 3, 4}, {2: "stages 2 and 3", 3: "stages 3 and 2", 4: "stages 4 and 3"}),
        ({0, 1, 3, 6}, {0: "ends worker", 1: "stage 1 is the first", 6: "stage 6 is the last"}),
        ({1, 2}, {1: "stage 1 is the first", 2: "stages 2 and 1 are adjacent"}),
    ],
)
def test_unrecoverable_stages_are_refused(lost: set[int], named: dict[int, str]) -> None:
    refused = CheckFree().donors(frozenset(lost), replica(6)).refused
    assert refused.keys() == named.keys()
    for stage, clause in named.items():
        assert clause in refused[stage] and "\n" not in refused[stage]


@given(st.data(), st.integers(1, 9))
def test_each_lost_stage_has_two_live_neighbours_or_is_refused(data: st.DataObject, stages: int) -> None:
    lost = data.draw(st.frozensets(st.integers(0, stages)))
    answer = CheckFree().donors(lost, replica(stages))
    reachable = {s for s in lost if 1 < s < stages and not lost & {s - 1, s + 1}}
    assert answer.donors == {s: (s - 1, s + 1) for s in reachable}
    assert answer.refused.keys() == lost - reachable
