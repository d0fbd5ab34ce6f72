"""CheckFree+: donors for every loss, mirrors of stage 0, and partners of the outer stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import ModelConfig
from planaria.models.families import build_stage
from planaria.models.packing import PackingError
from planaria.models.state import StageState
from planaria.recovery.base import Copy, Holder, Sender
from planaria.recovery.checkfree import CheckFree
from planaria.recovery.checkfree_plus import CheckFreePlus, MirrorHolder, MirrorSender
from support.stage_states import INPUTS, SHAPES, ToyStage, agree, assert_same_state, losses, replica, state

GRADIENTS = StageState({})


def plus(**fields: Any) -> CheckFreePlus:
    return CheckFreePlus.model_validate(fields)


@pytest.mark.parametrize("lost", losses(6), ids=lambda lost: "".join(map(str, sorted(lost))) or "none")
def test_every_possible_loss_has_the_expected_donors(lost: frozenset[int]) -> None:
    helpers = {0: (1, 6), 1: (2,), 2: (1, 3), 3: (2, 4), 4: (3, 5), 5: (4, 6), 6: (5,)}
    answer = plus().donors(lost, replica(6))
    reachable = {stage for stage in lost if not lost & set(helpers[stage])}
    assert answer.donors == {stage: helpers[stage] for stage in reachable}
    assert answer.refused.keys() == lost - reachable
    assert not answer.rollback
    for stage, why in answer.refused.items():
        gone = min(lost & set(helpers[stage]))
        assert (f"stage {stage} " in why or f"stages {stage} and" in why) and str(gone) in why, why


def test_incomplete_mirrors_are_not_used() -> None:
    for young in (1, 6):
        answer = plus().donors(frozenset({0, 3}), replica(6, **{f"s{young}": 0}))
        assert answer.refused == {0: f"the mirror of stage 0 at stage {young} is incomplete"}
        assert answer.donors == {3: (2, 4)}, "a middle stage needs no mirror"
    assert plus().donors(frozenset({0}), replica(6, age=1)).donors == {0: (1, 6)}
    assert plus().donors(frozenset({1}), replica(6, age=0)).donors == {1: (2,)}, "nor does an outer one"


def ends_state(tied: bool, seed: int = 5) -> StageState:
    model = ModelConfig(vocab=19, dim=4, layers=4, heads=2, hidden=8, context=4, tied=tied)
    return state(seed, shapes={n: p.shape for n, p in build_stage(model, 4, 0, 0, "meta").named_parameters()})


def mirrors(strategy: CheckFreePlus) -> dict[int, tuple[Sender, Holder]]:
    """Both sides of stage 0's mirrors, by host."""
    original = {0: ToyStage(0, SHAPES)}
    return {copy.host: (strategy.sender(copy, 0), strategy.holder(copy, original)) for copy in strategy.copies(4)}


def mirror(pairs: dict[int, tuple[Sender, Holder]], step: int, now: StageState) -> int:
    """Commit one step that ends in ``now``; return the number of messages."""
    messages = 0
    for sender, holder in pairs.values():
        assert sender.message_before_step(step, now) is None
        message = sender.message_after_gradient(step, now, GRADIENTS)
        assert holder.expects(step) == (() if message is None else ("after",))
        if message is not None:
            holder.take(step, 0, "after", message)
            messages += 1
        sender.commit(step)
        holder.commit(step)
    return messages


def reunited(strategy: CheckFreePlus, pairs: dict[int, tuple[Sender, Holder]]) -> StageState:
    kept = {host: {Copy((0,), host): holder.state()} for host, (_, holder) in pairs.items()}
    given = {host: strategy.donate(0, state(host), kept[host]) for host in pairs}
    return strategy.rebuild(0, given, INPUTS)


