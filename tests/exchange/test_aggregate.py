"""Aggregators: the mean of members' values, and the aggregator that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab_models import SHAPES, apart, distance, drift, fitting, have, make, weights

from planaria.common.errors import UserError
from planaria.exchange.aggregate import AGGREGATORS, equal, mean
from planaria.exchange.base import Weights
from planaria.exchange.in_process import exchange_once


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 99))
def test_the_mean_follows_its_formula(shares: list[int], seed: int) -> None:
    values = {3 * i: weights(100 * seed + i) for i in range(len(shares))}
    before = {member: {name: tensor.clone() for name, tensor in value.items()} for member, value in values.items()}
    counts = {3 * i: share / 4 for i, share in enumerate(shares)}
    found = mean(values, counts)
    for name in SHAPES:
        exact = sum(counts[member] * value[name].double() for member, value in values.items()) / sum(counts.values())
        assert torch.allclose(found[name].double(), torch.as_tensor(exact), rtol=1e-5, atol=1e-6)
    assert all(distance(values[member], before[member]) == 0 for member in values), "its arguments are unchanged"


@given(st.integers(1, 7), st.integers(0, 99))
def test_equal_members_are_summed_in_order_and_divided_once(count: int, seed: int) -> None:
    values = {i: weights(100 * seed + i) for i in range(count)}
    found = mean(values, equal(values))
    for name in SHAPES:
        total = values[0][name].clone()
        for i in range(1, count):
            total += values[i][name]
        assert torch.equal(found[name], total / count), "to the last bit"


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("kind", have("aggregator"))
def test_every_exchange_uses_its_recipes_aggregator(kind: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], dict[int, float]]] = []

    def half(values: Mapping[int, Weights], counts: Mapping[int, float]) -> dict[str, torch.Tensor]:
        asked.append((tuple(values), dict(counts)))
        return {name: tensor / 2 for name, tensor in mean(values, counts).items()}

    monkeypatch.setitem(AGGREGATORS, "half", half)
    plain, changed = (fitting(kind, bits=bits, byzantine=0, aggregator=name) for name in ("mean", "half"))
    one, other = apart(plain, 4), apart(changed, 4)
    for made, of in ((plain, one), (changed, other)):
        drift(of, 1)
        exchange_once(made, of, 0, seed=5)
    groups = plain.groups(0, range(4), 5)
    assert sorted(asked) == sorted((group, dict.fromkeys(group, 1.0)) for group in groups for _ in group)
    assert all(distance(one[i].fast, other[i].fast) > 1e-3 for i in one)


def test_an_unknown_aggregator_is_named_with_the_nearest() -> None:
    complaint = r"^exchange\.options\.aggregator = 'maen': no such aggregator; did you mean 'mean'\?$"
    for kind in have("aggregator"):
        with pytest.raises(UserError, match=complaint):
            make(kind, aggregator="maen")
