"""LLaMAs whose residual stream stays in a subspace: sizes, recovery, export, and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import planaria
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.model_config import SubspaceConfig
from planaria.config.schema import ModelConfig, RunConfig
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.families import build_stage
from planaria.models.llama_stages import Llama, parameter_count, stage_parameters
from planaria.models.subspace import Subspace
from planaria.runtime.api.import_export import export_run, export_state
from planaria.runtime.checkpoint.loading import atoms_of_model
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.preparation.starting_weights import starting_weights
from planaria.runtime.preparation.weight_sources import open_model
from support.dense import dense_state
from support.small_decoders import section, small
from support.tiny_recipe import written

SMALL = ModelConfig(
    vocab=64, dim=48, layers=6, heads=4, kv_heads=2, hidden=40, context=16, tied=False,
    subspace=SubspaceConfig(rank=12, seed=5),
)  # fmt: skip
WIRE = {"kind": "subspace", "rank": 8, "forward": 16, "backward": 16}


def tiny(folder: Path, **settings: Any) -> RunConfig:
    flags = {"model.tied": False, "pipeline.wire": WIRE, "chaos.trace": None, **settings}
    return recipe.load(written(folder), flags)


def outside(space: Subspace, x: Tensor, ids: Tensor) -> float:
    """Return ‖x − x'‖ / ‖x‖, with x' the part of x that the coordinates keep."""
    return float((x - space.restore(space.coordinates(x, ids), ids)).norm() / x.norm())


@pytest.mark.parametrize("ends_layers", [0, 2])
def test_parameter_counts_are_exact(ends_layers: int) -> None:
    config = SMALL.model_copy(update={"ends_layers": ends_layers})
    built = [build_stage(config, 2, stage, 0, "meta") for stage in range(3)]
    own = [sum(p.numel() for p in stage.parameters()) for stage in built]
    assert own == [stage_parameters(config, 2, stage) for stage in range(3)]
    assert parameter_count(config) == sum(own) < parameter_count(config.dense)


def test_all_hidden_states_stay_in_the_subspace_and_the_whole_matrices_compute_the_same() -> None:
    config = SMALL.model_copy(update={"ends_layers": 2, "init_std": 0.3})
    model, space = Llama(config, stages=2, seed=1), Subspace.of(config)
    tokens = torch.randint(0, config.vocab, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x = model.ends.embed(tokens)
        for stage in model.stages:
            assert outside(space, x, tokens) < 1e-6
            x = stage(x)
        assert outside(space, x, tokens) < 1e-6
        dense = Llama(config.dense, initialise=False)
        dense.load_global_state(dense_state(model.global_state(), config))
        assert torch.allclose(dense(tokens), model(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("strategy", ["checkfree", "random", "identity"])
def test_a_rebuilt_stage_writes_to_the_subspace(tmp_path: Path, strategy: str) -> None:
    config = tiny(tmp_path, **{"recovery.strategy": strategy})
    engine, space = ReferenceEngine(config, *planaria.streams(config)), Subspace.of(config.model)
    for _ in range(4):
        engine.train_step()
    assert not engine.lose([2]).reason
    engine.train_step()
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x = engine.runners[0].module.embed(tokens)
        for stage in range(1, 5):
            x = engine.runners[stage].module(x)
            assert outside(space, x, tokens) <= 1e-6


def test_an_exported_model_has_whole_matrices_and_the_same_logits(tmp_path: Path) -> None:
    run = planaria.train(tiny(tmp_path), progress=False)
    saved = run_folders.newest_whole(run.folder)
    exported, _ = open_model(export_run(run.folder, tmp_path / "hf"))
    factored = Llama(saved.manifest.model, stages=4, initialise=False)
    factored.load_global_state({atom.name: atom.read("weights") for atom in atoms_of_model(saved)})
    assert factored.ends.embed_tokens.weight.shape == (257, 8) and exported.config.subspace is None
    tokens = torch.arange(12)[None]
    assert torch.allclose(factored(tokens), exported(tokens), rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="weights that are not stored whole are not supported"):
        export_state(run.folder, tmp_path / "dcp", "dcp")
    with pytest.raises(UserError, match=r"cannot be converted to those of pipeline\.wire"):
        starting_weights(tiny(tmp_path, **{"train.start": str(run.folder)}))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pipeline.wire": {**WIRE, "rank": 40}}, r"wire\.rank = 40: more dimensions than model.dim = 32"),
        ({"model.tied": True}, "set model.tied = false"),
        ({"model.share": 2}, "remove model.share = 2"),
        ({"exchange.replicas": 2, "exchange.coded": "gc", "pipeline.wire": {**WIRE, "backward": 4}}, "at random"),
    ],
)
def test_incompatible_settings_are_refused(tmp_path: Path, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as refused:
        check(tiny(tmp_path, **settings))
    assert "\n" not in str(refused.value)


def test_a_family_without_projections_is_refused(tmp_path: Path) -> None:
    model = section(small("llama")).model_dump(exclude_unset=True)
    config = RunConfig.model_validate({"model": model, "pipeline": {"stages": 2, "wire": WIRE}})
    with pytest.raises(UserError, match=r"family = 'transformers' has no subspace projections; use \"6/4\""):
        check(config)


def test_the_subspace_follows_from_wire_and_seed(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    assert config.model.subspace == SubspaceConfig(rank=8, seed=config.seed)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.with_seed(6).model.subspace == SubspaceConfig(rank=8, seed=6)
    assert recipe.with_flags(config, {"seed": 6}).model.subspace == SubspaceConfig(rank=8, seed=6)
    assert recipe.with_flags(config, {"pipeline.wire": "bf16"}).model.subspace is None
    with pytest.raises(ValueError, match=r"follows from pipeline\.wire and seed"):
        RunConfig.model_validate({**config.model_dump(), "seed": 6})
