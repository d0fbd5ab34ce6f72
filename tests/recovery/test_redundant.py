"""Redundant computation: the location of twins, and their equality with the originals bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.models.packing import PackingError
from planaria.models.state import StageState
from planaria.recovery.base import Copy
from planaria.recovery.redundant import Redundant, TwinHolder, TwinSender
from support.stage_states import SHAPES, ToyStage, agree, assert_same_state, losses, replica, state, weights

EVENTS = st.lists(st.sampled_from(["commit", "commit", "drop", "lose sender", "lose host", "lose both"]), max_size=30)


def test_the_previous_stage_holds_the_twin() -> None:
    assert Redundant().copies(3) == (Copy((0,), 3), Copy((1,), 0), Copy((2,), 1), Copy((3,), 2))
    assert Redundant().copies(1) == (Copy((0,), 1), Copy((1,), 0))


@pytest.mark.parametrize("stages", [1, 5])
def test_a_lost_stage_is_rebuilt_from_the_previous_one_if_alive(stages: int) -> None:
    before = {stage: stage - 1 if stage else stages for stage in range(stages + 1)}
    for lost in losses(stages):
        answer = Redundant().donors(lost, replica(stages))
        assert answer.donors == {s: (before[s],) for s in lost if before[s] not in lost}
        assert answer.refused == {
            s: f"stage {s}'s twin was at stage {before[s]}, which is lost too" for s in lost if before[s] in lost
        }


def test_a_host_without_a_twin_is_not_used() -> None:
    answer = Redundant().donors(frozenset({2, 5}), replica(5, s1=0, s4=1))
    assert answer.donors == {5: (4,)}
    assert answer.refused == {
        2: "stage 2's twin at stage 1 is incomplete (0 of 1 steps since stage 1 got a new worker)"
    }


def gradient(seed: int) -> StageState:
    return StageState(weights(seed), grad_norm=seed + 0.5, clipped_norm=0.5)


def deliver(sender: TwinSender, holder: TwinHolder, step: int, original: ToyStage, grad: StageState) -> None:
    """Send a step's messages in the expected order."""
    messages = {
        "before": sender.message_before_step(step, original.state()),
        "after": sender.message_after_gradient(step, original.state(), grad),
    }
    assert tuple(moment for moment, message in messages.items() if message is not None) == holder.expects(step)
    assert not sender.needs_applied_update(step)
    for moment in holder.expects(step):
        message = messages[moment]
        assert message is not None
        holder.take(step, 0, moment, message)


@given(EVENTS)
def test_the_twin_equals_its_original_bit_for_bit_after_any_events(events: list[str]) -> None:
    original = ToyStage(1)
    sender, holder = TwinSender(), TwinHolder(original, forward=True)
    step, held = 0, None
    for number, event in enumerate(events):
        if event in ("lose host", "lose both"):
            holder, held = TwinHolder(original, forward=True), None
        if event in ("lose sender", "lose both"):
            original.load(state(100 + number))  # rebuilt as another state, as other strategies do
            sender = TwinSender()
        if event.startswith("lose"):
            sender.restart()
            holder.restart()
        else:
            holder.on_forward_output(0, torch.zeros(1))
            deliver(sender, holder, step, original, gradient(number))
            if event == "commit":
                original.apply(step, gradient(number))
            agree((sender, holder), step, event == "commit")
            if event == "commit":
                step, held = step + 1, True
                assert_same_state(holder.state(), original.state())
        assert holder.nbytes == (original.nbytes if held else 0)


def test_the_twin_is_unchanged_until_a_rebuilt_stage_commits() -> None:
    original, sender = ToyStage(1), TwinSender()
    holder = TwinHolder(original, forward=True)
    deliver(sender, holder, 0, original, gradient(1))
    original.apply(0, gradient(1))
    agree((sender, holder), 0)
    last = ToyStage(2)
    last.load(original.state())
    original.load(state(7))
    sender = TwinSender()
    holder.restart()
    deliver(sender, holder, 1, original, gradient(2))
    assert_same_state(holder.state(), last.state())
    holder.drop()
    assert_same_state(holder.state(), last.state())


def watched_twin(forward: bool, stage: int = 2) -> tuple[TwinHolder, ToyStage]:
    """Return a holder after one commit, and its twin."""
    twin = ToyStage(0)

    class Original:
        shapes = SHAPES

        def twin(self) -> ToyStage:
            return twin

    strategy, copy = Redundant(forward=forward), Copy((stage,), stage - 1)
    sender, holder = strategy.sender(copy, stage), strategy.holder(copy, {stage: Original()})
    assert isinstance(sender, TwinSender) and isinstance(holder, TwinHolder)
    holder.on_forward_output(0, torch.zeros(1))
    assert not twin.shadowed, "a twin without a state computes nothing"
    deliver(sender, holder, 0, ToyStage(1), gradient(1))
    holder.commit(0)
    return holder, twin


def test_twins_compute_forward_passes_until_the_step_ends() -> None:
    holder, twin = watched_twin(forward=True)
    holder.on_forward_output(3, torch.zeros(1))
    holder.on_forward_output(1, torch.zeros(1))
    assert twin.shadowed == [3, 1]
    dropped = twin.dropped
    holder.drop()
    assert twin.dropped == dropped + 1 and not twin.shadowed


@pytest.mark.parametrize(("forward", "stage"), [(False, 2), (True, 0)])
def test_without_forward_and_for_stage_0_twins_only_follow_updates(forward: bool, stage: int) -> None:
    holder, twin = watched_twin(forward, stage)
    holder.on_forward_output(0, torch.zeros(1))
    assert not twin.shadowed


def test_a_malformed_message_is_refused() -> None:
    original = ToyStage(1)
    message = TwinSender().message_before_step(0, original.state())
    assert message is not None
    for moment in ("before", "after"):
        with pytest.raises(PackingError):
            TwinHolder(original, forward=True).take(0, 1, moment, message[:-4])
