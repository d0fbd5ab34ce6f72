"""Eager DiLoCo: its formula, its equality with DiLoCo, lost members, and bad options."""

from __future__ import annotations

import pytest
import torch
from benchmarks.exchange_in_process import exchange_once, replicas
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig
from planaria.exchange.registry import make_exchange
from support.lab_models import SHAPES, distance, drift, make, weights


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one[name] - other[name] for name in one}


@given(st.integers(2, 5), st.floats(0.1, 1.0))
def test_own_drift_is_fresh_and_the_others_are_one_round_old(count: int, rate: float) -> None:
    """Without momentum: φ_i ← φ_i − (β/n)(Δ_i^t + Σ_{j≠i} Δ_j^{t−1}), written out again."""
    made = make("eager", alpha=0.0, beta=rate)
    of = replicas(made, weights(0), count)
    slow = {i: weights(0) for i in of}
    last = {i: {name: torch.zeros(shape) for name, shape in SHAPES.items()} for i in of}
    for round in range(4):
        drift(of, round)
        fresh = {i: differences(slow[i], dict(replica.fast)) for i, replica in of.items()}
        for i in of:
            total = {name: fresh[i][name] + sum(last[j][name] for j in of if j != i) for name in SHAPES}
            slow[i] = {name: slow[i][name] - rate / count * total[name] for name in SHAPES}
        last = fresh
        exchange_once(made, of, round, seed=5)
        assert all(distance(of[i].fast, slow[i]) < 1e-5 for i in of)


@pytest.mark.parametrize("momentum", ["nesterov", "heavy_ball"])
def test_one_replica_is_diloco_to_the_last_bit(momentum: str) -> None:
    options = {"momentum": momentum, "alpha": 0.5}
    eager, blocking = (make(kind, **options) for kind in ("eager", "diloco"))
    one, other = (replicas(made, weights(0), 1) for made in (eager, blocking))
    for round in range(5):
        for made, of in ((eager, one), (blocking, other)):
            drift(of, round)
            exchange_once(made, of, round, seed=5)
        assert distance(one[0].fast, other[0].fast) == 0


def test_constant_drifts_give_diloco_from_the_second_round_on() -> None:
    eager, blocking = make("eager", alpha=0.0), make("diloco", alpha=0.0)
    one, other = replicas(eager, weights(0), 4), replicas(blocking, weights(0), 4)
    for round in range(5):
        for made, of in ((eager, one), (blocking, other)):
            before = {i: dict(replica.fast) for i, replica in of.items()}
            for replica in of.values():
                replica.fast = {name: tensor - 0.01 for name, tensor in replica.fast.items()}
            exchange_once(made, of, round, seed=5)
            step = differences(before[0], dict(of[0].fast))
            expected = 0.007 * (0.25 if made is eager and round == 0 else 1.0)
            assert all(torch.allclose(tensor, torch.full_like(tensor, expected), atol=1e-5) for tensor in step.values())


def test_no_replica_waits_and_a_lost_member_counts_once_more() -> None:
    made = make("eager", alpha=0.0, beta=1.0)
    of = replicas(made, weights(0), 3)
    drift(of, 0)
    exchange_once(made, of, 0, seed=5)
    sent = {i: made.update(replica.outer, replica.fast) for i, replica in of.items()}
    assert made.prefetches and all(update.blocking is None for update in sent.values())
    assert made.cost(SHAPES, 3).critical == 0 < made.cost(SHAPES, 3).total
    drift(of, 1)
    lost = of.pop(2)
    with_it, _ = made.settle(of[0].outer, of[0].fast, sent, 0)
    without, _ = made.settle(of[0].outer, of[0].fast, {i: sent[i] for i in of}, 0)
    fresh = differences(dict(of[0].outer["slow"]), dict(of[0].fast))
    for updates, settled in ((3, with_it), (2, without)):
        old = [of[1].outer["last"], *([lost.outer["last"]] if updates == 3 else [])]
        total = {name: fresh[name] + sum(part[name] for part in old) for name in SHAPES}
        expected = {name: of[0].outer["slow"][name] - total[name] / updates for name in SHAPES}
        assert distance(settled, expected) < 1e-5


def test_a_newcomer_starts_without_a_drift_of_its_own() -> None:
    made = make("eager")
    of = replicas(made, weights(0), 2)
    drift(of, 0)
    exchange_once(made, of, 0, seed=5)
    copied = of[0].outer.for_copy(made.parts)
    assert "last" not in copied.parts and copied.parts.keys() >= {"slow", "momentum"}
    sent = made.prefetched(copied)
    assert sent is not None and not sent.any() and len(sent) == sum(t.numel() for t in copied["slow"].values())


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"options": {"bits": 8}}, "bits = 8"), ({"compress": "ef14:top1%"}, r"exchange\.compress: 'eager'")],
)
def test_compressed_messages_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_exchange(ExchangeConfig.model_validate({"kind": "eager", "replicas": 2, **fields}))


def test_drifts_of_a_round_with_too_few_updates_count_once() -> None:
    robust = {"rule": "median", "byzantine": 1}
    options = {"every": 5, "alpha": 0.0, "beta": 1.0}
    made = make_exchange(ExchangeConfig(kind="eager", replicas=3, options=options, robust=robust))
    outer = [made.start({"w": torch.zeros(2)}) for _ in range(3)]
    fast = [{"w": torch.full((2,), -1.0)} for _ in range(3)]
    for round in range(4):
        updates = {me: made.update(outer[me], fast[me]) for me in range(3)}
        settled = [made.settle(outer[me], fast[me], updates if round else {me: updates[me]}, me) for me in range(3)]
        fast, outer = [dict(weights) for weights, _ in settled], [state for _, state in settled]
    assert all(weights["w"].tolist() == [-1, -1] for weights in fast)


def test_whole_replicas_cannot_be_judged_by_drifts_that_are_not_used() -> None:
    with pytest.raises(UserError, match=r"scope = 'replica': members weigh each other's last drifts"):
        make_exchange(
            ExchangeConfig(kind="eager", replicas=5, robust={"rule": "krum", "byzantine": 1, "scope": "replica"})
        )
