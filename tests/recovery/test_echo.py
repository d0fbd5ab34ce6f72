"""Echo: a coarse copy that converges, in small messages, equal on both sides bit for bit."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.common.quantisation import GROUP, coded_bytes, decode, encode
from planaria.config.schema import RecoveryConfig
from planaria.models.state import StageState
from planaria.recovery import make_chain
from planaria.recovery.base import Copy
from planaria.recovery.echo import Echo, EchoHolder, EchoSender
from support.stage_states import (
    INPUTS,
    ToyStage,
    agree,
    assert_same,
    assert_same_state,
    losses,
    replica,
    state,
    weights,
)

SHAPES = {"w": torch.Size([20, 31]), "scale": torch.Size([70]), "bias": torch.Size([])}
COUNT = 691
GRADIENTS = StageState({})
BITS = pytest.mark.parametrize("bits", [2, 4, 8])


def flat(of: StageState) -> Tensor:
    return torch.cat([of.weights[name].reshape(-1) for name in sorted(of.weights)])


def stage(seed: int) -> StageState:
    return state(seed, shapes=SHAPES)


def send(sender: EchoSender, holder: EchoHolder, step: int, now: StageState) -> Tensor:
    """Send one step's message."""
    assert holder.expects(step) == ("before",) and not sender.needs_applied_update(step)
    message = sender.message_before_step(step, now)
    assert message is not None and sender.message_after_gradient(step, now, GRADIENTS) is None
    holder.take(step, 0, "before", message)
    return message


def commit(sender: EchoSender, holder: EchoHolder, steps: range, now: StageState) -> list[Tensor]:
    """Commit steps of an unchanged stage; return their messages."""
    messages = []
    for step in steps:
        messages.append(send(sender, holder, step, now))
        agree((sender, holder), step)
    return messages


def make(bits: int, every: int) -> tuple[EchoSender, EchoHolder]:
    return EchoSender(bits, every), EchoHolder(bits, every, SHAPES)


def test_echoes_are_at_the_given_ring_distance() -> None:
    assert Echo().copies(3) == (Copy((0,), 1), Copy((1,), 2), Copy((2,), 3), Copy((3,), 0))
    assert Echo(distance=3).copies(3) == (Copy((0,), 3), Copy((1,), 0), Copy((2,), 1), Copy((3,), 2))


@pytest.mark.parametrize("distance", [4, 5, 8])
def test_a_distance_of_a_whole_ring_is_refused(distance: int) -> None:
    config = RecoveryConfig.model_validate({"strategy": "echo", "options": {"distance": distance}})
    with pytest.raises(UserError, match=rf"recovery\.options\.distance = {distance}: .* use 1 to 3"):
        make_chain(config, 3)


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_a_lost_stage_is_rebuilt_from_its_echo_if_the_host_is_alive(distance: int) -> None:
    strategy = Echo(distance=distance)
    for lost in losses(5):
        answer = strategy.donors(lost, replica(5, age=4))
        host = {s: (s + distance) % 6 for s in lost}
        assert answer.donors == {s: (host[s],) for s in lost if host[s] not in lost}
        assert answer.refused == {
            s: f"stage {s}'s echo was at stage {host[s]}, which is lost too" for s in lost if host[s] in lost
        }


def test_a_host_must_have_received_a_whole_round() -> None:
    answer = Echo(every=4).donors(frozenset({1, 3, 5}), replica(5, s2=3, s4=4, s0=0))
    assert answer.donors == {3: (4,)}
    assert answer.refused == {
        1: "stage 1's echo at stage 2 is incomplete (3 of 4 steps since stage 2 got a new worker)",
        5: "stage 5's echo at stage 0 is incomplete (0 of 4 steps since stage 0 got a new worker)",
    }