@pytest.mark.parametrize("tied", [True, False])
def test_the_mirrors_divide_stage_0(tied: bool) -> None:
    strategy, now = plus(), ends_state(tied)
    pairs = mirrors(strategy)
    mirror(pairs, 0, now)
    held = {host: set(holder.state().weights) for host, (_, holder) in pairs.items()}
    assert held == {1: {"embed_tokens.weight"}, 4: set(now.weights) - {"embed_tokens.weight"}}
    assert sum(holder.nbytes for _, holder in pairs.values()) == sum(t.nbytes for t in now.weights.values())
    assert all(sender.nbytes == 0 for sender, _ in pairs.values())


def test_mirrors_follow_every_kth_step() -> None:
    strategy = plus(mirror_every=3, mirror_moments=True)
    pairs, states = mirrors(strategy), [ends_state(True, seed=s) for s in range(8)]
    sent = []
    for step, now in enumerate(states):
        sent.append(mirror(pairs, step, now))
        due = max(s for s in (0, 2, 5) if s <= step)  # the first one, and then the last of every three
        assert_same_state(reunited(strategy, pairs), states[due])
    assert sent == [2, 0, 2, 0, 0, 2, 0, 0]


@pytest.mark.parametrize(("lost", "partner"), [(1, 2), (6, 5)])
def test_an_outer_stage_becomes_an_exact_copy_of_its_partner(lost: int, partner: int) -> None:
    fresh, kept = plus(), plus(moments="mean", lr_scale=1.3)
    own = state(4, updates=9)
    found = fresh.rebuild(lost, {partner: fresh.donate(lost, own, {})}, INPUTS)
    assert_same_state(found, StageState(own.weights, lr_scale=1.1))
    found = kept.rebuild(lost, {partner: kept.donate(lost, own, {})}, INPUTS)
    assert_same_state(found, StageState(own.weights, own.moments, own.clocks, lr_scale=1.3))


def test_an_outer_stage_with_a_fresh_partner_has_no_moments() -> None:
    strategy, own = plus(moments="copy"), state(4, updates=0)
    assert_same_state(
        strategy.rebuild(1, {2: strategy.donate(1, own, {})}, INPUTS), StageState(own.weights, lr_scale=1.1)
    )


@pytest.mark.parametrize("moments", ["fresh", "mean", "copy"])
def test_a_middle_stage_is_rebuilt_by_checkfree(moments: str) -> None:
    options = {"moments": moments, "omega": "l2", "lr_scale": 1.2}
    one, other = CheckFreePlus.model_validate(options), CheckFree.model_validate(options)
    found, expected = (
        s.rebuild(2, {1: s.donate(2, state(1), {}), 3: s.donate(2, state(3), {})}, INPUTS) for s in (one, other)
    )
    assert_same_state(found, expected)
    assert not torch.equal(found.weights["a"], state(1).weights["a"])


# ---- mirrors: due steps, and updates by committed steps only

EVENTS = st.lists(st.sampled_from(["commit", "commit", "drop", "lose sender", "lose both"]), max_size=40)


def make(every: int) -> tuple[MirrorSender, MirrorHolder]:
    return MirrorSender(lambda name: True, every, moments=True), MirrorHolder(every)


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
            assert sender.needs_applied_update(step) == due_now
            message = sender.message_after_gradient(step, now, GRADIENTS)
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


def test_only_the_wanted_parameters_are_sent() -> None:
    sender = MirrorSender(lambda name: name == "a", 1, moments=False)
    holder = MirrorHolder(1)
    message = sender.message_after_gradient(0, state(3), GRADIENTS)
    assert message is not None
    holder.take(0, 0, "after", message)
    holder.commit(0)
    assert holder.state().weights.keys() == {"a"} and not holder.state().moments


def test_a_malformed_message_is_refused() -> None:
    sender, holder = make(1)
    message = sender.message_after_gradient(0, state(3), GRADIENTS)
    assert message is not None
    with pytest.raises(PackingError):
        holder.take(0, 0, "after", message[:-4])
