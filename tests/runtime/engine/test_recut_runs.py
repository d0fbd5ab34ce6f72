"""Runs that resume in another shape: the same losses where nothing is averaged, and every sample used once."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import planaria
from planaria.common.errors import UserError
from planaria.control.log.reader import read_run
from planaria.report.run.sample_ledger import prove_exactly_once, sample_ledger
from planaria.runtime.checkpoint.loading import load_stage
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.resumption import resumption_of
from planaria.runtime.worker.runner import StageRunner
from support.recut_runs import begin, losses, recipe, updated
from support.tiny_engine import Recipe, config_in, engine_of


def newest(folder: Path) -> Path:
    saved = CheckpointStore(folder / "checkpoints").newest()
    return saved.folder


def both(corpus: Path, home: Path, **sections: Any) -> tuple[Path, dict[int, float]]:
    """Return a run of 20 steps at 4 stages, and the losses of one of 40."""
    make = partial(config_in, corpus)
    through = begin(recipe(make, home / "through", steps=40, **sections))
    return begin(recipe(make, home / "parted", **sections)), losses(through)


@pytest.fixture(scope="module")
def parted(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    return both(corpus_folder, tmp_path_factory.mktemp("parted"))


@pytest.fixture(scope="module")
def bounded(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The same with a clip that binds in every step, in every layer."""
    return both(corpus_folder, tmp_path_factory.mktemp("bounded"), optim={"clip": 1e-3, "clip_by": "layer"})


@pytest.fixture
def folder(parted: tuple[Path, dict[int, float]], tmp_path: Path) -> Path:
    """A copy of the parted run."""
    return Path(shutil.copytree(parted[0], tmp_path / "runs" / "run"))


@pytest.fixture
def through(parted: tuple[Path, dict[int, float]]) -> dict[int, float]:
    """The losses of the unbroken run."""
    return parted[1]


@pytest.fixture
def clipped(bounded: tuple[Path, dict[int, float]], tmp_path: Path) -> Path:
    """A copy of the parted run with a clip that binds."""
    return Path(shutil.copytree(bounded[0], tmp_path / "runs" / "run"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stages", [1, 2, 12])
def test_a_recut_run_equals_an_unbroken_one(folder: Path, through: dict[int, float], stages: int) -> None:
    """To the last bit; and at the old cut again after that."""
    output = updated(folder, pipeline__stages=stages, train__steps=30)
    assert f"{folder}: continues with pipeline.stages = {stages} (was 4)" in output
    recut = f"of 4 stages, now {stages} stage{'s' * (stages > 1)}: re-cut by parameter"
    assert any(recut in line and "clip" not in line for line in output)
    updated(folder, pipeline__stages=4, train__steps=40)
    assert losses(folder) == through
    assert prove_exactly_once(read_run(folder)) == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"pipeline__stages": n} for n in (1, 2, 12)] + [{"model__ends_layers": 4}])
def test_a_clip_by_layer_is_the_same_at_every_cut(clipped: Path, bounded: Any, flags: dict[str, int]) -> None:
    output = updated(clipped, **flags, train__steps=40)
    assert losses(clipped) == bounded[1]
    assert not any("optim.clip" in line for line in output)


@pytest.mark.slow
def test_a_clip_by_stage_differs_between_cuts(clipped: Path, bounded: Any) -> None:
    updated(clipped, pipeline__stages=2, optim__clip_by="stage", train__steps=24)
    assert losses(clipped)[23] != bounded[1][23]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("exchange", [{"replicas": 2}, {"replicas": 3, "kind": "noloco", "options": {"every": 3}}])
def test_replicas_clip_by_layer_equally_at_every_cut(exchange: dict[str, Any], config: Recipe, tmp_path: Path) -> None:
    """The mean gradient of all-reduced replicas is clipped, and each one's own otherwise."""
    sections: dict[str, Any] = {"exchange": exchange, "optim": {"clip": 1e-3, "clip_by": "layer"}}
    through = begin(recipe(config, tmp_path / "through", steps=8, **sections))
    folder = begin(recipe(config, tmp_path / "parted", steps=5, **sections))
    updated(folder, pipeline__stages=2, train__steps=8)
    assert losses(folder) == losses(through)


