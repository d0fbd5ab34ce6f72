"""Muon beside AdamW: equal to torch's, independent of the cut; its states move, are kept and merged like AdamW's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_recut_runs import begin, losses, recipe, updated
from tiny import Recipe, engine_of
from tiny import losses as of_engine

from planaria.common.errors import UserError
from planaria.config.schema import OptimConfig
from planaria.models.optimizers import optimizer
from planaria.models.optimizers.muon import MuonBesideAdamW, matrices
from planaria.runtime.import_export import export_state
from planaria.runtime.worker.runner import StageRunner
from planaria.swarm.config import SwarmConfig

MUON: dict[str, Any] = {"kind": "muon", "lr": 5e-3, "clip": 0.0}


def built(named: dict[str, Any], stage: int, optim: OptimConfig, scales: dict[Any, float] | None = None) -> Any:
    return optimizer(optim).build(named, stage, optim, scales or {})


def test_muon_updates_the_matrices_of_layers_alone(config: Recipe) -> None:
    made = config(model={"layers": 6, "ends_layers": 2}, optim=MUON)
    ends, block = StageRunner(made, 0), StageRunner(made, 1)
    chosen = []
    for runner in (ends, block):
        ids = {id(p) for p in matrices(runner.parameters, runner.stage)}
        chosen.append({name for name, p in runner.parameters.items() if id(p) in ids})
    assert all(name.startswith("layers.") and "norm" not in name for names in chosen for name in names)
    assert len(chosen[0]) == 2 * 7 and len(chosen[1]) == 7
    assert isinstance(built(block.parameters, 1, OptimConfig()), torch.optim.AdamW)


def test_an_update_equals_torchs() -> None:
    optim = OptimConfig.model_validate({**MUON, "weight_decay": 0.1})
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(t) for t in (torch.ones(3, 5), torch.ones(4))] for _ in range(2))
    both = built({"layers.0.a": ours[0], "norm": ours[1]}, 0, optim)
    assert isinstance(both, MuonBesideAdamW)
    muon = torch.optim.Muon(theirs[:1], lr=5e-3, weight_decay=0.1, momentum=optim.beta1, adjust_lr_fn="match_rms_adamw")
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(theirs[1:], lr=5e-3, betas=betas, eps=optim.eps, weight_decay=0.1, fused=True)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        both.step()
        muon.step()
        adamw.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert torch.equal(both.state[ours[0]]["exp_avg"], muon.state[theirs[0]]["momentum_buffer"])
    assert both.state[ours[0]]["step"] == 3 and not both.state[ours[0]]["exp_avg_sq"].any()


def test_matrices_keep_their_own_learning_rates() -> None:
    matrix, other = torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(3, 5))
    named = {"layers.0.a": matrix, "layers.0.b": other}
    both = built(named, 1, OptimConfig.model_validate(MUON), {matrix: 2.0})
    groups = {group["scale"]: group["params"] for group in both.param_groups if group["params"]}
    assert groups == {2.0: [matrix], None: [other]}
    for group in both.param_groups:
        group["lr"] = 0.1 * (group["scale"] or 1.0)
    matrix.grad, other.grad = (torch.arange(15.0).reshape(3, 5) for _ in range(2))
    both.step()
    moved = [(1 - p.detach()) for p in (matrix, other)]
    assert torch.allclose(moved[0], 2 * moved[1], atol=1e-6) and moved[1].any()
    alone = built({"layers.0.a": matrix}, 1, OptimConfig.model_validate(MUON), {matrix: 2.0})
    alone.step()


@pytest.mark.slow
def test_training_learns_the_same_at_every_cut(config: Recipe) -> None:
    runs = []
    for stages, ends in ((4, 0), (2, 0), (2, 2)):
        model = {"layers": 4, "ends_layers": ends}
        runs.append(of_engine(engine_of(config(model=model, pipeline={"stages": stages}, optim=MUON)), 10))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][-1] < runs[0][0] - 0.3
    assert runs[0] != of_engine(engine_of(config(optim={**MUON, "kind": "adamw"})), 10)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("strategy", ["checkfree", "echo", "redundant", "snapshot"])
def test_training_continues_after_a_loss(config: Recipe, strategy: str) -> None:
    made = config(optim=MUON, recovery={"strategy": f"{strategy}, checkpoint"})
    struck, unbroken = engine_of(made), engine_of(made)
    assert of_engine(struck, 5) == of_engine(unbroken, 5)
    assert struck.lose([2]).reason == ""
    after, untroubled = of_engine(struck, 4), of_engine(unbroken, 4)
    assert after == untroubled or strategy in ("checkfree", "echo")
    assert after[-1] < after[0] + 0.05


def test_replicas_average_and_a_lost_stage_is_copied(config: Recipe) -> None:
    engine = engine_of(config(optim=MUON, exchange={"replicas": 2}))
    before = of_engine(engine, 4)
    engine.lose([1])
    assert of_engine(engine, 4)[-1] < before[0]


@pytest.mark.slow
def test_a_run_resumes_at_another_cut_but_not_with_adamw(config: Recipe, tmp_path: Path) -> None:
    whole = losses(begin(recipe(config, tmp_path / "whole", steps=10, optim=MUON)))
    folder = begin(recipe(config, tmp_path, steps=5, optim=MUON))
    with pytest.raises(UserError, match=r"--optim.kind adamw: the moments of .* are muon's; .*--train.start"):
        updated(folder, optim__kind="adamw", train__steps=10)
    updated(folder, pipeline__stages=2, train__steps=10)
    assert losses(folder) == whole
    with pytest.raises(UserError, match=r"--format dcp supports only AdamW; export the weights"):
        export_state(folder, tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()


def test_a_swarm_refuses_muon() -> None:
    with pytest.raises(ValueError, match="peers of a swarm train with 'adamw'"):
        SwarmConfig.model_validate({"optim": {"kind": "muon"}})
