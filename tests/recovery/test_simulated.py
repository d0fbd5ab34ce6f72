"""Controls: the state left by a simulated loss, and refusal where losses are real."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stage_states import AT, assert_same, assert_same_state, losses, replica, state

from planaria.common.errors import UserError
from planaria.config.schema import RecoveryConfig, RunConfig
from planaria.recovery import recovery
from planaria.recovery.simulated import Oracle, Reset
from planaria.runtime.engine.config_checks import check


@pytest.mark.parametrize("control", [Oracle(), Reset()])
def test_every_loss_is_recoverable_without_donors(control: Oracle | Reset) -> None:
    for lost in losses(4):
        answer = control.donors(lost, replica(4, age=0))
        assert answer.donors == dict.fromkeys(lost, ()) and not answer.refused and answer.rollback is None
    assert control.copies(4) == ()


def test_the_oracle_restores_all_and_reset_all_but_the_moments() -> None:
    before = replace(state(3), lr_scale=1.21, scales={"a": 1.1}, generators={"cpu": torch.zeros(3)})
    at = replace(AT, before=before)
    assert_same_state(Oracle().rebuild(2, {}, at), before)
    left = Reset().rebuild(2, {}, at)
    assert_same(left.weights, before.weights)
    assert (left.moments, left.clocks) == ({}, {})
    assert (left.lr_scale, left.scales, left.grad_norm) == (1.21, {"a": 1.1}, before.grad_norm)


def test_a_real_loss_cannot_be_restored() -> None:
    with pytest.raises(LookupError, match="stage 2 was really lost"):
        Oracle().rebuild(2, {}, AT)


@pytest.mark.parametrize("name", ["oracle", "reset"])
def test_a_control_is_refused_on_the_fleet_and_beside_other_strategies(name: str) -> None:
    config = RunConfig(recovery=RecoveryConfig(strategy=name))
    with pytest.raises(UserError, match=rf"'{name}' is a control for comparisons and restores .*--engine inline"):
        check(config.model_copy(update={"engine": "fleet"}))
    check(config.model_copy(update={"engine": "inline"}))
    with pytest.raises(UserError, match=f"'{name}' is a control and leaves no loss to the others; name it alone"):
        recovery(RecoveryConfig(strategy=f"{name}, checkpoint"), 4)
