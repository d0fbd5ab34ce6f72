"""The bound on what one peer can do to the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.learning.influence import masses, parts, pulls, scales

weight = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
weights = st.lists(st.tuples(st.sampled_from("abcdefg"), weight), max_size=30)
shares = st.one_of(st.sampled_from([1 / 2, 1 / 3, 1 / 4, 1.0]), st.floats(0.01, 1.0))


def scaled(weighed: list[tuple[str, float]], share: float) -> list[tuple[str, float]]:
    factors = scales(weighed, share)
    return [(peer, value * factors.get(peer, 1.0)) for peer, value in weighed]


@given(weights, shares)
def test_nobody_has_more_than_its_share_or_an_equal_part(weighed: list[tuple[str, float]], share: float) -> None:
    after = masses(scaled(weighed, share))
    bound = max(share, 1 / max(1, len(after)))
    assert all(value <= bound * sum(after.values()) * (1 + 1e-6) for value in after.values())


@given(weights, shares)
def test_nobody_who_stays_below_the_bound_is_scaled_and_nobody_grows(
    weighed: list[tuple[str, float]], share: float
) -> None:
    factors, after = scales(weighed, share), masses(scaled(weighed, share))
    bound = max(share, 1 / max(1, len(after)))
    for peer, factor in factors.items():
        assert 0 < factor <= 1
        if after[peer] < bound * sum(after.values()) * (1 - 1e-6):
            assert factor == 1


@given(weights, shares)
def test_bounding_twice_is_bounding_once(weighed: list[tuple[str, float]], share: float) -> None:
    again = scales(scaled(weighed, share), share)
    assert all(factor == pytest.approx(1, rel=1e-6) for factor in again.values())


@given(weights, shares)
def test_peers_without_weight_are_nobody(weighed: list[tuple[str, float]], share: float) -> None:
    assert scales([*weighed, ("silent", 0.0)], share) == scales(weighed, share)


def test_one_peer_alone_keeps_everything_and_nobody_is_nothing() -> None:
    assert scales([("a", 3.0), ("a", 1.0)], 0.4) == {"a": 1.0}
    assert scales([], 0.4) == scales([("a", 0.0)], 0.4) == {}


def test_a_loud_peer_is_scaled_to_its_share() -> None:
    # x / (x + 20) = 0.4
    assert scales([("loud", 100.0), ("b", 10.0), ("c", 10.0)], 0.4)["loud"] * 100 == pytest.approx(40 / 3)


def test_whoever_comes_to_lie_above_the_bound_by_anothers_scaling_is_scaled_too() -> None:
    factors = scales([("a", 100.0), ("b", 50.0), ("c", 10.0)], 0.4)
    after = {"a": 100 * factors["a"], "b": 50 * factors["b"], "c": 10.0}
    assert after == pytest.approx({"a": 20, "b": 20, "c": 10}) and factors["c"] == 1


def test_a_share_below_an_equal_part_makes_all_equal() -> None:
    factors = scales([("a", 8.0), ("b", 4.0), ("c", 2.0)], 0.1)
    assert factors == pytest.approx({"a": 0.25, "b": 0.5, "c": 1.0})


@given(weights, shares)
def test_parts_are_of_one_whole_and_none_is_beyond_the_bound(weighed: list[tuple[str, float]], share: float) -> None:
    found = parts(weighed, scales(weighed, share))
    assert found.keys() == masses(weighed).keys()
    assert not found or sum(found.values()) == pytest.approx(1)
    assert all(part <= max(share, 1 / len(found)) * (1 + 1e-6) for part in found.values())


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 2))
def test_a_pull_is_half_the_gradient_at_the_logits(rows: list[list[float]], token: int) -> None:
    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)[:, token : token + 1]
    factors = torch.arange(1.0, len(rows) + 1, dtype=torch.float64)[:, None]
    (gradient,) = torch.autograd.grad((logp * factors).sum(), logits)
    leaf = logp.detach().requires_grad_()
    found = pulls((leaf * factors).sum(), leaf)
    torch.testing.assert_close(found, gradient.abs().sum(1) / 2, rtol=1e-9, atol=1e-12)


def test_padding_pulls_at_nothing() -> None:
    leaf = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    assert pulls(leaf[:, :1].sum(), leaf).tolist() == pytest.approx([1 - 0.36787944])