def test_log_and_report_name_every_other_shape(folder: Path, parted: tuple[Path, dict[int, float]]) -> None:
    updated(folder, pipeline__stages=2, train__steps=21)
    updated(folder, train__steps=22)
    updated(folder, exchange__replicas=2, optim__clip=0.5, pipeline__stages=1, train__steps=23)
    parts = [started.recut for _, started in read_run(folder).starts]
    assert [part if part is None else str(part) for part in parts] == [
        None,
        "step-00000020: 4 stages, now 2 stages",
        None,
        "step-00000022: 2 stages, now 1 stage, 2 replicas (allreduce)",
    ]
    report = (folder / "report.html").read_text()
    assert "<h2>Checkpoints</h2>" in report and "re-cut by parameter, with moments" in report
    assert "of 1 replica, now 2 replicas: they begin from copies of the one model<" in report
    assert "<h2>Checkpoints</h2>" not in (parted[0] / "report.html").read_text()


@pytest.mark.slow
def test_layers_can_move_to_stage_0(folder: Path, through: dict[int, float]) -> None:
    updated(folder, model__ends_layers=2, pipeline__stages=5, train__steps=30)
    assert losses(folder) == {step: loss for step, loss in through.items() if step < 30}


def test_without_moments_the_losses_would_differ(
    folder: Path, through: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StageRunner.load

    def bare(self: StageRunner, state: Any) -> None:
        real(self, state.part(lambda name: True, moments=False))

    monkeypatch.setattr(StageRunner, "load", bare)
    updated(folder, pipeline__stages=2, train__steps=24)
    found = losses(folder)
    assert found[20] == through[20] and found[23] != through[23]


@pytest.mark.slow
def test_a_clip_that_binds_differently_is_reported(config: Recipe, tmp_path: Path) -> None:
    folder = begin(recipe(config, tmp_path, steps=2))
    output = updated(folder, pipeline__stages=2, train__steps=3, optim__clip=0.5)
    assert any("optim.clip = 0.5 bounds each stage's gradient" in line and "clip_by layer" in line for line in output)


def test_a_learning_rate_that_jumps_is_reported(config: Recipe, tmp_path: Path) -> None:
    folder = begin(recipe(config, tmp_path, steps=2, optim={"lr": 0.01, "schedule": "cosine"}))
    lines: list[str] = []
    resumption_of(folder, {"train.steps": 4}, None, lines.append)
    (line,) = (line for line in lines if "learning rate" in line)
    assert "of step 2 is 0.0055, and was 0.001 by the former schedule" in line and "train.schedule_steps" in line


def test_parameters_of_a_rebuilt_stage_keep_their_clock_and_scale(config: Recipe, tmp_path: Path) -> None:
    """CheckFree rebuilds stage 2 of 4; at 2 stages its layers live in stage 1, beside those of the old stage 1."""
    from planaria.faults.trace import Fault, Trace, trace_text

    trace = tmp_path / "trace.json"
    trace.write_text(trace_text(Trace(faults=(Fault(step=3, stage=2),))))
    folder = begin(recipe(config, tmp_path, steps=8, chaos={"trace": str(trace)}))
    rebuilt = read_stage(newest(folder), 2, 8)
    assert (set(rebuilt.clocks.values()), rebuilt.lr_scale) == ({5}, 1.1)
    two = run_folders.config_of(folder).model_copy(update={"pipeline": recipe(config, tmp_path, 2).pipeline})
    found = load_stage(newest(folder), two, 1)
    for name, clock in found.clocks.items():
        old = int(name.split(".")[1]) >= 3
        assert (clock, found.scales.get(name, found.lr_scale)) == ((5, 1.1) if old else (8, 1.0))
    before = {name: weight.clone() for name, weight in found.weights.items()}
    runner = StageRunner(two, 1)
    runner.load(found)
    moved = step_of(runner, dict.fromkeys(before, 0.25))
    plain = StageRunner(two, 1)
    plain.load(load_stage(newest(folder), two, 1).part(lambda name: True, moments=True))
    plain.scales = {}
    for group in plain.optimizer.param_groups:
        group["scale"] = None
    apart = step_of(plain, dict.fromkeys(before, 0.25))
    for name in before:
        tall = float((moved[name] - before[name]).norm() / (apart[name] - before[name]).norm())
        ratio = found.scales.get(name, found.lr_scale) / found.lr_scale
        assert tall == pytest.approx(ratio, rel=1e-3)
    state = runner.state()
    assert state.scales == found.scales and state.clocks == {n: clock + 1 for n, clock in found.clocks.items()}


def step_of(runner: StageRunner, size: dict[str, float]) -> dict[str, torch.Tensor]:
    """The weights after an update with a gradient of these sizes."""
    runner.set_gradients({name: torch.full_like(p, size[name]) for name, p in runner.parameters.items()})
    runner._pending.norms = (1.0, 1.0)
    runner.commit(8)
    return {name: weight.clone() for name, weight in runner.state().weights.items()}


NOLOCO = {"kind": "noloco", "options": {"every": 3, "bits": 8}}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("exchange", "flags"),
    [
        (NOLOCO | {"replicas": 3}, {"exchange.replicas": 2, "pipeline.stages": 2}),
        pytest.param(
            NOLOCO | {"replicas": 2}, {"exchange.replicas": 3, "pipeline.microbatches": 3}, marks=pytest.mark.slow
        ),
        ({"replicas": 2, "options": {"bits": 8}}, {"exchange.replicas": 3, "pipeline.stages": 6}),
        pytest.param(
            {"replicas": 3},
            {"exchange.kind": "noloco", "exchange.options.every": 2, "pipeline.stages": 1},
            marks=pytest.mark.slow,
        ),
        (NOLOCO | {"replicas": 3}, {"exchange.replicas": 1, "pipeline.microbatch_size": 5}),
    ],
)
def test_every_sample_is_used_once_in_any_shape(
    exchange: dict[str, Any], flags: dict[str, Any], config: Recipe, tmp_path: Path
) -> None:
    given = recipe(config, tmp_path, steps=5, exchange=exchange)
    folder = begin(given)
    output: list[str] = []
    planaria.train(folder, resume=True, settings={**flags, "train.steps": 9}, progress=False, notify=output.append)
    assert all(any(f"{name} = " in line for line in output) for name in flags), output
    record = read_run(folder)
    assert prove_exactly_once(record) == []
    after = run_folders.config_of(folder)
    assert max(line.span[1] for line in sample_ledger(record)) == 5 * given.samples + 4 * after.samples
    assert all(0 < loss < 7 for loss in losses(folder).values())


