"""The ablation ``copy``: which neighbour is copied, and what of it."""

from __future__ import annotations

import pytest
from stage_states import AT, assert_same_state, losses, replica, state

from planaria.models.state import StageState
from planaria.recovery.neighbour import CopyNeighbour


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_the_stage_before_is_copied_or_else_the_one_after(stages: int) -> None:
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
def test_weights_are_copied_and_moments_if_the_recipe_says_so(moments: str, updates: int) -> None:
    strategy = CopyNeighbour.model_validate({"moments": moments, "lr_scale": 1.2})
    own = state(3, updates=updates)
    rebuilt = strategy.rebuild(2, {1: strategy.give(2, own, {})}, AT)
    if moments == "fresh":
        assert_same_state(rebuilt, StageState(own.weights, lr_scale=1.2))
    else:
        assert_same_state(rebuilt, StageState(own.weights, own.moments, own.clocks, lr_scale=1.2))
