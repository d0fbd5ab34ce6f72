"""``planaria.train`` and its results: the same runs as the command's, from any program."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import planaria
from planaria import cli
from planaria.report.observe.trackers.tensorboard import TensorBoard
from planaria.runtime.checkpoint.store import CheckpointStore
from support.tiny_recipe import written


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "pandas", None)
    return written(tmp_path)


def refused(arguments: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line with which a command fails."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    assert ended.value.code in (1, 2)
    return capsys.readouterr().err.removeprefix("planaria: ").removesuffix("\n")


def test_train_makes_the_commands_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[planaria.Step] = []
    run = planaria.train(recipe, on_step=steps.append, progress=False)
    assert capsys.readouterr().out == ""
    assert cli.run(["train", str(recipe), "--quiet"]) == 0
    out = capsys.readouterr().out
    other = planaria.load(run.folder.with_name("tiny-2"))
    assert f"run           {other.folder} ({run.folder} exists)" in out
    assert run.losses == other.losses and run.validations == other.validations
    assert list(run.validations) == [0, 4, 8]
    summary = [line for line in run.summary().splitlines() if not line.startswith("memory")]  # of this process
    assert all(line in out for line in summary) and "memory" in out and str(other.folder / "model") in out
    assert (run.folder / "model" / "model.safetensors").is_file() and (run.folder / "report.html").is_file()
    assert [step.step for step in steps] == list(range(8)) and {step.steps for step in steps} == {8}
    assert [step.loss for step in steps] == run.losses
    assert [step.val_loss for step in steps] == 4 * [run.validations[0]] + 4 * [run.validations[4]]
    assert steps[0].grad_norm.keys() == set(range(5)) and all(step.tokens_per_s > 0 for step in steps[1:])
    assert run.outcome == "finished" and "8 steps" in repr(run) and run.complete("eta", max_new=3).startswith("eta")


def test_a_run_stops_with_an_error_if_its_folder_is_removed(recipe: Path) -> None:
    def remove(step: planaria.Step) -> None:
        if step.step == 2:
            (log,) = recipe.parent.glob("**/events.jsonl")
            shutil.rmtree(log.parent)

    with pytest.raises(planaria.UserError, match=r"events\.jsonl cannot be written \(it was removed"):
        planaria.train(recipe, on_step=remove, progress=False)


def test_missing_samples_have_their_own_exit_code(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = planaria.train(recipe, progress=False)
    log = run.folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"kind":"commit"' not in line or '"step":3,' not in line))
    shutil.rmtree(run.folder / "model")  # as if it had been killed before the export
    samples = run.config.samples
    for command in (["report"], ["train", "--quiet", "--resume"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, str(run.folder)])
        printed = capsys.readouterr()
        assert ended.value.code == 3 and "report.html" in printed.out
        missing = f"samples {3 * samples} to {4 * samples - 1} are missing"
        assert printed.err == f"planaria: {run.folder}: not every sample was used exactly once: {missing}\n"


@pytest.mark.slow
def test_a_custom_tracker_receives_every_step_even_if_another_fails(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    chosen = {"observe.trackers": "own_tracker:Table, tensorboard", "observe.options.name": "losses.csv"}
    monkeypatch.setattr(TensorBoard, "scalars", lambda self, step, values: 1 / 0)
    run = planaria.train(recipe, progress=False, settings=chosen, allow_code=True)
    assert run.outcome == "finished"
    rows = [line.split(",") for line in (run.folder / "losses.csv").read_text().splitlines()]
    assert [float(value) for _, name, value in rows if name == "loss"] == run.losses
    assert {int(step): float(value) for step, name, value in rows if name == "val_loss"} == run.validations
    assert (run.folder / "events.jsonl").read_text().count("continuing without tensorboard (ZeroDivisionError") == 1
    with pytest.raises(planaria.UserError, match=r"observe\.trackers = 'own_tracker:Tabel': .* 'Table'"):
        planaria.train(recipe, progress=False, settings={"observe.trackers": "own_tracker:Tabel"})
    assert not run.folder.with_name("tiny-2").exists(), "before there is a run"


@pytest.mark.slow
def test_a_table_with_and_without_pandas(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = planaria.train(recipe, progress=False, steps=5)
    rows = run.table()
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["loss"] for row in rows] == [*run.losses, None]
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [0, 4, 5]
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", rows)))
    assert run.table() == ("frame", rows)


@pytest.mark.slow
def test_figures_match_the_report(recipe: Path) -> None:
    run = planaria.train(recipe, progress=False)
    page = (run.folder / "report.html").read_text()
    assert "loss" in run.figures and all(f'id="{name}"' in page for name in run.figures)
    assert {trace.name for trace in run.figure("loss").data} >= {"training", "validation"}
    with pytest.raises(planaria.UserError, match="los: the report has no such figure; did you mean 'loss'"):
        run.figure("los")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"stepz": 3}, "stepz: unknown setting; did you mean 'steps'?"),
        ({"settings": {"optim.lrr": 1}}, "optim.lrr: unknown setting; did you mean 'optim.lr'?"),
        ({"settings": {"steps": 1}}, "steps: unknown setting; did you mean"),
        ({"kind": "a"}, "kind: could be routing.kind or optim.kind or exchange.kind or fleet.kind; write settings="),
        ({"settings": {"recovery.options.bits": 8}}, "recovery.options.bits: no option of 'checkfree'"),
        ({"steps": 1, "settings": {"train.steps": 2}}, "train.steps is given twice; remove one of them"),
        ({"engine": "simulate"}, "engine = 'simulate': a simulation trains no model; use 'inline' or 'fleet'"),
        ({"checkpoint": "step-00000004"}, "checkpoint = 'step-00000004' requires resume=True"),
    ],
)
def test_invalid_settings_are_refused_before_a_run_is_made(recipe: Path, given: dict[str, object], line: str) -> None:
    with pytest.raises(planaria.UserError) as wrong:
        planaria.train(recipe, progress=False, **given)  # type: ignore[arg-type]
    assert str(wrong.value).startswith(line)
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.steps", "many"),
        ("optim.lr", -1.0),
        ("optim.lr", float("nan")),
        ("checkpoint.every", "best"),
        ("exchange.max_replicas", 3),
        ("recovery.strategy", "checkfree_plus"),
        ("recovery.strategy", "chekfree"),
        ("recovery.options.every", 5),
        ("chaos.trace", "nowhere.json"),
        ("train.start", "nowhere"),
        ("data.source", "nowhere"),
        ("model.context", 100000),
    ],
)
def test_the_command_reports_the_same_error(
    recipe: Path, setting: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(planaria.UserError) as wrong:
        planaria.train(recipe, settings={setting: value}, progress=False)
    assert refused(["train", recipe, "--quiet", f"--{setting}", value], capsys) == str(wrong.value)
    assert not (recipe.parent / "runs").exists()


@pytest.mark.slow
def test_an_engine_refuses_conflicting_settings(recipe: Path) -> None:
    config = planaria.configure(recipe, strategy="checkfree_plus")
    with pytest.raises(planaria.UserError, match="checkfree_plus needs routing"):
        planaria.ReferenceEngine(config, *planaria.streams(config))
    config = planaria.configure(recipe, settings={"chaos.trace": None})
    engine = planaria.ReferenceEngine(config, *planaria.streams(config))
    losses = [engine.train_step().loss for _ in range(3)]
    assert losses == planaria.train(config, steps=3, progress=False).losses


def test_a_stopped_run_is_returned_and_resumed_by_folder_or_name(recipe: Path) -> None:
    whole = planaria.train(recipe, progress=False)
    stop = threading.Event()

    def on_step(step: planaria.Step) -> None:
        if step.step in (1, 4):
            stop.set()

    messages: list[str] = []
    part = planaria.train(recipe, on_step=on_step, stop=stop, progress=False, notify=messages.append)
    assert part.outcome == "stopped: request" and len(part.losses) == 2
    assert f"planaria train --resume {part.folder}" in messages[-1]
    stop.clear()
    assert len(planaria.train(part.folder, resume=True, on_step=on_step, stop=stop, progress=False).losses) == 5
    last = planaria.train(recipe, resume=True, progress=False)
    assert last.folder == part.folder and last.outcome == "finished"
    assert last.losses == whole.losses and last.validations == whole.validations
    with pytest.raises(planaria.UserError, match="all 8 steps are done"):
        planaria.train(recipe, resume=True, progress=False)
    assert len(planaria.train(recipe, resume=True, steps=9, progress=False).losses) == 9


@pytest.mark.slow
def test_an_exception_of_on_step_is_raised_after_the_run_is_saved(recipe: Path) -> None:
    def on_step(step: planaria.Step) -> None:
        if step.step == 2:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        planaria.train(recipe, on_step=on_step, progress=False)
    folder = recipe.parent / "runs" / "tiny"
    assert [saved.step for saved in CheckpointStore(folder / "checkpoints").list()] == [3]
    assert len(planaria.train(folder, resume=True, progress=False).losses) == 8


def test_a_signal_stops_training_like_the_command(recipe: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(planaria.RunStopped, match=r"^stopped by SIGINT$") as stopped:
        planaria.train(
            recipe, progress=False, on_step=lambda step: os.kill(os.getpid(), signal.SIGINT) if step.step == 1 else None
        )
    assert stopped.value.folder is not None
    assert len(planaria.load(stopped.value.folder).losses) == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
def test_the_callers_number_of_threads_is_restored(recipe: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        planaria.train(recipe, steps=1, progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


NOTEBOOK = """
import asyncio, sys, threading, planaria

