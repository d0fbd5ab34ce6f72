from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.config import RecoveryConfig
from planaria.errors import UserError
from planaria.recovery import recovery
from planaria.recovery.base import Donor, Unrecoverable
from planaria.recovery.checkfree import CheckFree, merge


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_merge_is_the_formula() -> None:
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


def test_a_neighbour_without_gradient_weighs_nothing() -> None:
    assert_same(merge(weights(1), weights(2), 0.0, 2.0), {n: 0.0 + t for n, t in weights(2).items()})


def test_merge_leaves_its_arguments_alone() -> None:
    before, after = weights(1), weights(2)
    for tensor in merge(before, after, 1.0, 1.0).values():
        tensor.zero_()
    assert_same(before, weights(1))
    assert_same(after, weights(2))


@pytest.mark.parametrize("omegas", [(0.0, 0.0), (-1.0, 2.0), (2.0, -1.0)])
def test_merge_refuses_weights_that_are_none(omegas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        merge(weights(1), weights(2), *omegas)


def test_merge_refuses_neighbours_of_another_make() -> None:
    with pytest.raises(ValueError, match=r"differ in parameters: \['b'\]"):
        merge(weights(1), {"a": weights(2)["a"]}, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"b is \[7\] in one neighbour, \[1\] in the other"):
        merge(weights(1), weights(2) | {"b": torch.zeros(1)}, 1.0, 1.0)


@pytest.mark.parametrize(
    ("omega", "measured", "share"),
    [
        # Norms before clipping are 3 and 1, after it 2 and 2/3.
        ("l2sq", "preclip", 9 / 10),
        ("l2", "preclip", 3 / 4),
        ("l2sq", "postclip", 4 / 5),
        ("l2", "postclip", 2 / 3),
    ],
)
def test_omega_is_measured_as_the_recipe_says(omega: str, measured: str, share: float) -> None:
    strategy = recovery(RecoveryConfig.model_validate({"omega": omega, "measured": measured}))
    donors = {2: Donor(weights(1), 3.0, 2.0), 4: Donor(weights(2), 1.0, 1.0)}
    expected = {name: share * weights(1)[name] + (1.0 - share) * weights(2)[name] for name in weights(1)}
    assert_same(strategy.rebuild(3, donors), expected)


@pytest.mark.parametrize("norms", [(None, 1.0), (1.0, None), (None, None), (0.0, 0.0)])
@pytest.mark.parametrize("measured", ["preclip", "postclip"])
def test_without_gradients_it_is_the_plain_mean(norms: tuple[float | None, float | None], measured: str) -> None:
    strategy = recovery(RecoveryConfig.model_validate({"measured": measured}))
    donors = {1: Donor(weights(1), norms[0], norms[0]), 3: Donor(weights(2), norms[1], norms[1])}
    assert_same(strategy.rebuild(2, donors), {n: 0.5 * weights(1)[n] + 0.5 * weights(2)[n] for n in weights(1)})


def test_the_recipe_chooses_the_learning_rate_scale() -> None:
    assert recovery(RecoveryConfig()).lr_scale == 1.1
    assert recovery(RecoveryConfig(lr_scale=1.5)).lr_scale == 1.5


def test_middle_stages_are_rebuilt_from_both_neighbours() -> None:
    assert CheckFree().donors(frozenset({2}), 4) == {2: (1, 3)}
    assert CheckFree().donors(frozenset({3, 5}), 6) == {3: (2, 4), 5: (4, 6)}
    assert CheckFree().donors(frozenset(), 4) == {}


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ({0}, ["the ends worker (stage 0)"]),
        ({1}, ["stage 1 is the first block stage"]),
        ({6}, ["stage 6 is the last block stage"]),
        ({2, 3}, ["stages 2 and 3 are adjacent"]),
        ({2, 3, 4}, ["stages 2 and 3 are adjacent", "stages 3 and 4 are adjacent"]),
        ({0, 1, 3, 6}, ["ends worker", "stage 1 is the first", "stage 6 is the last"]),
    ],
)
def test_what_is_out_of_reach_is_named(lost: set[int], named: list[str]) -> None:
    answer = CheckFree().donors(frozenset(lost), 6)
    assert isinstance(answer, Unrecoverable)
    assert answer.stages == tuple(sorted(lost))
    assert all(name in answer.reason for name in named)
    assert "\n" not in answer.reason


@given(st.data(), st.integers(1, 9))
def test_donors_are_living_neighbours_or_there_are_none(data: st.DataObject, stages: int) -> None:
    lost = data.draw(st.frozensets(st.integers(0, stages)))
    answer = CheckFree().donors(lost, stages)
    in_reach = all(1 < s < stages for s in lost) and all(b - a > 1 for a, b in pairwise(sorted(lost)))
    if in_reach:
        assert answer == {s: (s - 1, s + 1) for s in lost}
        assert not {d for helpers in answer.values() for d in helpers} & lost
    else:
        assert isinstance(answer, Unrecoverable)
        assert set(answer.stages) == lost


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'chekfree': no such strategy; did you mean 'checkfree'\?"):
        recovery(RecoveryConfig(strategy="chekfree"))