@given(st.integers(1, 6), st.integers(0, 50))
def test_a_host_of_sufficient_age_has_every_slice(every: int, start: int) -> None:
    """``every`` consecutive steps renew all slices, from any step."""
    sender, holder = make(8, every)
    commit(sender, holder, range(start, start + every), stage(1))
    torch.testing.assert_close(flat(holder.state()), flat(stage(1)), rtol=0, atol=0.1)


def test_a_rebuilt_stage_has_the_echos_weights_and_a_fresh_optimizer() -> None:
    sender, holder = make(8, 2)
    commit(sender, holder, range(2), stage(1))
    strategy = Echo(every=2)
    rebuilt = strategy.rebuild(2, {3: strategy.donate(2, state(9), {Copy((2,), 3): holder.state()})}, INPUTS)
    assert_same_state(rebuilt, StageState(holder.state().weights))
    assert {name: w.shape for name, w in rebuilt.weights.items()} == SHAPES
    assert all(w.dtype == torch.float32 for w in rebuilt.weights.values())


def test_the_recipe_sets_bits_and_round_length() -> None:
    fields: dict[str, Any] = {"bits": 4, "every": 4}
    original = ToyStage(1, SHAPES)
    strategy, copy = Echo.model_validate(fields), Copy((1,), 2)
    sender, holder = strategy.sender(copy, 1), strategy.holder(copy, {1: original})
    message = sender.message_before_step(0, original.state())
    assert message is not None and len(message) == coded_bytes(2 * GROUP, 4)
    holder.take(0, 0, "before", message)
    with pytest.raises(ValueError, match="0 numbers of 4 bits"):
        holder.take(3, 0, "before", message)  # three slices of whole groups are all there is, so the last is empty


def error(holder: EchoHolder, now: StageState) -> float:
    exact = flat(now)
    return ((flat(holder.state()) - exact).norm() / exact.norm()).item()


@BITS
@pytest.mark.parametrize("every", [1, 3])
def test_the_error_of_an_unchanged_stage_shrinks_every_round(bits: int, every: int) -> None:
    sender, holder = make(bits, every)
    errors = []
    for number in range(8):
        commit(sender, holder, range(number * every, (number + 1) * every), stage(1))
        errors.append(error(holder, stage(1)))
    finest = 2.0**-8  # bfloat16 keeps 8 bits of a number; rounding to it is never off by more than this share
    assert errors[0] < {2: 0.4, 4: 0.13, 8: 0.012}[bits]
    assert all(after < 0.95 * before or after < finest for before, after in pairwise(errors))
    assert errors[-1] < max(finest, errors[0] / 8)


@pytest.mark.parametrize(("bits", "rounds"), [(8, 1), (4, 3)])
def test_outliers_are_exact_after_the_first_round_and_others_stay_close(bits: int, rounds: int) -> None:
    """Trained models have gains and channels forty times as large as other weights."""
    now = stage(1)
    outliers = {"w": (7, 3), "scale": (11,)}
    for name, place in outliers.items():
        now.weights[name][place] = -40.0
    sender, holder = make(bits, 1)
    commit(sender, holder, range(1), now)
    for name, place in outliers.items():
        assert holder.state().weights[name][place].item() == pytest.approx(-40.0, rel=2.0**-8)
    commit(sender, holder, range(1, rounds), now)
    worst = (flat(holder.state()) - flat(now)).abs().max().item()
    assert worst <= 40 / (1 << 8) + 2.0**-8 * 4, "half a step of the coarsest group, and bf16"


@BITS
def test_a_slowly_moving_stage_is_closer_than_after_one_message(bits: int) -> None:
    """Small differences have small rounding errors."""
    sender, holder = make(bits, 2)
    now, drift = stage(1), weights(77, SHAPES)
    for number in range(12):
        commit(sender, holder, range(2 * number, 2 * number + 2), now)
        now = StageState({name: w + 1e-3 * drift[name] for name, w in now.weights.items()})
    once = (decode(encode(flat(now), bits), COUNT, bits) - flat(now)).norm() / flat(now).norm()
    assert error(holder, now) < 0.5 * once.item()


