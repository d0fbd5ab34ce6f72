"""Every optimizer: its state travels by name, outlives a lost stage, and is refused by another. Muon beside AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config import consent
from planaria.config.schema import OptimConfig
from planaria.models.optimizers import OPTIMIZERS, make_optimizer
from planaria.models.optimizers.muon import MuonBesideAdamW, matrices
from planaria.models.packing import pack, unpack
from planaria.runtime.api.import_export import export_state
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.preparation.requirements import device_needs
from planaria.runtime.preparation.unused_settings import require_used
from planaria.runtime.worker.runner import StageRunner
from planaria.swarm.config.swarm_config import SwarmConfig
from support.recut_runs import begin, losses, recipe, updated
from support.tiny_engine import Recipe, engine_of
from support.tiny_engine import losses as of_engine

KINDS = OPTIMIZERS.names

LION = """
import torch

from planaria.models.optimizers.base import NONE, Optimizer, groups


class Lion(Optimizer):
    keys = ("mean",)
    slow: float = 0.99

    def build(self, named, stage, config, scales=NONE):
        return Signs(groups(named.values(), scales), dict(lr=config.lr, fast=config.beta1, slow=self.slow))


class Signs(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {"step": torch.zeros(()), "mean": torch.zeros_like(p)}
                own = self.state[p]
                own["step"] += 1
                p.sub_(own["mean"].lerp(p.grad, 1 - group["fast"]).sign_(), alpha=group["lr"])
                own["mean"].lerp_(p.grad, 1 - group["slow"])
"""


def test_adamw_without_moments_steps_by_the_sign() -> None:
    """The rule of the recipe `dct`."""
    gradient = torch.tensor([-3.0, -1e-4, 0.0, 1e-6, 5.0])
    parameter = torch.nn.Parameter(torch.zeros(5))
    config = OptimConfig(kind="adamw", lr=0.1, beta1=0.0, beta2=0.0, eps=1e-12)
    stepping = make_optimizer(config).build({"w": parameter}, 1, config)
    for step in range(1, 4):
        parameter.grad = gradient * step
        stepping.step()
        assert torch.allclose(parameter.detach(), -0.1 * step * gradient.sign(), atol=1e-6)


def optim(kind: str) -> dict[str, Any]:
    return {"kind": kind, "lr": {"adamw": 5e-3, "muon": 5e-3, "sgd": 0.5}.get(kind, 1e-3)}


@pytest.fixture
def own_lion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A custom optimizer in a module of the test's folder."""
    (tmp_path / "own_lion.py").write_text(LION)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_lion:Lion"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(drawn=st.data())
def test_the_state_has_the_declared_tensors(kind: str, drawn: st.DataObject) -> None:
    config = OptimConfig.model_validate({**optim(kind), "weight_decay": drawn.draw(st.sampled_from([0.0, 0.1]))})
    rule, updates = make_optimizer(config), drawn.draw(st.integers(1, 4))
    torch.manual_seed(drawn.draw(st.integers(0, 99)))
    named = {"layers.0.a": torch.nn.Parameter(torch.randn(4, 6)), "norm": torch.nn.Parameter(torch.randn(6))}
    built = rule.build(named, 1, config)
    for _ in range(updates):
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter)
        built.step()
    for parameter in named.values():
        held = built.state[parameter]
        assert int(held["step"]) == updates and {*rule.keys} <= held.keys()
        assert all(held[key].shape == parameter.shape and held[key].dtype == torch.float32 for key in rule.keys)
    assert rule.decays(config).keys() <= {*rule.keys}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_bit_for_bit_from_messages_and_files(config: Recipe, kind: str, tmp_path: Path) -> None:
    made = config(optim=optim(kind))
    engine, moved = engine_of(made), engine_of(made)
    assert of_engine(engine, 4) == of_engine(moved, 4)
    for node, runner in moved.runners.items():
        state = runner.state()
        write_stage(tmp_path, runner.stage, 4, state)
        again = read_stage(tmp_path, runner.stage, 4) if node % 2 else unpack(pack(state))
        moved.runners[node] = StageRunner(made, runner.stage, initialise=False)
        moved.runners[node].load(again)
    assert of_engine(moved, 3) == of_engine(engine, 3)


