"""Updates: their bytes, rounding and its residual, replicas left alone, and the outer state in a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.exchange_in_process import Replica, exchange_once, exchanged, replicas, settle
from hypothesis import given
from hypothesis import strategies as st

from planaria.exchange.base import StageOuterState, Update
from planaria.exchange.compress.compression import make_compression
from planaria.exchange.gossip import PairMean
from planaria.exchange.noloco import NoLoCo
from planaria.exchange.weight_message import pack, unpack
from support.lab_models import COUNT, KINDS, SHAPES, apart, distance, drift, fitting, make, mean, weights

BITS = pytest.mark.parametrize("bits", [32, 16, 8, 4])
CODECS = {bits: make_compression(f"{bits}bits").compressor for bits in (32, 16, 8, 4)}


@BITS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("members", [1, 2, 5])
def test_an_exchange_sends_the_bytes_that_it_states(kind: str, bits: int, members: int) -> None:
    made = fitting(kind, bits=bits, group=3)
    of = replicas(made, weights(0), members)
    blocking = total = 0
    rounds = 12
    for round in range(rounds):
        drift(of, round)
        received = exchanged(made, of, round, 0)
        for member, group in received.items():
            update = group[member]
            peers = len(group) - 1
            blocking += peers * (update.blocking.nbytes if update.blocking is not None else 0)
            total += peers * sum(part.nbytes for part in (update.blocking, update.prefetched) if part is not None)
        settle(made, of, received)
    stated = made.cost(SHAPES, members)
    assert stated.critical == (0 if made.overlap else pytest.approx(blocking / members / rounds))
    assert stated.total == pytest.approx(total / members / rounds)


def test_overlapped_messages_are_not_on_the_critical_path() -> None:
    cost = make("streaming_diloco", delay=3).cost(SHAPES, 2)
    assert (cost.critical, cost.total) == (0, 4 * COUNT / 4)


def test_one_tensor_and_fewer_bits_reduce_the_cost() -> None:
    large = {"w": torch.Size([1000, 128])}
    two_tensors_bf16 = 2 * 2 * large["w"].numel()
    assert make("noloco").cost(large, 8).total == 0.5 * 2 * 4 * large["w"].numel()
    assert make("noloco", bits=8).cost(large, 8).critical / two_tensors_bf16 < 0.27
    assert make("noloco", bits=4).cost(large, 8).critical / two_tensors_bf16 < 0.14


def test_the_prefetched_part_is_known_before_the_round() -> None:
    made = make("noloco", prefetch=True)
    of = apart(made, 4)
    prefetched = {i: made.prefetched(r.outer) for i, r in of.items()}
    drift(of, 0)
    for i, replica in of.items():
        assert torch.equal(made.update(replica.outer, replica.fast).prefetched, prefetched[i])
    assert make("noloco").prefetched(of[0].outer) is None


@given(st.sampled_from([32, 16, 8, 4]), st.integers(0, 99))
def test_a_message_restores_names_and_shapes(bits: int, seed: int) -> None:
    before = weights(seed)
    message = pack(before, CODECS[bits])
    assert message.ndim == 1 and message.nbytes == CODECS[bits].bytes(COUNT)
    after = unpack(message, before, CODECS[bits])
    assert {name: tensor.shape for name, tensor in after.items()} == SHAPES
    error = torch.cat([(after[name] - before[name]).reshape(-1) for name in SHAPES]).square().mean().sqrt().item()
    assert error <= {32: 0.0, 16: 1e-3, 8: 0.05, 4: 0.2}[bits]


@BITS
def test_messages_of_another_size_or_type_or_without_a_part_are_refused(bits: int) -> None:
    before = weights(0)
    message = pack(before, CODECS[bits])
    with pytest.raises(ValueError, match=f"{COUNT} numbers of {bits} bits are"):
        unpack(message[:-1], before, CODECS[bits])
    with pytest.raises(ValueError, match=f"{COUNT} numbers of {bits} bits are"):
        unpack(message.double(), before, CODECS[bits])
    with pytest.raises(ValueError, match="lacks a required part"):
        unpack(None, before, CODECS[bits])
    made = make("noloco", prefetch=True)
    of = apart(made, 2)
    updates = {i: made.update(r.outer, r.fast) for i, r in of.items()}
    for lacking in (replace(updates[1], prefetched=None), Update()):
        with pytest.raises(ValueError, match="lacks a required part"):
            made.settle(of[0].outer, of[0].fast, {0: updates[0], 1: lacking}, 0)


def test_half_precision_never_sends_infinities() -> None:
    sent = unpack(pack({"w": torch.tensor([1e9, -1e9])}, CODECS[16]), {"w": torch.zeros(2)}, CODECS[16])
    assert sent["w"].tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("kind", ["allreduce", "diloco", "noloco", "pair_mean"])
def test_the_residual_of_one_round_is_in_the_next(kind: str, bits: int) -> None:
    made = make(kind, bits=bits)
    of = replicas(made, weights(0), 4)
    exact = {i: {k: torch.zeros(s, dtype=torch.float64) for k, s in SHAPES.items()} for i in of}
    sums = {i: {k: torch.zeros(s, dtype=torch.float64) for k, s in SHAPES.items()} for i in of}
    for round in range(30):
        for i, replica in of.items():
            replica.fast = weights(100 * round + i)
        received = exchanged(made, of, round, 0)
        for i, replica in of.items():
            sign = {"diloco": -1.0}.get(kind, 1.0)
            blocking = unpack(received[i][i].blocking, replica.fast, CODECS[bits])
            for k in SHAPES:
                origin = replica.outer["slow"].get(k, torch.zeros(SHAPES[k]))
                exact[i][k] += replica.fast[k] - origin
                sums[i][k] += sign * blocking[k].double()
        settle(made, of, received)
        for i, replica in of.items():
            # Telescoping: the sum of the inputs is the sum of the messages plus the last residual.
            left = {k: sums[i][k] + {"diloco": -1.0}.get(kind, 1.0) * replica.outer["residual"][k] for k in SHAPES}
            assert distance(left, exact[i]) < 1e-3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_exchange_converges_to_the_unrounded_mean(bits: int) -> None:
    """With the same gradients in every round, the mean of the results converges to theirs like 1 / rounds."""
    made = make("allreduce", bits=bits)
    of = replicas(made, weights(0), 3)
    target = mean({i: weights(i) for i in of})
    total = {k: torch.zeros(s) for k, s in SHAPES.items()}
    errors = {}
    for round in range(1, 201):
        for i, replica in of.items():
            replica.fast = weights(i)
        exchange_once(made, of, round, seed=0)
        total = {k: total[k] + of[0].fast[k] for k in SHAPES}
        errors[round] = distance({k: total[k] / round for k in SHAPES}, target)
    assert errors[1] > 5e-3, "a single round has a larger error"
    assert errors[200] < errors[1] / 20
    assert errors[200] < 0.6 * errors[100]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rounded_gossip_ends_where_unrounded_gossip_ends(bits: int) -> None:
    rounded, exact = NoLoCo.model_construct(bits=bits), NoLoCo()
    left, right = apart(rounded, 6), apart(exact, 6)
    for round in range(80):
        for made, of in ((rounded, left), (exact, right)):
            # Every replica is drawn to the same place by its inner steps.
            for replica in of.values():
                replica.fast = {k: t + 0.3 * (weights(77)[k] - t) for k, t in replica.fast.items()}
            exchange_once(made, of, round, seed=1)
    assert max(distance(r.fast, weights(77)) for r in right.values()) < 1e-3
    assert max(distance(r.fast, weights(77)) for r in left.values()) < 1e-2


def settled_alone(made: object, replica: Replica) -> Replica:
    update = made.update(replica.outer, replica.fast)
    return Replica(*made.settle(replica.outer, replica.fast, {3: update}, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [32, 4])
def test_a_lone_replica_rounds_nothing(kind: str, bits: int) -> None:
    found = {}
    for used in (32, bits):
        made = fitting(kind, bits=used)
        of = replicas(made, weights(0), 1)
        drift(of, 4)
        found[used] = settled_alone(made, of[0])
    assert distance(found[bits].fast, found[32].fast) < 1e-6
    assert all(not tensor.any() for tensor in found[bits].outer["residual"].values())


def test_a_lone_replica_applies_its_own_residual() -> None:
    made = PairMean(bits=4)
    of = apart(made, 2)
    drift(of, 1)
    exchange_once(made, of, 0, seed=0)
    kept, before = of[0].outer["residual"], of[0].fast
    assert distance(kept, {k: torch.zeros(s) for k, s in SHAPES.items()}) > 1e-3
    assert distance(settled_alone(made, of[0]).fast, {k: before[k] + kept[k] for k in SHAPES}) < 1e-6


def test_a_lone_noloco_replica_has_momentum_on_its_own_drift() -> None:
    made = NoLoCo()
    of = replicas(made, weights(0), 1)
    drift(of, 4)
    moved = {k: of[0].fast[k] - weights(0)[k] for k in SHAPES}
    after = settled_alone(made, of[0])
    assert distance(after.outer["momentum"], {k: 0.7 * moved[k] for k in SHAPES}) < 1e-6
    assert distance(settled_alone(made, after).outer["momentum"], {k: 0.35 * moved[k] for k in SHAPES}) < 1e-6


@pytest.mark.parametrize("kind", ["noloco", "gasloc", "pair_mean"])
def test_a_late_partner_is_left_out_on_both_sides(kind: str) -> None:
    made = make(kind)
    of = apart(made, 4)
    drift(of, 2)
    before = {i: Replica(r.fast, r.outer) for i, r in of.items()}
    pair = made.groups(0, range(4), 9)[0]
    exchange_once(made, of, 0, seed=9, alone=[pair[0]])
    assert all(distance(of[i].fast, settled_alone(made, before[i]).fast) == 0 for i in pair)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [32, 8])
def test_a_run_resumes_from_its_saved_state_to_the_last_bit(kind: str, bits: int) -> None:
    made = fitting(kind, bits=bits)
    whole = replicas(made, weights(0), 4)
    for round in range(3):
        drift(whole, round)
        exchange_once(made, whole, round, seed=2)
    saved = {i: {k: t.clone() for k, t in r.outer.state().items()} for i, r in whole.items()}
    resumed = {i: Replica(r.fast, StageOuterState.load(saved[i], made.parts)) for i, r in whole.items()}
    assert [r.outer.rounds for r in resumed.values()] == [3] * 4
    for round in range(3, 6):
        for of in (whole, resumed):
            drift(of, round)
            exchange_once(made, of, round, seed=2)
    for i in whole:
        assert distance(whole[i].fast, resumed[i].fast) == 0
        assert distance(whole[i].outer.state(), resumed[i].outer.state()) == 0


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "counts its rounds"),
        ({"rounds": torch.tensor([1, 2])}, "counts its rounds"),
        ({"rounds": torch.tensor(1.0)}, "counts its rounds"),
        ({"rounds": torch.tensor(1), "slow": torch.zeros(1)}, "'slow'"),
        ({"rounds": torch.tensor(1), "slow/": torch.zeros(1)}, "'slow/'"),
        ({"rounds": torch.tensor(1), "slow/w": torch.zeros(1).double()}, "torch.float64"),
    ],
)
def test_an_invalid_outer_state_is_refused(state: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StageOuterState.load(state, {"slow": "shared"})


def test_undeclared_parts_are_left_out() -> None:
    state = {"rounds": torch.tensor(1), "slow/w": torch.ones(1), "residual/w": torch.ones(1)}
    rounded, exact = (StageOuterState.load(state, make("noloco", bits=bits).parts) for bits in (8, 32))
    assert rounded["residual"].keys() == {"w"} and not exact["residual"]
    assert rounded["slow"] == exact["slow"] == {"w": torch.ones(1)}


def test_a_copy_lacks_its_donors_own_parts() -> None:
    made = make("noloco", bits=8)
    of = apart(made, 2)
    exchange_once(made, of, 0, seed=0)
    whole, copied = of[0].outer, of[0].outer.for_copy(made.parts)
    assert whole["residual"] and not copied["residual"]
    assert copied["slow"] is whole["slow"] and copied["momentum"] is whole["momentum"]
    assert copied.rounds == whole.rounds == 1


@pytest.mark.parametrize("kind", KINDS)
def test_settling_changes_no_argument_and_shares_no_weights(kind: str) -> None:
    made = fitting(kind, bits=8)
    of = apart(made, 2)
    drift(of, 1)
    received = exchanged(made, of, 0, 0)
    fast = {k: t.clone() for k, t in of[0].fast.items()}
    state = {k: t.clone() for k, t in of[0].outer.state().items()}
    new_fast, new_outer = made.settle(of[0].outer, of[0].fast, received[0], 0)
    assert distance(of[0].fast, fast) == 0 and distance(of[0].outer.state(), state) == 0
    slow = {k: t.clone() for k, t in new_outer["slow"].items()}
    for tensor in new_fast.values():
        tensor.add_(1.0)
    assert all(torch.equal(new_outer["slow"][k], slow[k]) for k in slow)


@pytest.mark.parametrize("kind", KINDS)
def test_outer_state_is_fp32_for_bf16_weights(kind: str) -> None:
    made = make(kind)
    of = replicas(made, {k: t.bfloat16() for k, t in weights(0).items()}, 2)
    exchange_once(made, of, 0, seed=0)
    assert {t.dtype for t in of[0].fast.values()} == {torch.bfloat16}
    assert {t.dtype for k, t in of[0].outer.state().items() if k != "rounds"} <= {torch.float32}


@pytest.mark.parametrize("kind", ["noloco", "diloco"])
def test_replicas_may_take_unequal_numbers_of_inner_steps(kind: str) -> None:
    made = make(kind)
    of = replicas(made, weights(0), 4)
    for round in range(40):
        for i, replica in of.items():
            for _ in range(1 + 3 * i):
                replica.fast = {k: t + 0.05 * (weights(77)[k] - t) for k, t in replica.fast.items()}
        exchange_once(made, of, round, seed=1)
    assert max(distance(r.fast, weights(77)) for r in of.values()) < 0.02