@BITS
@given(every=st.integers(1, 9))
def test_a_message_is_at_most_its_share(bits: int, every: int) -> None:
    messages = commit(*make(bits, every), range(every), stage(1))
    share = math.ceil(COUNT / every / GROUP) * GROUP
    assert max(map(len, messages)) <= coded_bytes(share, bits)
    assert sum(map(len, messages)) == coded_bytes(COUNT, bits), "a round carries every weight once"


def test_a_malformed_message_is_refused_without_effect() -> None:
    sender, holder = make(8, 3)
    commit(sender, holder, range(3), stage(1))
    before = holder.state().weights
    message = sender.message_before_step(3, stage(2))
    assert message is not None
    for wrong in (message[:-1], message.float(), torch.cat([message, message])):
        with pytest.raises(ValueError, match="numbers of 8 bits"):
            holder.take(3, 0, "before", wrong)
    holder.drop()
    assert_same(holder.state().weights, before)


class Ledger:
    """A reference of the holder's copy, and of the slices known to both sides."""

    def __init__(self, bits: int, every: int) -> None:
        self.bits, self.every = bits, every
        self.held, self.known = torch.zeros(COUNT), torch.zeros(COUNT)

    def place(self, step: int) -> slice:
        size = math.ceil(COUNT / self.every / GROUP) * GROUP
        start = min(step % self.every * size, COUNT)
        return slice(start, min(start + size, COUNT))

    def message(self, step: int, now: StageState) -> Tensor:
        place = self.place(step)
        return encode(flat(now)[place] - self.known[place], self.bits)

    def commit(self, step: int, message: Tensor) -> None:
        place = self.place(step)
        known = self.known[place]
        self.held[place] = self.known[place] = (known + decode(message, len(known), self.bits)).bfloat16().float()


EVENTS = st.lists(
    st.sampled_from(["commit", "commit", "commit", "drop", "lose sender", "lose host", "lose both"]), max_size=30
)


@pytest.mark.slow
@given(st.sampled_from([2, 4, 8]), st.integers(1, 7), EVENTS, st.integers(0, 5))
def test_both_sides_agree_bit_for_bit_after_any_events(bits: int, every: int, events: list[str], step: int) -> None:
    (sender, holder), ledger = make(bits, every), Ledger(bits, every)
    for number, event in enumerate(events):
        if event.startswith("lose"):
            if event != "lose host":
                sender = EchoSender(bits, every)
            if event != "lose sender":
                holder = EchoHolder(bits, every, SHAPES)
                ledger.held = torch.zeros(COUNT)
            sender.restart()
            holder.restart()
            ledger.known = torch.zeros(COUNT)
        else:
            now = stage(number)
            message = send(sender, holder, step, now)
            assert torch.equal(message, ledger.message(step, now)), "the sender builds on what both have"
            agree((sender, holder), step, event == "commit")
            if event == "commit":
                ledger.commit(step, message)
                step += 1
        assert torch.equal(flat(holder.state()), ledger.held)


def test_slices_of_an_earlier_worker_stay_until_replaced() -> None:
    every = 3
    sender, holder = make(8, every)
    commit(sender, holder, range(6), stage(1))
    former = flat(holder.state())
    sender = EchoSender(8, every)
    holder.restart()
    places = [Ledger(8, every).place(step) for step in range(every)]
    for step in range(every):
        assert torch.equal(flat(holder.state())[places[step]], former[places[step]])
        commit(sender, holder, range(6 + step, 7 + step), stage(2))
        newer, exact = flat(holder.state())[places[step]], flat(stage(2))[places[step]]
        torch.testing.assert_close(newer, exact, rtol=0, atol=0.1)
        for later in places[step + 1 :]:
            assert torch.equal(flat(holder.state())[later], former[later])