stop, steps = threading.Event(), []

async def cell():
    training = asyncio.create_task(asyncio.to_thread(
        planaria.train, sys.argv[1], engine="fleet", steps=500, eval_every=0, stop=stop, on_step=steps.append,
        progress=False,
    ))
    while len(steps) < 6 and not training.done():
        await asyncio.sleep(0.02)
    stop.set()
    return await training

run = asyncio.run(cell())
print(run.outcome, len(run.losses) >= 6, [recovery.outcome for recovery in run.recoveries])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_trains_in_a_thread_beside_a_running_event_loop(recipe: Path) -> None:
    script = recipe.with_name("script.py")
    script.write_text(NOTEBOOK)
    done = subprocess.run([sys.executable, script, recipe], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stopped: request True ['recovered']\n"


def test_a_resumed_run_rounds_as_one_without_a_stop(recipe: Path) -> None:
    """Random rounding of gradients between stages depends on the sample, not on the process."""
    settings = {"pipeline.wire": "6/4", "optim.schedule": "constant", "name": "whole"}
    whole = planaria.train(recipe, settings=settings, progress=False)
    steps = len(whole.losses)
    first = planaria.train(recipe, settings={**settings, "name": "parts", "train.steps": steps // 2}, progress=False)
    rest = planaria.train(first.folder, resume=True, steps=steps, progress=False)
    assert rest.losses == whole.losses and rest.validations[steps] == whole.validations[steps]