@pytest.mark.slow
def test_replicas_at_another_cut_keep_their_own_state(config: Recipe, tmp_path: Path) -> None:
    """Rounds, residuals and momentum included: the losses equal those of an unbroken run."""
    exchange = NOLOCO | {"replicas": 2, "options": {"every": 3}}
    through = begin(recipe(config, tmp_path / "through", steps=11, exchange=exchange))
    folder = begin(recipe(config, tmp_path / "parted", steps=7, exchange=exchange))
    updated(folder, pipeline__stages=2, train__steps=11)
    assert losses(folder) == losses(through)
    assert prove_exactly_once(read_run(folder)) == []


TABLE = "embed_tokens.weight"


@pytest.mark.slow
def test_a_vocabulary_grows_and_shrinks_again(folder: Path, through: dict[int, float]) -> None:
    """New rows are the mean of the others, moments too; removed again, they leave no trace."""
    before = load_stage(newest(folder), run_folders.config_of(folder), 0)
    output = updated(folder, model__vocab=320, pipeline__stages=2, train__steps=21)
    assert any(
        "of 257 tokens, now 320: embedding and head get 63 new rows, each the mean of all others" in line
        for line in output
    ), output
    assert 0 < abs(losses(folder)[20] - through[20]) < 0.3
    later = run_folders.config_of(folder)
    (first,) = (saved for saved in CheckpointStore(folder / "checkpoints").list() if saved.step == 20)
    more = load_stage(first.folder, later, 0)
    pairs = [
        (before.weights[TABLE], more.weights[TABLE]),
        *zip(before.moments[TABLE].values(), more.moments[TABLE].values(), strict=True),
    ]
    for was, now in pairs:
        assert now.shape == (320, 16) and torch.equal(now[:257], was)
        assert torch.equal(now[257:], was.mean(0).expand(63, -1))
    assert more.clocks == before.clocks and torch.equal(more.weights["norm.weight"], before.weights["norm.weight"])
    output = updated(folder, model__vocab=257, train__steps=22)
    assert any("now 257: embedding and head lose their last 63 rows" in line for line in output), output
    assert load_stage(newest(folder), run_folders.config_of(folder), 0).weights[TABLE].shape == (257, 16)
    assert "320 tokens, now 257" in str(read_run(folder).starts[-1][1].recut)


