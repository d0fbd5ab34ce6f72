"""Controls: what a simulated loss leaves, and that nobody can have them where losses are real."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stage_states import AT, assert_same, assert_same_state, losses, replica, state

from planaria.common.errors import UserError
from planaria.config.schema import RecoveryConfig, RunConfig
from planaria.recovery import recovery
from planaria.recovery.reset import Reset
from planaria.recovery.simulated import Oracle
from planaria.runtime.engine.check import check


@pytest.mark.parametrize("control", [Oracle(), Reset()])
def test_every_loss_is_within_reach_and_takes_nobodys_help(control: Oracle | Reset) -> None:
    for lost in losses(4):
        answer = control.donors(lost, replica(4, age=0))
        assert answer.donors == dict.fromkeys(lost, ()) and not answer.refused and answer.rollback is None
    assert control.copies(4) == ()


def test_the_oracle_gives_all_back_and_reset_all_but_the_moments() -> None:
    before = replace(state(3), lr_scale=1.21, scales={"a": 1.1}, generators={"cpu": torch.zeros(3)})
    at = replace(AT, before=before)
    assert_same_state(Oracle().rebuild(2, {}, at), before)
    left = Reset().rebuild(2, {}, at)
    assert_same(left.weights, before.weights)
    assert (left.moments, left.clocks) == ({}, {})
    assert (left.lr_scale, left.scales, left.grad_norm) == (1.21, {"a": 1.1}, before.grad_norm)


def test_after_a_real_loss_there_is_nothing_to_give_back() -> None:
    with pytest.raises(LookupError, match="stage 2 is lost in earnest"):
        Oracle().rebuild(2, {}, AT)


@pytest.mark.parametrize("name", ["oracle", "reset"])
def test_a_control_is_refused_where_workers_really_die_and_beside_other_strategies(name: str) -> None:
    config = RunConfig(recovery=RecoveryConfig(strategy=name))
    with pytest.raises(UserError, match=rf"'{name}': is a control of comparisons and gives back .*--engine inline"):
        check(config.model_copy(update={"engine": "fleet"}))
    check(config.model_copy(update={"engine": "inline"}))
    with pytest.raises(UserError, match=f"'{name}' is a control and leaves no loss to the others; name it alone"):
        recovery(RecoveryConfig(strategy=f"{name}, checkpoint"), 4)
