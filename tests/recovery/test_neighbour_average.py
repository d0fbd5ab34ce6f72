"""Weighted means of weights and optimizer moments."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageState
from planaria.recovery.checkfree import merge, merge_moments
from support.stage_states import INPUTS, assert_same, state, weights


def test_merge_follows_the_formula() -> None:
    before, after = weights(1), weights(2)
    merged = merge(before, after, 3.0, 1.0)  # 3/4 and 1/4 are exact: so is the result
    assert_same(merged, {name: 0.75 * before[name] + 0.25 * after[name] for name in before})


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


def test_merge_does_not_modify_its_arguments() -> None:
    before, after = weights(1), weights(2)
    for tensor in merge(before, after, 1.0, 1.0).values():
        tensor.zero_()
    assert_same(before, weights(1))
    assert_same(after, weights(2))


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


def test_moments_with_different_clocks_are_bias_corrected() -> None:
    """A neighbour rebuilt two updates ago has small moments because they started at zero."""
    steady = torch.full((4,), 2.0)
    moments = {
        t: {"a": dict(zip(KEYS, (steady * (1 - 0.9**t), steady**2 * (1 - 0.999**t)), strict=True))} for t in (500, 2)
    }
    old, young = (StageState({"a": steady}, moments[t], {"a": t}) for t in (500, 2))
    merged, clocks = merge_moments(old, young, (1.0, 5.0), INPUTS.decays)
    assert clocks == {"a": 500}
    torch.testing.assert_close(merged["a"][KEYS[0]] / (1 - 0.9**500), steady)
    torch.testing.assert_close(merged["a"][KEYS[1]] / (1 - 0.999**500), steady**2)


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


def test_moments_are_merged_into_new_memory() -> None:
    before, after = state(1), state(2)
    merged, _ = merge_moments(before, after, (1.0, 1.0), INPUTS.decays)
    for pair in merged.values():
        for tensor in pair.values():
            tensor.zero_()
    for place in KEYS:
        assert_same(moment(before, place), moment(state(1), place))
        assert_same(moment(after, place), moment(state(2), place))
