"""Mirrors: due steps, and updates by committed steps only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_states import agree, assert_same_state, state

from planaria.models.packing import PackingError
from planaria.models.state import StageState
from planaria.recovery.checkfree_plus import MirrorHolder, MirrorSender, is_renewal_due

GRADIENTS = StageState({})
EVENTS = st.lists(st.sampled_from(["commit", "commit", "drop", "lose sender", "lose both"]), max_size=40)


def make(every: int) -> tuple[MirrorSender, MirrorHolder]:
    return MirrorSender(lambda name: True, every, moments=True), MirrorHolder(every)


def test_a_copy_is_due_in_the_first_step_and_every_kth_one() -> None:
    assert [is_renewal_due(step, 3, False) for step in range(7)] == [False, False, True, False, False, True, False]
    assert all(is_renewal_due(step, 3, True) for step in range(7))
    assert all(is_renewal_due(step, 1, False) for step in range(7))


@given(st.integers(1, 4), EVENTS)
def test_the_copy_is_the_state_of_the_last_committed_due_step(every: int, events: list[str]) -> None:
    sender, holder = make(every)
    step, fresh, held = 0, True, None
    for number, event in enumerate(events):
        if event == "lose sender":
            (sender, _), fresh = make(every), True
            holder.restart()
        elif event == "lose both":
            (sender, holder), fresh, held = make(every), True, None
        else:
            now, due_now = state(number), fresh or (step + 1) % every == 0
            assert sender.updates_first(step) == due_now
            message = sender.after(step, now, GRADIENTS)
            assert (message is not None) == due_now == (holder.expects(step) == ("after",))
            if message is not None:
                holder.take(step, 0, "after", message)
            agree((sender, holder), step, event == "commit")
            if event == "commit":
                step, fresh, held = step + 1, False, now if due_now else held
        if held is not None:
            assert_same_state(holder.state(), held)
            assert holder.nbytes == held.nbytes
        else:
            assert holder.nbytes == 0


def test_a_new_host_receives_a_copy_at_once() -> None:
    sender, _ = make(4)
    sender.commit(0)
    assert not sender.updates_first(1)
    sender.restart()
    assert sender.updates_first(1) and sender.after(1, state(1), GRADIENTS) is not None
    sender.drop()
    assert sender.updates_first(1), "a dropped step does not count"


def test_only_the_wanted_parameters_are_sent() -> None:
    sender = MirrorSender(lambda name: name == "a", 1, moments=False)
    holder = MirrorHolder(1)
    message = sender.after(0, state(3), GRADIENTS)
    assert message is not None
    holder.take(0, 0, "after", message)
    holder.commit(0)
    assert holder.state().weights.keys() == {"a"} and not holder.state().moments


def test_a_malformed_message_is_refused() -> None:
    sender, holder = make(1)
    message = sender.after(0, state(3), GRADIENTS)
    assert message is not None
    with pytest.raises(PackingError):
        holder.take(0, 0, "after", message[:-4])
