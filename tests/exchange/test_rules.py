"""The formula of each exchange, written out again, and the cases in which one equals another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from benchmarks.exchange_in_process import Replica, exchange_once, exchanged, replicas, settle
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.exchange.base import Exchange
from planaria.exchange.diloco import DiLoCo
from planaria.exchange.gasloc import Gasloc
from planaria.exchange.gossip import PairMean
from planaria.exchange.noloco import NoLoCo
from planaria.exchange.streaming_diloco import Streaming, fragments
from support.lab_models import SHAPES, apart, distance, drift, make, mean, weights

LETTERS = st.tuples(st.floats(0.0, 0.95), st.floats(0.1, 1.5), st.floats(0.05, 1.5))
Plain = dict[int, dict[str, Tensor]]


def run(made: Exchange, of: dict[int, Replica], rounds: int, drift_std: float = 0.1) -> dict[int, Replica]:
    for round in range(rounds):
        drift(of, round, drift_std)
        exchange_once(made, of, round, seed=5)
    return of


def equation_one(
    theta: Plain, phi: Plain, delta: Plain, groups: Sequence[tuple[int, ...]], letters: tuple[float, float, float]
) -> tuple[Plain, Plain]:
    """(1) and (2) as they are printed, in fp64: two tensors from each member."""
    alpha, beta, gamma = letters
    new_phi, new_delta = {}, {}
    for group in groups:
        n = len(group)
        for i in group:
            new_delta[i] = {
                k: alpha * delta[i][k]
                - beta / n * sum(phi[j][k] - theta[j][k] for j in group)
                - gamma * (phi[i][k] - sum(phi[j][k] for j in group) / n)
                for k in SHAPES
            }
            new_phi[i] = {k: phi[i][k] + new_delta[i][k] for k in SHAPES}
    return new_phi, new_delta


def double(of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in of.items()}


@pytest.mark.slow
@given(LETTERS, st.integers(1, 7), st.integers(2, 4), st.booleans())
def test_noloco_follows_equation_one_with_one_tensor_or_two_parts(
    letters: tuple[float, float, float], count: int, size: int, prefetch: bool
) -> None:
    alpha, beta, gamma = letters
    made = NoLoCo.model_construct(group=size, prefetch=prefetch, alpha=alpha, beta=beta, gamma=gamma)
    of = apart(made, count)
    phi = {i: double(r.outer["slow"]) for i, r in of.items()}
    delta = {i: double(r.outer["momentum"]) for i, r in of.items()}
    for round in range(3):
        drift(of, round)
        theta = {i: double(r.fast) for i, r in of.items()}
        phi, delta = equation_one(theta, phi, delta, made.groups(round, list(of), 5), letters)
        exchange_once(made, of, round, seed=5)
        for i, replica in of.items():
            assert distance(replica.outer["slow"], phi[i]) < 1e-5
            assert distance(replica.outer["momentum"], delta[i]) < 1e-5
            assert distance(replica.fast, replica.outer["slow"]) == 0


def test_two_parts_equal_one_tensor() -> None:
    one, two = (run(NoLoCo(prefetch=prefetch), apart(NoLoCo(), 6), 10) for prefetch in (False, True))
    assert max(distance(one[i].fast, two[i].fast) for i in one) < 3e-6


@pytest.mark.parametrize(("gamma", "rounds"), [(0.3, 20), (NoLoCo().gamma, 1)])
def test_in_one_group_from_equal_weights_noloco_is_heavy_ball_diloco(gamma: float, rounds: int) -> None:
    gossip, together = NoLoCo(group=6, gamma=gamma), DiLoCo(alpha=0.5, momentum="heavy_ball")
    left, right = (run(made, replicas(made, weights(0), 6), rounds) for made in (gossip, together))
    assert max(distance(left[i].fast, right[i].fast) for i in left) < 1e-6 * rounds
    assert distance(left[0].fast, weights(0)) > (0.1 if rounds == 20 else 0.0)


@pytest.mark.parametrize("count", [6, 7])
def test_without_momentum_and_with_unit_rates_noloco_is_pair_averaging(count: int) -> None:
    plain, pairs = NoLoCo(alpha=0.0, beta=1.0, gamma=1.0), PairMean()
    left, right = (run(made, apart(made, count), 1) for made in (plain, pairs))
    assert max(distance(left[i].fast, right[i].fast) for i in left) < 1e-6


def test_pair_averaging_averages_the_fast_weights_of_each_pair() -> None:
    made = PairMean()
    of = apart(made, 7)
    drift(of, 3)
    before = {i: replica.fast for i, replica in of.items()}
    exchange_once(made, of, 0, seed=5)
    for group in made.groups(0, range(7), 5):
        for i in group:
            assert distance(of[i].fast, mean({j: before[j] for j in group})) < 1e-6


def test_with_equal_rates_the_momentum_pulls_towards_the_mean_of_the_fast_weights() -> None:
    made = NoLoCo(alpha=0.5, beta=0.7, gamma=0.7)
    of = run(made, apart(made, 6), 2)
    drift(of, 9)
    before = {i: Replica(r.fast, r.outer) for i, r in of.items()}
    exchange_once(made, of, 9, seed=5)
    for group in made.groups(9, range(6), 5):
        theta = mean({j: before[j].fast for j in group})
        for i in group:
            slow, momentum = before[i].outer["slow"], before[i].outer["momentum"]
            expected = {k: 0.5 * momentum[k] + 0.7 * (theta[k] - slow[k]) for k in SHAPES}
            assert distance(of[i].outer["momentum"], expected) < 1e-6


def test_nesterov_diloco_is_torchs_sgd_on_the_same_pseudo_gradients() -> None:
    made = make("diloco")
    of = replicas(made, weights(0), 4)
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights(0).items()}
    theirs = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9, nesterov=True)
    for round in range(15):
        drift(of, round)
        for name, parameter in parameters.items():
            parameter.grad = (parameter - mean({i: r.fast for i, r in of.items()})[name]).detach()
        exchange_once(made, of, round, seed=5)
        theirs.step()
        assert all(distance(replica.fast, parameters) < 1e-6 * (round + 1) for replica in of.values())


@pytest.mark.parametrize("kind", ["allreduce", "diloco", "streaming_diloco"])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_replicas_that_all_meet_stay_equal_to_the_last_bit(kind: str, bits: int) -> None:
    made = make(kind, bits=bits)
    of = replicas(made, weights(0), 5)
    for round in range(6):
        drift(of, round)
        exchange_once(made, of, round, seed=5)
        slow = [replica.outer["slow"] for replica in of.values() if replica.outer["slow"]]
        assert all(distance(each, of[0].outer["slow"]) == 0 for each in slow)
        if kind != "streaming_diloco":
            assert all(distance(replica.fast, of[0].fast) == 0 for replica in of.values())
            assert distance(of[0].fast, weights(0)) > 1e-3


def test_allreduce_averages_gradients_of_any_dtype() -> None:
    made = make("allreduce")
    of = replicas(made, weights(0), 3)
    for member, replica in of.items():
        replica.fast = {name: tensor.bfloat16() for name, tensor in weights(member).items()}
    expected = mean({i: {k: t.float() for k, t in r.fast.items()} for i, r in of.items()})
    exchange_once(made, of, 0, seed=0)
    assert made.interval == 0 and {t.dtype for t in of[0].fast.values()} == {torch.bfloat16}
    assert distance(of[0].fast, {k: t.bfloat16() for k, t in expected.items()}) == 0


def test_local_replicas_never_exchange_anything() -> None:
    made = make("local")
    of = replicas(made, weights(0), 3)
    drift(of, 1)
    before = {i: r.fast for i, r in of.items()}
    exchange_once(made, of, 0, seed=0)
    assert made.interval is None
    assert all(distance(of[i].fast, before[i]) == 0 for i in of)
    assert made.cost(SHAPES, 8).total == 0


def test_streaming_with_one_fragment_and_no_delay_is_diloco() -> None:
    one, whole = Streaming(fragments=1), DiLoCo()
    left, right = (run(made, replicas(made, weights(0), 3), 5) for made in (one, whole))
    assert distance(left[0].fast, right[0].fast) == 0


def test_a_streamed_fragment_is_sent_settled_later_and_mixed_in() -> None:
    made = make("streaming_diloco", every=30, fragments=3, delay=4, mix=0.25, momentum="heavy_ball")
    assert (made.interval, made.overlap) == (10, 4)
    of = replicas(made, weights(0), 2)
    order = fragments(SHAPES, 3)
    for round in range(3):
        drift(of, round)
        sent = mean({i: r.fast for i, r in of.items()})
        received = exchanged(made, of, round, 0)
        drift(of, 50 + round)
        later = {i: r.fast for i, r in of.items()}
        settle(made, of, received)
        for i, replica in of.items():
            for name in SHAPES:
                phi, theta = weights(0)[name], later[i][name]
                expected = 0.25 * theta + 0.75 * (phi - 0.7 * (phi - sent[name])) if name in order[round] else theta
                torch.testing.assert_close(replica.fast[name], expected, rtol=0, atol=1e-6)


@given(st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_fragments_partition_the_names_and_keep_layers_whole_if_there_are_enough(
    layers: int, count: int, ends: bool
) -> None:
    names = [f"layers.{n}.{part}" for n in range(layers) for part in ("a.weight", "b.weight")]
    names += ["embed_tokens.weight", "norm.weight"] if ends else []
    dealt = fragments(reversed(names), count)
    assert len(dealt) == count and sorted(name for part in dealt for name in part) == sorted(names)
    if layers + 2 * ends < count:
        assert sum(map(bool, dealt)) == min(count, len(names))
        return
    assert all(sum(f"layers.{n}.a.weight" in part for part in dealt) == 1 for n in range(layers))
    for part in dealt:
        assert all((f"layers.{n}.a.weight" in part) == (f"layers.{n}.b.weight" in part) for n in range(layers))
    sizes = [len({name.rsplit(".", 2)[0] for name in part}) for part in dealt]
    assert max(sizes) - min(sizes) <= 1 or ends
    if count > 1 and layers > 1:
        first = next(part for part in dealt if "layers.0.a.weight" in part)
        assert "layers.1.a.weight" not in first


def test_the_mean_over_all_gasloc_replicas_is_nesterov_diloco() -> None:
    gossip, together = Gasloc(alpha=0.5, beta=0.7, gamma=0.8), DiLoCo(alpha=0.5)
    left, right = apart(gossip, 6), replicas(together, mean({i: weights(i) for i in range(6)}), 6)
    for round in range(8):
        drift(left, round)
        drift(right, round)
        exchange_once(gossip, left, round, seed=5)
        exchange_once(together, right, round, seed=5)
        assert distance(mean({i: r.fast for i, r in left.items()}), right[0].fast) < 1e-5
    assert distance(left[0].fast, left[1].fast) > 1e-2


def test_gasloc_follows_its_printed_rule_with_the_last_two_iterates() -> None:
    made = Gasloc(alpha=0.6, beta=0.7, gamma=0.4)
    of = apart(made, 4)
    before = {i: double(r.outer["slow"]) for i, r in of.items()}
    for round in range(4):
        phi = {i: double(r.outer["slow"]) for i, r in of.items()}
        drift(of, round)
        x = {i: {k: phi[i][k] + 0.7 * (r.fast[k].double() - phi[i][k]) for k in SHAPES} for i, r in of.items()}
        exchange_once(made, of, round, seed=5)
        for group in made.groups(round, range(4), 5):
            middle = mean({j: x[j] for j in group})
            for i in group:
                expected = {k: x[i][k] - 0.4 * (x[i][k] - middle[k]) + 0.6 * (x[i][k] - before[i][k]) for k in SHAPES}
                assert distance(of[i].fast, expected) < 1e-5
        before = x


@pytest.mark.parametrize("kind", ["noloco", "gasloc", "pair_mean"])
def test_gossip_pulls_replicas_together_and_leaves_their_mean(kind: str) -> None:
    made = make(kind)
    of = apart(made, 8)
    middle = mean({i: r.fast for i, r in of.items()})
    start = max(distance(r.fast, middle) for r in of.values())
    run(made, of, 60, drift_std=0.0)
    assert max(distance(r.fast, middle) for r in of.values()) < 1e-3 * start


def test_without_the_pull_replicas_stay_apart() -> None:
    made = NoLoCo.model_construct(gamma=0.0)
    of = run(made, apart(made, 8), 40, drift_std=0.0)
    assert distance(of[0].fast, of[1].fast) > 0.9 * distance(weights(0), weights(1))
