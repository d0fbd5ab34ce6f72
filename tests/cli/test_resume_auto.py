"""``planaria train RECIPE --resume auto``: for machines that do not know whether the run was begun before."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import planaria
from planaria import cli
from planaria.runtime.checkpoint.mirror import ID, Mirror
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.engine import runs

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
    """A run of milliseconds a step."""
    text = "".join(random.Random(5).choices("etaoin ", k=6000))
    (tmp_path / "corpus.txt").write_text(text)
    data = f'data = {{source = "{tmp_path}/corpus.txt", tokenizer = "bytes", cache = "{tmp_path}/cache"}}\n'
    (tmp_path / "mine.toml").write_text(RECIPE + data)
    return tmp_path / "mine.toml"


def train(recipe: Path, out: str, *more: str) -> planaria.Run:
    """What a machine does that starts, or starts again, whose own folder is ``out``."""
    words = ["train", str(recipe), "--resume", "auto", "--quiet", "--out", str(recipe.parent / out), *more]
    assert cli.run(words) == 0
    return planaria.load(recipe.parent / out / "mine")


def store_of(recipe: Path) -> list[str]:
    return ["--checkpoint.store", f"file://{recipe.parent / 'store'}"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_run_is_begun_then_continued_and_then_left_alone(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = planaria.train(recipe, progress=False, settings={"out": str(recipe.parent / "whole"), "train.steps": 8})
    train(recipe, "out")
    run = train(recipe, "out", "--train.steps", "8")
    assert run.losses == whole.losses, "the same run as without a break"
    capsys.readouterr()
    train(recipe, "out", "--train.steps", "8")
    assert "all 8 steps are done" in capsys.readouterr().out
    assert [path.name for path in (recipe.parent / "out").iterdir()] == ["mine"]


def test_a_run_that_was_killed_before_its_export_is_exported(recipe: Path) -> None:
    run = train(recipe, "out")
    shutil.rmtree(run.folder / "model")
    train(recipe, "out", "--fleet.missed", "9")
    assert (run.folder / "model").is_dir()


def test_a_machine_that_has_nothing_takes_the_run_from_its_store(recipe: Path) -> None:
    train(recipe, "one", *store_of(recipe))
    run = train(recipe, "two", *store_of(recipe), "--train.steps", "8")
    assert list(run.losses) and CheckpointStore(run.folder / "checkpoints").reached() == 8
    assert Mirror(store_of(recipe)[1], "mine").newest() == "step-00000008"


def test_a_machine_that_had_the_run_before_takes_the_newer_state(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own would be continued otherwise, and what was trained elsewhere since would be lost from the store."""
    train(recipe, "one", *store_of(recipe))
    train(recipe, "two", *store_of(recipe), "--train.steps", "8")
    capsys.readouterr()
    run = train(recipe, "one", *store_of(recipe), "--train.steps", "12")
    said = capsys.readouterr().out
    assert "is older than what the store has" in said and "fetching step-00000008" in said
    assert sorted(path.name for path in run.folder.parent.iterdir()) == ["mine", "mine.older-1"]


def test_a_store_that_lags_is_brought_up_to_date(recipe: Path) -> None:
    train(recipe, "one", *store_of(recipe))
    shutil.rmtree(recipe.parent / "store" / "mine" / "checkpoints" / "step-00000004")
    run = train(recipe, "one", *store_of(recipe), "--train.steps", "8")
    assert list(run.folder.parent.iterdir()) == [run.folder]
    assert Mirror(store_of(recipe)[1], "mine").newest() == "step-00000008"


def test_a_run_that_was_lost_before_its_first_checkpoint_is_begun_again(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = recipe.parent / "store" / "mine"
    place.mkdir(parents=True)
    (place / ID).write_text("of a machine that is lost")
    assert "holds another run" in refused(["train", str(recipe), "--out", "x", *store_of(recipe)], capsys)
    train(recipe, "one", *store_of(recipe))
    assert Mirror(store_of(recipe)[1], "mine").newest() == "step-00000004"


def test_another_run_of_that_name_in_the_store_is_not_mixed_with_ours(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe, "one", *store_of(recipe), "--train.steps", "8")
    train(recipe, "two")
    words = ["train", str(recipe), "--resume", "auto", "--out", str(recipe.parent / "two"), *store_of(recipe)]
    assert "holds another run" in refused([*words, "--train.steps", "6"], capsys)


def test_a_store_that_cannot_be_reached_is_no_reason_to_begin_again(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mirror, "_folders", lambda self: 1 / 0)
    words = ["train", str(recipe), "--resume", "auto", "--out", str(recipe.parent / "one"), *store_of(recipe)]
    assert "cannot list its checkpoints" in refused(words, capsys)
    assert not (recipe.parent / "one").exists()


def test_a_run_that_is_being_trained_is_not_set_aside(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(recipe, "one", *store_of(recipe))
    train(recipe, "two", *store_of(recipe), "--train.steps", "8")
    words = ["train", str(recipe), "--resume", "auto", "--out", str(recipe.parent / "one"), *store_of(recipe)]
    with runs.held(run.folder):
        assert "is being trained right now" in refused(words, capsys)
    assert [path.name for path in run.folder.parent.iterdir()] == ["mine"]


def test_a_dry_run_says_what_it_would_go_on_with(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(recipe), "--resume", "auto", "--dry-run", "--out", str(recipe.parent / "one")]
    assert cli.run(words) == 0
    assert capsys.readouterr().out.endswith("# --resume auto: begins a new run\n")
    train(recipe, "one")
    capsys.readouterr()
    assert cli.run(words) == 0
    assert capsys.readouterr().out.endswith(f"# --resume auto: continues {recipe.parent / 'one' / 'mine'}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checkpoint", "step-00000002"], "--checkpoint step-00000002: goes with --resume RUN"),
        (["--engine", "simulate"], "a simulation has nothing to resume"),
    ],
)
def test_what_does_not_go_with_it(
    words: list[str], said: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(["train", str(recipe), "--resume", "auto", *words], capsys)


def test_a_program_can_do_the_same(recipe: Path) -> None:
    settings = {"out": str(recipe.parent / "out")}
    first = planaria.train(recipe, resume="auto", progress=False, settings=settings)
    second = planaria.train(recipe, resume="auto", progress=False, settings={**settings, "train.steps": 6})
    assert first.folder == second.folder and len(second.losses) == 6
