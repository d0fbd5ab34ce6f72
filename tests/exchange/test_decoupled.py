"""Decoupled DiLoCo: weights by steps, receivers that send nothing, missed rounds, and bad options."""

from __future__ import annotations

import pytest
import torch
from benchmarks.exchange_in_process import Replica, exchange_once, replicas
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Exchange, Update, UpdateWeights
from planaria.exchange.registry import make_exchange
from planaria.exchange.streaming_diloco import fragments
from support.lab_models import distance, drift, make, weights

SMALL = {"every": 6, "fragments": 2}


def settled_with(
    made: Exchange, replica: Replica, updates: dict[int, Update], me: int, steps: dict[int, int] | None = None
) -> None:
    """Settle a round with these updates, weighted by steps if they are given."""
    known = None if steps is None else UpdateWeights(made.contribution_weights(steps))
    rule = made.after_rejecting(0, lambda _: None, known)
    replica.fast, replica.outer = rule.settle(replica.outer, replica.fast, updates, me)


def slow_of(replica: Replica) -> dict[str, Tensor]:
    return dict(replica.outer["slow"])


def test_updates_count_in_proportion_to_their_steps() -> None:
    made = make("decoupled", aggregator="mean", alpha=0.0, beta=1.0, **SMALL)
    of = replicas(made, weights(0), 2)
    drift(of, 1)
    updates = {member: made.update(replica.outer, replica.fast) for member, replica in of.items()}
    moved = {member: dict(replica.fast) for member, replica in of.items()}
    settled_with(made, of[0], updates, 0, {0: 1, 1: 3})
    first, second = fragments(weights(0), 2)
    for name in first:  # with a rate of 1 and no momentum, the outer step leads to the weighted mean
        expected = (moved[0][name] + 3 * moved[1][name]) / 4
        assert torch.allclose(of[0].fast[name], expected, atol=1e-6)
    assert all(torch.equal(of[0].fast[name], moved[0][name]) for name in second)


def test_a_replica_without_steps_does_not_count() -> None:
    made = make("decoupled", alpha=0.0, beta=1.0, **SMALL)
    of, alone = replicas(made, weights(0), 2), replicas(made, weights(0), 1)
    drift(of, 1)
    drift(alone, 1)
    of[1].fast = weights(0)
    updates = {member: made.update(replica.outer, replica.fast) for member, replica in of.items()}
    settled_with(made, of[0], updates, 0, {0: 3, 1: 0})
    settled_with(made, alone[0], {0: made.update(alone[0].outer, alone[0].fast)}, 0)
    assert distance(of[0].fast, alone[0].fast) < 1e-6
    assert made.contribution_weights({0: 0, 1: 0}) == {0: 1.0, 1: 1.0}


@given(st.integers(1, 400))
def test_equal_steps_give_equal_weights(steps: int) -> None:
    made = make("decoupled", **SMALL)
    of, other = replicas(made, weights(0), 3), replicas(made, weights(0), 3)
    for group in (of, other):
        drift(group, 1)
    updates = {member: made.update(replica.outer, replica.fast) for member, replica in of.items()}
    settled_with(made, of[0], updates, 0, dict.fromkeys(of, steps))
    settled_with(made, other[0], updates, 0)
    assert distance(of[0].fast, other[0].fast) == 0.0


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("senders", [{0}, {1, 2}, {0, 1, 2}])
def test_replicas_that_send_nothing_settle_like_the_others(bits: int, senders: set[int]) -> None:
    made = make("decoupled", bits=bits, **SMALL)
    of = replicas(made, weights(0), 3)
    for round in range(5):
        drift(of, round)
        updates = {member: made.update(replica.outer, replica.fast) for member, replica in of.items()}
        sent = {member: updates[member] for member in sorted(senders)}
        for member, replica in of.items():
            settled_with(made, replica, sent, member, dict.fromkeys(senders, 3))
        fragment = fragments(weights(0), 2)[round % 2]
        for member in (1, 2):
            assert distance(slow_of(of[member]), slow_of(of[0])) == 0
            assert all(torch.equal(of[member].fast[name], of[0].fast[name]) for name in fragment)


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_replica_that_missed_rounds_takes_over_their_fragments_only(before: int, missed: int) -> None:
    made = make("decoupled", **SMALL)
    of = replicas(made, weights(0), 3)
    for round in range(before):
        drift(of, round)
        exchange_once(made, of, round, seed=5)
    present = {member: of[member] for member in (0, 1)}
    drift({2: of[2]}, 99)
    own = dict(of[2].fast)
    for round in range(before, before + missed):
        drift(present, round)
        exchange_once(made, present, round, seed=5)
    of[2].fast, of[2].outer = made.catch_up(of[2].outer, of[2].fast, of[0].outer)
    assert of[2].outer.rounds == before + missed
    assert distance(slow_of(of[2]), slow_of(of[0])) == 0
    assert distance(dict(of[2].outer["momentum"]), dict(of[0].outer["momentum"])) == 0
    parts = fragments(weights(0), 2)
    received = {name for round in range(before, before + missed) for name in parts[round % 2]}
    for name, tensor in of[2].fast.items():
        assert torch.equal(tensor, of[0].outer["slow"][name] if name in received else own[name])


def test_all_replicas_due_is_streaming_diloco() -> None:
    """The control with a full quorum: the same fragments, in step."""
    decoupled = make("decoupled", aggregator="mean", min_due=3, delay=1, **SMALL)
    streaming = make("streaming_diloco", delay=1, **SMALL)
    one, other = (replicas(made, weights(0), 3) for made in (decoupled, streaming))
    for round in range(6):
        for made, of in ((decoupled, one), (streaming, other)):
            drift(of, round)
            exchange_once(made, of, round, seed=5)
        assert distance(one[0].fast, other[0].fast) == 0


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"mix": 0.5}, {}, "mix = 0.5: a decoupled replica adopts the result of a round unmixed"),
        ({"delay": 0}, {}, "delay"),
        ({"delay": 3}, {}, "delay = 3: a fragment must be settled before the next is sent"),
        ({"min_due": 0}, {}, "min_due"),
        ({"min_due": 6}, {}, "min_due = 6, but exchange.replicas = 5; use 5 or less"),
        ({"aggregator": "median"}, {}, "no such aggregator"),
        ({}, {"robust": "multikrum"}, "do not compare what they received"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, object], more: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_exchange(ExchangeConfig(kind="decoupled", replicas=5, options={**SMALL, **options}, **more))
