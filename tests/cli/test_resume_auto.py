"""``planaria train RECIPE --resume auto``: begin a run, or continue it from the folder or the store."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import planaria
from planaria import cli
from planaria.control.log.reader import ID
from planaria.runtime.checkpoint.mirror import Mirror
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation import run_folders
from support.command_line import refused

RECIPE = """
name = "mine"
engine = "inline"
model = {vocab = 260, dim = 16, heads = 2, hidden = 32, context = 16, layers = 2}
pipeline = {stages = 2, microbatches = 2, microbatch_size = 2}
train = {steps = 4, eval_every = 0}
checkpoint = {every = 2}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with steps of milliseconds."""
    text = "".join(random.Random(5).choices("etaoin ", k=6000))
    (tmp_path / "corpus.txt").write_text(text)
    data = f'data = {{source = "{tmp_path}/corpus.txt", tokenizer = "bytes", cache = "{tmp_path}/cache"}}\n'
    (tmp_path / "mine.toml").write_text(RECIPE + data)
    return tmp_path / "mine.toml"


def train(recipe: Path, out: str, *more: str) -> planaria.Run:
    """Begin or continue the run in the folder ``out``."""
    words = ["train", str(recipe), "--resume", "auto", "--quiet", "--out", str(recipe.parent / out), *more]
    assert cli.run(words) == 0
    return planaria.load(recipe.parent / out / "mine")


def store_of(recipe: Path) -> list[str]:
    return ["--checkpoint.store", f"file://{recipe.parent / 'store'}"]


def test_a_run_is_begun_then_continued_then_left_alone(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = planaria.train(recipe, progress=False, settings={"out": str(recipe.parent / "whole"), "train.steps": 8})
    train(recipe, "out")
    run = train(recipe, "out", "--train.steps", "8")
    assert run.losses == whole.losses, "interrupted and uninterrupted runs differ"
    capsys.readouterr()
    train(recipe, "out", "--train.steps", "8")
    assert "all 8 steps are done" in capsys.readouterr().out
    assert [path.name for path in (recipe.parent / "out").iterdir()] == ["mine"]


def test_a_run_that_was_killed_before_its_export_is_exported(recipe: Path) -> None:
    run = train(recipe, "out")
    shutil.rmtree(run.folder / "model")
    train(recipe, "out", "--fleet.missed_heartbeats", "9")
    assert (run.folder / "model").is_dir()


def test_a_new_machine_fetches_the_run_from_its_store(recipe: Path) -> None:
    train(recipe, "one", *store_of(recipe))
    run = train(recipe, "two", *store_of(recipe), "--train.steps", "8")
    assert list(run.losses) and CheckpointStore(run.folder / "checkpoints").newest_step_by_name() == 8
    assert Mirror(store_of(recipe)[1], "mine").newest() == "step-00000008"


def test_an_older_local_run_is_replaced_by_the_stores(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Continuing the older state would lose the newer one from the store."""
    train(recipe, "one", *store_of(recipe))
    train(recipe, "two", *store_of(recipe), "--train.steps", "8")
    capsys.readouterr()
    run = train(recipe, "one", *store_of(recipe), "--train.steps", "12")
    printed = capsys.readouterr().out
    assert "a newer copy of the run replaces it" in printed and "fetching step-00000008" in printed
    assert sorted(path.name for path in run.folder.parent.iterdir()) == ["mine", "mine.older-1"]


def test_a_stale_store_is_updated(recipe: Path) -> None:
    train(recipe, "one", *store_of(recipe))
    shutil.rmtree(recipe.parent / "store" / "mine" / "checkpoints" / "step-00000004")
    run = train(recipe, "one", *store_of(recipe), "--train.steps", "8")
    assert list(run.folder.parent.iterdir()) == [run.folder]
    assert Mirror(store_of(recipe)[1], "mine").newest() == "step-00000008"


def test_a_run_lost_before_its_first_checkpoint_begins_again(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = recipe.parent / "store" / "mine"
    place.mkdir(parents=True)
    (place / ID).write_text("of a machine that is lost")
    assert "holds another run" in refused(capsys, "train", recipe, "--out", "x", *store_of(recipe))
    train(recipe, "one", *store_of(recipe))
    assert Mirror(store_of(recipe)[1], "mine").newest() == "step-00000004"


def test_an_unreachable_store_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mirror, "_folders", lambda self: 1 / 0)
    words = ["train", str(recipe), "--resume", "auto", "--out", str(recipe.parent / "one"), *store_of(recipe)]
    assert "cannot list its checkpoints" in refused(capsys, *words)
    assert not (recipe.parent / "one").exists()


def test_a_run_in_training_is_not_replaced(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(recipe, "one", *store_of(recipe))
    train(recipe, "two", *store_of(recipe), "--train.steps", "8")
    words = ["train", str(recipe), "--resume", "auto", "--out", str(recipe.parent / "one"), *store_of(recipe)]
    with run_folders.lock_for_training(run.folder):
        assert "is being trained right now" in refused(capsys, *words)
    assert [path.name for path in run.folder.parent.iterdir()] == ["mine"]


def test_a_dry_run_reports_what_it_would_continue(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(recipe), "--resume", "auto", "--dry-run", "--out", str(recipe.parent / "one")]
    assert cli.run(words) == 0
    assert capsys.readouterr().out.endswith("# --resume auto: starts a new run\n")
    train(recipe, "one")
    capsys.readouterr()
    assert cli.run(words) == 0
    assert capsys.readouterr().out.endswith(f"# --resume auto: continues {recipe.parent / 'one' / 'mine'}\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--checkpoint", "step-00000002"], "--checkpoint step-00000002 requires --resume RUN"),
        (["--engine", "simulate"], "a simulation cannot be resumed"),
    ],
)
def test_conflicting_flags_are_refused(
    words: list[str], complaint: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in refused(capsys, "train", recipe, "--resume", "auto", *words)


def test_resume_auto_works_in_python(recipe: Path) -> None:
    settings = {"out": str(recipe.parent / "out")}
    first = planaria.train(recipe, resume="auto", progress=False, settings=settings)
    second = planaria.train(recipe, resume="auto", progress=False, settings={**settings, "train.steps": 6})
    assert first.folder == second.folder and len(second.losses) == 6
