"""Chains: each stage goes to the first strategy that can rebuild it; the rest rolls back or has reasons."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import RecoveryConfig
from planaria.models.state import StageState
from planaria.recovery import RECOVERIES, make_chain, strategy_names
from planaria.recovery.base import Copy, DamagedReplica
from planaria.recovery.chain import Chain, ChainPlan, CopySlot
from planaria.recovery.checkfree import merge
from support.stage_states import INPUTS, assert_same_state, replica, state, weights

ROLLBACK, NOTHING = ChainPlan({}, "disk", ""), ChainPlan({}, None, "")


def chain_of(strategy: str, stages: int = 6, **options: Any) -> Chain:
    return make_chain(RecoveryConfig(strategy=strategy, options=Options(options)), stages)


def plan(strategy: str, lost: set[int], age: int = 100, **young: int) -> ChainPlan:
    return chain_of(strategy).plan(frozenset(lost), replica(6, age, **young).staleness)


@pytest.mark.parametrize(
    ("strategy", "lost", "young", "expected"),
    [
        ("checkfree, echo", {1, 3}, {}, ChainPlan({1: ("echo", (2,)), 3: ("checkfree", (2, 4))}, None, "")),
        ("echo, checkfree", {1, 3}, {}, ChainPlan({1: ("echo", (2,)), 3: ("echo", (4,))}, None, "")),
        ("echo, checkfree", {3}, {"s4": 1}, ChainPlan({3: ("checkfree", (2, 4))}, None, "")),
        ("checkfree, checkpoint", {3}, {}, ChainPlan({3: ("checkfree", (2, 4))}, None, "")),
        ("checkfree, checkpoint", {1, 3}, {}, ROLLBACK),
        ("checkpoint", {4}, {}, ROLLBACK),
        ("checkfree_plus, echo, checkpoint", {0, 1}, {"age": 0}, ROLLBACK),
        *((strategy, set(), {}, NOTHING) for strategy in ("checkfree", "checkpoint", "checkfree, checkpoint")),
    ],
)
def test_each_stage_goes_to_the_first_strategy_that_can_rebuild_it(
    strategy: str, lost: set[int], young: dict[str, int], expected: ChainPlan
) -> None:
    assert plan(strategy, lost, **young) == expected


def test_a_stage_that_another_strategy_rebuilds_is_no_donor() -> None:
    found = plan("checkfree, echo", {3, 4, 6})
    assert 3 not in found.rebuilt and "stage 3's echo was at stage 4, which is lost too" in found.reason


def test_the_reason_names_every_strategy_and_only_unrecoverable_stages() -> None:
    assert plan("checkfree, redundant, echo", {0, 1, 6}).reason == (
        "checkfree cannot rebuild it: the ends worker (stage 0) holds the only embedding and head; "
        "echo cannot rebuild it: stage 0's echo was at stage 1, which is lost too; "
        "redundant cannot rebuild it: stage 0's twin was at stage 6, which is lost too"
    )


TWO_SNAPSHOTS = {"snapshot", "whole_copies"}
"""both retain snapshots of all stages, which is refused"""
REAL = [name for name in RECOVERIES.names if not RECOVERIES.find(name).control_description]
"""all but controls, which must be alone"""
strategies = st.lists(st.sampled_from(REAL), min_size=1, max_size=4, unique=True).filter(
    lambda chosen: not set(chosen) >= TWO_SNAPSHOTS
)


@given(
    strategies,
    st.frozensets(st.integers(0, 6)),
    st.lists(st.integers(0, 5), min_size=7, max_size=7),
    st.sets(st.integers(0, 6)),
)
def test_every_lost_stage_is_rebuilt_by_live_donors_or_rolled_back_or_refused(
    chosen: list[str], lost: frozenset[int], staleness: list[int], with_snapshot: set[int]
) -> None:
    chain, by_stage = chain_of(", ".join(chosen)), dict(enumerate(staleness))
    replica = DamagedReplica(6, by_stage, frozenset(with_snapshot - lost))
    found = chain.plan(lost, by_stage, replica.with_snapshot)
    beyond = lost - found.rebuilt.keys()
    if found.rollback:
        assert "checkpoint" in chosen and not found.rebuilt and lost
    else:
        assert found.rebuilt.keys() <= lost
        assert bool(found.reason) == bool(beyond) and (not beyond or "checkpoint" not in chosen)
    answers = {name: each.donors(lost, replica) for name, each in chain.strategies.items()}
    for stage, (by, donors) in found.rebuilt.items():
        assert not lost & set(donors)
        assert by == next(name for name in chosen if stage in answers[name].donors)
        assert donors == answers[by].donors[stage]
    for stage in beyond if found.reason else ():
        for name in chosen:
            assert f"{name} cannot rebuild it: {answers[name].refused[stage]}" in found.reason.split("; ")


def test_slots_hold_the_copies_of_all_strategies() -> None:
    chain = chain_of("checkfree_plus, checkfree, echo", stages=2)
    assert chain.slots == [
        CopySlot("checkfree_plus", Copy((0,), 1)),
        CopySlot("checkfree_plus", Copy((0,), 2)),
        CopySlot("echo", Copy((0,), 1)),
        CopySlot("echo", Copy((1,), 2)),
        CopySlot("echo", Copy((2,), 0)),
    ]


def test_each_strategy_sends_and_rebuilds_on_its_own() -> None:
    chain, own, kept = chain_of("checkfree, redundant", lr_scale=1.5), state(1), state(2)
    assert_same_state(chain.strategies["redundant"].donate(3, own, {Copy((3,), 2): kept}), kept)
    assert_same_state(chain.strategies["redundant"].rebuild(3, {2: kept}, INPUTS), kept)
    checkfree = chain.strategies["checkfree"]
    given_ = {2: checkfree.donate(3, own, {Copy((3,), 2): kept}), 4: StageState(weights(4), grad_norm=1.5)}
    expected = merge(weights(1), weights(4), 1.5**2, 1.5**2)
    assert_same_state(checkfree.rebuild(3, given_, INPUTS), StageState(expected, lr_scale=1.5))


def test_names_may_have_spaces_around_them() -> None:
    assert strategy_names(RecoveryConfig(strategy=" echo ,checkpoint")) == ["echo", "checkpoint"]
    assert list(chain_of(" echo ,checkpoint").strategies) == ["echo", "checkpoint"]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("chekfree", r"'chekfree': no such choice; did you mean 'checkfree'\?"),
        ("echo, chekpoint", r"'chekpoint': no such choice; did you mean 'checkpoint'\?"),
        ("echo, checkpoint, echo", r"'echo' is listed twice; remove one"),
        ("echo,", r"'': no such choice; known here: checkfree, "),
        ("", r"recovery.strategy = '': no such choice"),
    ],
)
def test_invalid_strategies_are_refused(strategy: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chain_of(strategy)
