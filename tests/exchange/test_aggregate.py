"""Aggregators: the mean of members' values, and the aggregator that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from benchmarks.exchange_in_process import exchange_once, replicas
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig
from planaria.exchange.aggregate import (
    AGGREGATORS,
    Aggregator,
    clipped_mean_over_senders,
    equal_weights,
    mean,
    mean_over_senders,
    rda,
)
from planaria.exchange.base import Weights
from planaria.exchange.registry import make_exchange
from support.lab_models import SHAPES, apart, distance, drift, fitting, have, make, weights


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
    found = mean(values, equal_weights(values))
    for name in SHAPES:
        total = values[0][name].clone()
        for i in range(1, count):
            total += values[i][name]
        assert torch.equal(found[name], total / count), "to the last bit"


def vectors(*rows: list[float]) -> dict[int, Weights]:
    return {member: {"w": torch.tensor(row)} for member, row in enumerate(rows)}


def norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 99))
def test_rda_follows_its_formula(shares: list[int], seed: int) -> None:
    values = {3 * i: weights(100 * seed + i) for i in range(len(shares))}
    before = {member: {name: tensor.clone() for name, tensor in value.items()} for member, value in values.items()}
    counts = {3 * i: share / 4 for i, share in enumerate(shares)}
    found = rda(values, counts)
    for name in SHAPES:
        exact = {member: value[name].double() for member, value in values.items()}
        unit = torch.stack([counts[member] * each / norm(each) for member, each in exact.items()]).sum(0)
        radius = sum(counts[member] * norm(each) for member, each in exact.items()) / sum(counts.values())
        expected = radius * unit / norm(unit) if norm(unit) > 1e-6 else torch.zeros_like(unit)
        assert torch.allclose(found[name].double(), expected, rtol=1e-5, atol=1e-6)
    assert all(distance(values[member], before[member]) == 0 for member in values), "its arguments are unchanged"


@given(st.integers(1, 7), st.integers(0, 99), st.floats(1e-6, 1e6))
def test_rda_of_equal_vectors_is_the_vector(count: int, seed: int, weight: float) -> None:
    values = dict.fromkeys(range(count), weights(seed))
    assert distance(rda(values, dict.fromkeys(values, weight)), values[0]) == 0, "to the last bit"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0.5**0.5, 0.5**0.5]),
        ([[3.0, 0.0], [0.0, 1.0]], [2**0.5, 2**0.5]),
        ([[0.0, 0.0], [0.0, 4.0]], [0.0, 2.0]),
        ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]),
        ([[0.1, 0.3], [-0.2, -0.6]], [0.0, 0.0]),
        ([[1e-40, 0.0], [1e-40, 0.0]], [1e-40, 0.0]),
        ([[3e38, 3e38], [3e38, 3e38]], [3e38, 3e38]),
    ],
    ids=["orthogonal", "of unequal norms", "one zero", "zeros", "opposite", "subnormal", "huge"],
)
def test_rda_matches_a_manual_example(rows: list[list[float]], expected: list[float]) -> None:
    found = rda(vectors(*rows), {0: 2.5, 1: 2.5})["w"]
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-45)


@given(st.integers(2, 6), st.integers(0, 99), st.sampled_from([2.0**-40, 0.3, 1.0, 7.0, 2.0**40]))
def test_rda_is_scale_equivariant_keeps_the_mean_norm_and_ignores_the_order(n: int, seed: int, scale: float) -> None:
    values = {i: {"w": weights(100 * seed + i)["layers.1.weight"]} for i in range(n)}
    found = rda(values, equal_weights(values))["w"]
    assert norm(found) == pytest.approx(sum(norm(value["w"]) for value in values.values()) / n, rel=1e-5)
    scaled = {i: {"w": scale * value["w"]} for i, value in values.items()}
    assert torch.allclose(rda(scaled, equal_weights(values))["w"], scale * found, rtol=1e-5, atol=1e-6 * scale)
    backwards = dict(reversed(values.items()))
    assert torch.allclose(rda(backwards, equal_weights(values))["w"], found, rtol=1e-5, atol=1e-6)
    twice = {2 * i + k: value for i, value in values.items() for k in range(1 + (i == 0))}
    assert torch.allclose(
        rda(values, {i: 1.0 + (i == 0) for i in values})["w"],
        rda(twice, equal_weights(twice))["w"],
        rtol=1e-5,
        atol=1e-6,
    ), "a weight of two is a member that counts twice"


def test_rda_of_embeddings_is_their_mean() -> None:
    values = {i: {"embed_tokens.weight": weights(i)["layers.0.weight"]} for i in range(3)}
    assert distance(rda(values, equal_weights(values)), mean(values, equal_weights(values))) == 0


def test_rda_does_not_depend_on_the_number_of_threads() -> None:
    values = {i: {"w": torch.randn(300_000, generator=torch.Generator().manual_seed(i))} for i in range(3)}
    found, threads = [], torch.get_num_threads()
    for count in (1, 4):
        torch.set_num_threads(count)
        found.append(rda(values, equal_weights(values)))
    torch.set_num_threads(threads)
    assert distance(*found) == 0


SENDERS = pytest.mark.parametrize("rule", [mean_over_senders, clipped_mean_over_senders])


@SENDERS
@given(count=st.integers(1, 7), seed=st.integers(0, 99), weight=st.sampled_from([1.0, 0.1, 3.0]))
def test_senders_and_mean_agree_on_equal_updates(rule: Aggregator, count: int, seed: int, weight: float) -> None:
    values = dict.fromkeys(range(count), weights(seed))
    counts = dict.fromkeys(values, weight)
    found, plain = rule(values, counts), mean(values, counts)
    assert all(torch.allclose(found[name], plain[name], rtol=1e-6, atol=0) for name in SHAPES)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 99), st.floats(0, 1))
def test_senders_divide_by_the_weights_of_those_that_sent(shares: list[int], seed: int, density: float) -> None:
    generator, values = torch.Generator().manual_seed(seed), {}
    for i in range(len(shares)):
        sparse = weights(100 * seed + i)
        values[i] = {n: t * (torch.rand(t.shape, generator=generator) < density) for n, t in sparse.items()}
    before = {member: {name: tensor.clone() for name, tensor in value.items()} for member, value in values.items()}
    counts = dict(enumerate(map(float, shares)))
    found = mean_over_senders(values, counts)
    for name in SHAPES:
        total = sum(counts[i] * value[name].double() for i, value in values.items())
        sent = sum(counts[i] * (value[name] != 0).double() for i, value in values.items())
        expected = torch.where(sent > 0, total / sent, torch.zeros_like(total))
        assert torch.allclose(found[name].double(), expected, rtol=1e-5, atol=1e-5)
        assert not found[name][sent == 0].any()
    assert all(distance(values[i], before[i]) == 0 for i in values), "its arguments are unchanged"


@pytest.mark.parametrize(
    ("rows", "expected", "clipped"),
    [
        ([[3.0, 0.0, 0.0], [0.0, 6.0, 0.0], [0.0, 3.0, 0.0]], [3.0, 4.5, 0.0], [3.0, 3.0, 0.0]),
        ([[100.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [50.5, 1.0, 0.0], [1.0, 1.0, 0.0]),
        ([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]], [5.0, 0.0, 0.0], [5.0, 0.0, 0.0]),
        ([[0.0, 0.0, 0.0]] * 3, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ],
    ids=["disjoint", "a hundredfold update", "one sender", "zeros"],
)
def test_senders_match_a_manual_example(rows: list[list[float]], expected: list[float], clipped: list[float]) -> None:
    values = vectors(*rows)
    assert mean_over_senders(values, equal_weights(values))["w"].tolist() == pytest.approx(expected, rel=1e-6)
    assert clipped_mean_over_senders(values, equal_weights(values))["w"].tolist() == pytest.approx(clipped, rel=1e-6)


@pytest.mark.parametrize("name", ["senders", "clipped_senders"])
@pytest.mark.parametrize("kind", have("aggregator"))
def test_senders_are_refused_if_values_include_slow_weights(kind: str, name: str) -> None:
    if kind in ("allreduce", "diloco", "streaming_diloco", "decoupled", "eager"):
        assert make(kind, aggregator=name).aggregator == name
        return
    with pytest.raises(UserError, match=rf"^exchange\.options: aggregator = '{name}' treats zeros .*; use 'mean', or"):
        make(kind, aggregator=name)


@pytest.mark.parametrize("kind", ["diloco", "noloco"])
def test_rda_moves_replicas_further_than_the_mean(kind: str) -> None:
    """Independent drifts are nearly orthogonal, so their mean is shorter by √2 for two."""
    moved = []
    for name in ("mean", "rda"):
        made = make(kind, aggregator=name, alpha=0.0)
        of = replicas(made, {"w": torch.zeros(2000)}, 2)
        for member, replica in of.items():
            replica.fast = {"w": torch.randn(2000, generator=torch.Generator().manual_seed(member))}
        exchange_once(made, of, 0, seed=5)
        assert distance(of[0].fast, of[1].fast) == 0
        moved.append(norm(of[0].fast["w"]))
    assert moved[1] / moved[0] == pytest.approx(2**0.5, rel=0.05)


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("kind", have("aggregator"))
def test_every_exchange_uses_its_recipes_aggregator(kind: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[int, ...], dict[int, float]]] = []

    def half(values: Mapping[int, Weights], counts: Mapping[int, float]) -> dict[str, torch.Tensor]:
        calls.append((tuple(values), dict(counts)))
        return {name: tensor / 2 for name, tensor in mean(values, counts).items()}

    monkeypatch.setitem(AGGREGATORS, "half", half)
    plain, changed = (fitting(kind, bits=bits, byzantine=0, aggregator=name) for name in ("mean", "half"))
    one, other = apart(plain, 4), apart(changed, 4)
    for made, of in ((plain, one), (changed, other)):
        drift(of, 1)
        exchange_once(made, of, 0, seed=5)
    groups = plain.groups(0, range(4), 5)
    assert sorted(calls) == sorted((group, dict.fromkeys(group, 1.0)) for group in groups for _ in group)
    assert all(distance(one[i].fast, other[i].fast) > 1e-3 for i in one)


def test_an_aggregator_beside_a_robust_rule_is_refused() -> None:
    setting = {"kind": "diloco", "replicas": 3, "options": {"aggregator": "rda"}, "robust": "median"}
    with pytest.raises(UserError, match=r"exchange\.robust replaces exchange\.options\.aggregator = 'rda'; remove one"):
        make_exchange(ExchangeConfig.model_validate(setting))


@pytest.mark.parametrize("name", ["rda", "senders"])
def test_estimates_need_the_mean(name: str) -> None:
    setting = {"options": {"aggregator": name}, "compress": "econtrol:top1%"}
    with pytest.raises(UserError, match=rf"exchange\.options\.aggregator = '{name}': .* use 'mean', or ef14$"):
        make_exchange(ExchangeConfig.model_validate(setting))


def test_an_unknown_aggregator_is_named_with_the_nearest() -> None:
    complaint = r"^exchange\.options\.aggregator = 'maen': no such aggregator; did you mean 'mean'\?$"
    for kind in have("aggregator"):
        with pytest.raises(UserError, match=complaint):
            make(kind, aggregator="maen")
