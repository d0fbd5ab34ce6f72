"""Ablations: random weights, the identity, a neighbour's copy. Controls: the state left by a simulated loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig, RecoveryConfig, RunConfig
from planaria.models.families import build_stage
from planaria.models.state import StageState
from planaria.recovery import make_chain
from planaria.recovery.ablations import CopyNeighbour, IdentityStage, Oracle, Redraw, Reset
from planaria.recovery.base import RebuildInputs, Recovery
from planaria.runtime.preparation.config_checks import check
from support.stage_states import INPUTS, assert_same, assert_same_state, losses, replica, state

MODEL = ModelConfig(vocab=20, dim=16, layers=4, heads=2, hidden=24, context=8)
RANDOM, IDENTITY = Redraw(lr_scale=1.4), IdentityStage(lr_scale=1.4)


def draw() -> Mapping[str, Tensor]:
    return {name: p.detach() for name, p in build_stage(MODEL, 2, 1, seed=9).named_parameters()}


@pytest.mark.parametrize(("strategy", "refused"), [(RANDOM, {0}), (IDENTITY, {0}), (Oracle(), set()), (Reset(), set())])
def test_stages_are_rebuilt_without_donors(strategy: Recovery, refused: set[int]) -> None:
    for lost in losses(4):
        answer = strategy.donors(lost, replica(4, age=0))
        assert answer.donors == dict.fromkeys(lost - refused, ())
        assert answer.refused.keys() == lost & refused and answer.rollback is None
    assert strategy.copies(4) == ()


def test_random_weights_are_the_drawn_ones() -> None:
    rebuilt = RANDOM.rebuild(2, {}, RebuildInputs(draw, (0.9, 0.999)))
    assert_same_state(rebuilt, StageState(dict(draw()), lr_scale=1.4))


def test_the_identity_returns_its_input_and_still_learns() -> None:
    rebuilt = IDENTITY.rebuild(2, {}, RebuildInputs(draw, (0.9, 0.999)))
    assert (rebuilt.moments, rebuilt.clocks, rebuilt.lr_scale) == ({}, {}, 1.4)
    stage = build_stage(MODEL, 2, 2, seed=1)
    stage.load_state_dict(rebuilt.weights)
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(stage(x), x)
    stage(x).square().sum().backward()
    moved = {name for name, p in stage.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    outputs = {name for name in rebuilt.weights if name.endswith(("o_proj.weight", "down_proj.weight"))}
    assert len(outputs) == 4 and moved == outputs
    assert_same(
        {name: w for name, w in rebuilt.weights.items() if name not in outputs},
        {name: w for name, w in draw().items() if name not in outputs},
    )


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_the_previous_stage_is_copied_or_else_the_next(stages: int) -> None:
    for lost in losses(stages):
        answer = CopyNeighbour().donors(lost, replica(stages, age=0))
        assert answer.donors.keys() | answer.refused.keys() == lost and not answer.donors.keys() & answer.refused.keys()
        for stage in lost:
            before, after = (1 <= s <= stages and s not in lost for s in (stage - 1, stage + 1))
            if stage == 0:
                assert "ends worker" in answer.refused[0]
            elif before or after:
                assert answer.donors[stage] == (stage - 1 if before else stage + 1,)
            else:
                assert answer.refused[stage] == f"stage {stage} has no neighbour left to copy"


@pytest.mark.parametrize("moments", ["fresh", "copy"])
@pytest.mark.parametrize("updates", [6, 0])
def test_weights_are_copied_and_optionally_moments(moments: str, updates: int) -> None:
    strategy = CopyNeighbour.model_validate({"moments": moments, "lr_scale": 1.2})
    own = state(3, updates=updates)
    rebuilt = strategy.rebuild(2, {1: strategy.donate(2, own, {})}, INPUTS)
    if moments == "fresh":
        assert_same_state(rebuilt, StageState(own.weights, lr_scale=1.2))
    else:
        assert_same_state(rebuilt, StageState(own.weights, own.moments, own.clocks, lr_scale=1.2))


def test_the_oracle_restores_all_and_reset_all_but_the_moments() -> None:
    before = replace(state(3), lr_scale=1.21, scales={"a": 1.1}, generators={"cpu": torch.zeros(3)})
    at = replace(INPUTS, before=before)
    assert_same_state(Oracle().rebuild(2, {}, at), before)
    left = Reset().rebuild(2, {}, at)
    assert_same(left.weights, before.weights)
    assert (left.moments, left.clocks) == ({}, {})
    assert (left.lr_scale, left.scales, left.grad_norm) == (1.21, {"a": 1.1}, before.grad_norm)


def test_a_real_loss_cannot_be_restored() -> None:
    with pytest.raises(LookupError, match="stage 2: the loss was not simulated"):
        Oracle().rebuild(2, {}, INPUTS)


@pytest.mark.parametrize("name", ["oracle", "reset"])
def test_a_control_is_refused_on_the_fleet_and_beside_other_strategies(name: str) -> None:
    config = RunConfig(recovery=RecoveryConfig(strategy=name))
    with pytest.raises(UserError, match=rf"'{name}' is a control for comparisons and restores .*--engine inline"):
        check(config.model_copy(update={"engine": "fleet"}))
    check(config.model_copy(update={"engine": "inline"}))
    with pytest.raises(UserError, match=f"'{name}' is a control that handles every loss; remove the other strategies"):
        make_chain(RecoveryConfig(strategy=f"{name}, checkpoint"), 4)
