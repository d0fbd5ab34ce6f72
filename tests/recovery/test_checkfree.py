"""CheckFree: donors, weights, moments, and refused stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.models.optimizers.adamw import KEYS
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


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_merge_weighs_by_omega(omega_before: float, omega_after: float) -> None:
    before, after = weights(1), weights(2)
    merged = merge(before, after, omega_before, omega_after)
    for name in before:
        wide = omega_before * before[name].double() + omega_after * after[name].double()
        torch.testing.assert_close(merged[name].double(), wide / (omega_before + omega_after), rtol=1e-6, atol=1e-6)


@given(st.floats(1e-30, 1e30))
def test_equal_omegas_give_exactly_the_mean(omega: float) -> None:
    before, after = weights(1), weights(2)
    assert_same(merge(before, after, omega, omega), {n: 0.5 * before[n] + 0.5 * after[n] for n in before})


def test_a_neighbour_with_zero_gradient_has_no_weight() -> None:
    assert_same(merge(weights(1), weights(2), 0.0, 2.0), {n: 0.0 + t for n, t in weights(2).items()})


@pytest.mark.parametrize("omegas", [(0.0, 0.0), (-1.0, 2.0), (2.0, -1.0)])
def test_merge_refuses_invalid_omegas(omegas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        merge(weights(1), weights(2), *omegas)


def test_merge_refuses_neighbours_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"differ in parameters: \['b'\]"):
        merge(weights(1), {"a": weights(2)["a"]}, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"a is \[7\] in one neighbour, \[1\] in the other"):
        merge(weights(1), weights(2) | {"a": torch.zeros(1)}, 1.0, 1.0)


def moment(of: StageState, place: str) -> dict[str, torch.Tensor]:
    return {name: pair[place] for name, pair in of.moments.items()}


def test_moments_with_equal_clocks_have_the_weighted_mean_bit_for_bit() -> None:
    before, after = state(1, updates=7), state(2, updates=7)
    merged, clocks = merge_moments(before, after, (3.0, 1.0), INPUTS.decays)
    assert clocks == dict.fromkeys(merged, 7)
    for place in KEYS:
        expected = merge(moment(before, place), moment(after, place), 3.0, 1.0)
        assert_same({name: pair[place] for name, pair in merged.items()}, expected)


def test_every_parameter_has_its_own_clock() -> None:
    before, after = state(1, updates=9), state(2, updates=4)
    mixed = replace(before, clocks={"a": 2, "b": 9})
    merged, clocks = merge_moments(mixed, after, (1.0, 3.0), INPUTS.decays)
    assert clocks == {"a": 4, "b": 9}
    young = merge_moments(state(1, updates=2), after, (1.0, 3.0), INPUTS.decays)[0]
    old = merge_moments(before, after, (1.0, 3.0), INPUTS.decays)[0]
    for place in KEYS:
        assert torch.equal(merged["a"][place], young["a"][place]) and torch.equal(merged["b"][place], old["b"][place])


def test_a_tensor_without_decay_has_the_weighted_mean_for_any_clock() -> None:
    """Such as the momentum of SGD, which has no bias correction."""
    old, young = (
        StageState(weights(n), {name: {"momentum_buffer": t} for name, t in weights(n + 5).items()}, {"a": n, "b": 3})
        for n in (1, 9)
    )
    merged, clocks = merge_moments(old, young, (3.0, 1.0), {})
    assert clocks == {"a": 9, "b": 3}
    assert_same(moment(StageState({}, merged), "momentum_buffer"), merge(weights(6), weights(14), 3.0, 1.0))


def test_moments_of_other_parameters_are_refused() -> None:
    other = state(2, shapes={"c": torch.Size([3])})
    with pytest.raises(ValueError, match="differ in parameters"):
        merge_moments(state(1), other, (1.0, 1.0), INPUTS.decays)


omegas = st.floats(1e-3, 1e3)
betas = st.floats(0, 0.9999)


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.tuples(omegas, omegas), st.tuples(betas, betas))
def test_moments_match_a_float64_reference(
    t_before: int, t_after: int, omega: tuple[float, float], beta: tuple[float, float]
) -> None:
    before, after = state(1, updates=t_before), state(2, updates=t_after)
    decays = dict(zip(KEYS, beta, strict=True))
    merged, clocks = merge_moments(before, after, omega, decays)
    assert set(clocks.values()) == {max(t_before, t_after)}
    share = omega[0] / sum(omega)
    for name, place in product(merged, KEYS):
        sides = [s.moments[name][place].double() / (1 - decays[place] ** s.clocks[name]) for s in (before, after)]
        wide = (share * sides[0] + (1 - share) * sides[1]) * (1 - decays[place] ** clocks[name])
        scale = wide.abs().max().item()
        torch.testing.assert_close(merged[name][place].double(), wide, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize(("one", "other"), [(0, 3), (3, 0), (0, 0)])
def test_without_moments_at_both_neighbours_there_are_none(one: int, other: int) -> None:
    assert merge_moments(state(1, updates=one), state(2, updates=other), (1.0, 1.0), INPUTS.decays) == ({}, {})