@pytest.mark.slow
def test_a_vocabulary_grows_with_replicas_residuals(config: Recipe, tmp_path: Path) -> None:
    folder = begin(recipe(config, tmp_path, steps=4, exchange=NOLOCO | {"replicas": 2}, model={"tied": False}))
    updated(folder, model__vocab=260, exchange__replicas=3, train__steps=6)
    state = load_stage(newest(folder), run_folders.config_of(folder), 0, 2)
    for name in (TABLE, "lm_head.weight"):
        shapes = {tuple(tensor.shape) for key, tensor in state.outer.items() if key.endswith(f"/{name}")}
        assert shapes == {(260, 16)} == {tuple(state.weights[name].shape)}


@pytest.mark.slow
def test_the_tokenizer_stays_with_another_vocabulary(config: Recipe, tmp_path: Path) -> None:
    """A new run would train a tokenizer of the vocabulary's size."""
    given = recipe(config, tmp_path, steps=2, data={"tokenizer": "bpe"}, model={"vocab": 280})
    folder = begin(given)
    with pytest.raises(UserError, match=r"--model.vocab 270: .* tokenizer has 280 ids; use 280 or more"):
        resumption_of(folder, {"model.vocab": 270}, None, lambda line: None)
    before = (folder / run_folders.TOKENIZER).read_bytes()
    updated(folder, model__vocab=300, train__steps=3)
    assert (folder / run_folders.TOKENIZER).read_bytes() == before
    moved = folder.rename(folder.with_name("moved"))
    updated(moved, train__steps=4)
    assert (moved / run_folders.TOKENIZER).read_bytes() == before and len(losses(moved)) == 4


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        ({"model.vocab": 256}, "--model.vocab 256: "),
        ({"pipeline.stages": 5}, "model.layers = 12 does not divide into pipeline.stages = 5"),
        ({"model.dim": 32}, "--model.dim 32: cannot change"),
        ({"seed": 4}, "--seed 4: cannot change"),
        ({"data.validation": 0.3}, "--data.validation 0.3: cannot change"),
    ],
)
def test_fixed_settings_cannot_change(
    parted: tuple[Path, dict[int, float]], flags: dict[str, Any], output: str
) -> None:
    with pytest.raises(UserError) as caught:
        resumption_of(parted[0], {**flags, "train.steps": 30}, None, lambda line: None)
    assert output in str(caught.value) and "\n" not in str(caught.value)


def test_recut_states_load_into_an_engine_of_that_cut(
    parted: tuple[Path, dict[int, float]], config: Recipe, tmp_path: Path
) -> None:
    """Every state of the checkpoint loads into a runner of the other cut, and is returned unchanged."""
    two = run_folders.config_of(parted[0]).model_copy(update={"pipeline": recipe(config, tmp_path, 2).pipeline})
    engine = engine_of(two)
    engine.load_states({stage: load_stage(newest(parted[0]), two, stage) for stage in range(3)})
    for stage, runner in engine.runners.items():
        expected, got = load_stage(newest(parted[0]), two, stage), runner.state()
        assert all(torch.equal(got.weights[n], w) for n, w in expected.weights.items())
        for name, pair in expected.moments.items():
            assert all(torch.equal(a, b) for a, b in zip(got.moments[name].values(), pair.values(), strict=True))
        assert (got.clocks, got.lr_scale, got.grad_norm) == (expected.clocks, expected.lr_scale, expected.grad_norm)


@pytest.mark.slow
def test_a_run_takes_up_a_schedule_and_leaves_it_again(config: Recipe, tmp_path: Path) -> None:
    """Every node of a stage begins from its stage; the file goes along with the run."""
    from support.schedules import on_schedule, shape

    sections = shape(0.0)
    (tmp_path / "plan").mkdir()
    plan = on_schedule(config(**sections), tmp_path / "plan").routing.schedule
    made = config(pipeline=sections["pipeline"], train={"steps": 4}, observe={"trackers": ""})
    folder = begin(made.model_copy(update={"engine": "inline", "out": str(tmp_path / "runs")}))
    output = updated(folder, routing__schedule=plan, train__steps=6)
    assert any("continues with a schedule" in line for line in output)
    assert plan is not None
    assert run_folders.config_of(folder).routing.schedule == str((folder / run_folders.SCHEDULE).absolute())
    Path(plan).unlink()
    with pytest.raises(UserError, match=r"has 4 block stages; pipeline.stages = 2"):
        updated(folder, pipeline__stages=2, train__steps=8)
    output = updated(folder, routing__schedule="none", pipeline__stages=2, train__steps=8)
    assert any(", no schedule" in line for line in output)
    assert prove_exactly_once(read_run(folder)) == [] and len(losses(folder)) == 8