@pytest.mark.parametrize("kind", [*KINDS, "own_lion"])
def test_training_learns_and_continues_after_a_loss(config: Recipe, kind: str, own_lion: str) -> None:
    with consent.permit_code():
        recovery = {"strategy": "checkfree", "options": {"moments": "mean"}}
        made = config(optim=optim(own_lion if kind == "own_lion" else kind), recovery=recovery)
        check(made.model_copy(update={"engine": "inline"}))
        engine = engine_of(made)
        before = of_engine(engine, 12)
        assert before[-1] < before[0] - 0.1
        assert engine.lose([2]).reason == ""
        held = engine.runners[2].state().moments
        assert held and all({*one} == {*make_optimizer(made.optim).keys} for one in held.values()), (
            "the neighbours' mean"
        )
        assert of_engine(engine, 8)[-1] < before[0] - 0.1


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", ["sgd", "muon"])
@pytest.mark.parametrize("strategy", ["redundant", "snapshot"])
def test_a_copy_with_other_state_equals_the_lost_stage(config: Recipe, strategy: str, kind: str) -> None:
    """One tensor, or different ones for matrices and other parameters."""
    made = config(optim=optim(kind), recovery={"strategy": f"{strategy}, checkpoint"})
    disturbed, unbroken = engine_of(made), engine_of(made)
    assert of_engine(disturbed, 5) == of_engine(unbroken, 5)
    assert disturbed.lose([2]).reason == ""
    assert of_engine(disturbed, 4) == of_engine(unbroken, 4)


def test_a_state_of_another_optimizer_is_refused(config: Recipe) -> None:
    runner, other = (StageRunner(config(optim=optim(kind)), 1) for kind in ("adamw", "sgd"))
    engine = engine_of(config(optim=optim("adamw")))
    of_engine(engine, 1)
    runner.load(engine.runners[1].state())
    with pytest.raises(ValueError, match=r"has \['exp_avg', 'exp_avg_sq'\], not \('momentum_buffer',\)"):
        other.load(runner.state())


@pytest.mark.parametrize("kind", ["sgd", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_run_resumes_at_another_cut_but_not_with_another_optimizer(config: Recipe, kind: str, tmp_path: Path) -> None:
    folder = begin(recipe(config, tmp_path, steps=3, optim={**optim(kind), "clip": 0.0}))
    with pytest.raises(UserError, match=rf"--optim.kind adamw: the moments of .* are {kind}'s; .*--train.start"):
        updated(folder, optim__kind="adamw", train__steps=5)
    updated(folder, pipeline__stages=2, train__steps=5)
    whole = begin(recipe(config, tmp_path / "whole", steps=5, optim={**optim(kind), "clip": 0.0}))
    assert losses(folder) == losses(whole)
    with pytest.raises(UserError, match=r"--format dcp supports only AdamW; export the weights"):
        export_state(folder, tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kind": "adam"}, "optim.kind = 'adam': no such choice; did you mean 'adamw'?"),
        ({"kind": "sgd", "options": {"nesterof": True}}, "optim.options.nesterof: no option of 'sgd'; did you mean"),
        ({"kind": "sgd", "options": {"nesterov": 3}}, "optim.options.nesterov = 3: "),
        ({"kind": "adamw", "options": {"nesterov": True}}, "optim.options.nesterov: no option of 'adamw'"),
    ],
)
def test_a_wrong_optimizer_is_one_line_before_any_step(config: Recipe, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        check(config(optim=fields))
    assert str(refused.value).startswith(complaint) and "\n" not in str(refused.value)


def test_unused_settings_are_refused(config: Recipe) -> None:
    for field, value in (("beta2", 0.5), ("eps", 1e-3)):
        require_used(config(optim={**optim("adamw"), field: value}))
        with pytest.raises(UserError, match=f"optim.{field} = .*: this optim.kind does not use it; remove it"):
            require_used(config(optim={**optim("sgd"), field: value}))
    with pytest.raises(ValueError, match=r"optim.options: 'adamw' has none"):
        SwarmConfig.model_validate({"optim": {"options": {"nesterov": True}}})


def test_the_needed_memory_counts_the_optimizers_state(config: Recipe) -> None:
    sizes = {}
    for kind in KINDS:
        made = config(optim=optim(kind))
        made = made.model_copy(update={"train": made.train.model_copy(update={"device": "cuda"})})
        sizes[kind] = device_needs(made).stages[1]
    assert sizes["adamw"] == sizes["muon"] and sizes["sgd"] * 4 == sizes["adamw"] * 3


# ---- Muon: equal to torch's, independent of the cut

MUON: dict[str, Any] = {"kind": "muon", "lr": 5e-3, "clip": 0.0}


def built(named: dict[str, Any], stage: int, optim: OptimConfig, peer_factors: dict[Any, float] | None = None) -> Any:
    return make_optimizer(optim).build(named, stage, optim, peer_factors or {})


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


def test_replicas_average_and_a_lost_stage_is_copied(config: Recipe) -> None:
    engine = engine_of(config(optim=MUON, exchange={"replicas": 2}))
    before = of_engine(engine, 4)
    engine.lose([1])
    assert of_engine(engine, 4)[-1] < before[0]


def test_a_swarm_refuses_muon() -> None:
    with pytest.raises(ValueError, match="peers of a swarm train with 'adamw'"):
        SwarmConfig.model_validate({"optim": {"kind": "muon"}})
