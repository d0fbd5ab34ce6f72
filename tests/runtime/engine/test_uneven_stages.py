"""Block stages of unequal sizes: the same model and losses for every division of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.models.families import stage_parameters
from planaria.models.llama_stages import Llama, parameter_count, stage_layers
from planaria.runtime.checkpoint.loading import atoms_of_model
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation.config_checks import check
from support.recut_runs import begin, losses, recipe, updated
from support.tiny_engine import Recipe, engine_of
from support.tiny_engine import losses as of_engine

KEPT = {"strategy": "echo, checkpoint"}
LAYERS = {"layers": 8, "dim": 16, "hidden": 24, "context": 8}


def cut(config: Recipe, layers: list[int] | None, stages: int, ends: int = 0, **sections: Any) -> RunConfig:
    pipeline = {"stages": stages, "layers": layers, "microbatches": 2, "microbatch_size": 2}
    plain = {"recovery": KEPT, "optim": {"clip": 0.0}}
    return config(model=LAYERS | {"ends_layers": ends}, pipeline=pipeline, **(plain | sections))


@pytest.mark.parametrize(("layers", "ends"), [([1, 4, 2, 1], 0), ([5, 3], 0), ([2, 1, 3], 2), ([2, 2, 2, 2], 0)])
def test_every_cut_trains_the_same_model(config: Recipe, layers: list[int], ends: int) -> None:
    made = cut(config, layers, len(layers), ends)
    model = made.model
    held = [len(stage_layers(model, len(layers), stage)) for stage in range(len(layers) + 1)]
    assert held == [ends, *layers]
    assert sum(stage_parameters(model, len(layers), s) for s in range(len(layers) + 1)) == parameter_count(model)
    even = cut(config, None, 4)
    assert of_engine(engine_of(made), 4) == of_engine(engine_of(even), 4)
    assert Llama(model, len(layers)).global_state().keys() == Llama(even.model, 4).global_state().keys()


@pytest.mark.parametrize("strategy", ["redundant", "echo", "snapshot"])
def test_a_lost_stage_of_any_size_is_restored(config: Recipe, strategy: str) -> None:
    made = cut(config, [1, 4, 2, 1], 4, recovery={"strategy": f"{strategy}, checkpoint"})
    disturbed, unbroken = engine_of(made), engine_of(made)
    assert of_engine(disturbed, 5) == of_engine(unbroken, 5)
    for stage in (2, 1, 4):
        assert disturbed.lose([stage]).reason == ""
        after, undisturbed = of_engine(disturbed, 1), of_engine(unbroken, 1)
        assert after == undisturbed or strategy == "echo"


@pytest.mark.slow
def test_a_run_resumes_with_other_sizes(config: Recipe, tmp_path: Path) -> None:
    whole = losses(begin(recipe(config, tmp_path / "whole", recovery=KEPT)))
    folder = begin(recipe(config, tmp_path, steps=10, recovery=KEPT))
    reported = updated(folder, pipeline__layers="[1, 6, 2, 3]", train__steps=15)
    assert any("now 4 stages of [1, 6, 2, 3] layers: re-cut by parameter" in line for line in reported)
    updated(folder, pipeline__stages=3, pipeline__layers="none", train__steps=20)
    assert losses(folder) == whole
    assert len(atoms_of_model(CheckpointStore(folder / "checkpoints").newest())) == 12 * 9 + 2


@pytest.mark.parametrize(
    ("layers", "stages", "why"),
    [
        ([4, 4], 4, r"pipeline.layers = \[4, 4\] are 8 layers in 2 stages; .* require 8 in 4"),
        ([1, 2, 3, 1], 4, r"are 7 layers in 4 stages; model.layers = 8 and pipeline.stages = 4 require 8 in 4"),
        ([0, 4, 3, 1], 4, "greater than 0"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(config: Recipe, layers: list[int], stages: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cut(config, layers, stages)


def test_strategies_that_need_equal_stages_refuse_unequal_ones(config: Recipe) -> None:
    unequal = r"rebuilds a block stage from others of the same size; these have pipeline.layers = \[1, 4, 2, 1\]"
    for strategy in ("checkfree", "uniform", "copy"):
        with pytest.raises(UserError, match=unequal):
            check(cut(config, [1, 4, 2, 1], 4, recovery={"strategy": strategy}))
    with pytest.raises(ValueError, match=r"network.forward_s has one number for stages of \[1, 4, 2, 1\] layers"):
        cut(config, [1, 4, 2, 1], 4, network={"forward_s": [0.1]})
    with pytest.raises(ValueError, match=r"model.block_layers is derived from pipeline.layers"):
        config(model=LAYERS | {"block_layers": [4, 4]}, pipeline={"stages": 2})
    check(cut(config, [2, 2, 2, 2], 4, recovery={"strategy": "checkfree"}))
