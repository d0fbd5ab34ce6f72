"""``train.start``: runs that start from another model's weights, on each engine and number of stages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from planaria import cli
from planaria.common.errors import UserError
from planaria.control.facts.events import StageReady
from planaria.control.log.reader import read_run
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation.weight_sources import open_model

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it again and again\n" * 200
RECIPE = """
name = "parent"
engine = "inline"
model = {{ vocab = 300, dim = 32, layers = 4, heads = 4, hidden = 64, context = 32 }}
pipeline = {{ stages = 4, microbatches = 2, microbatch_size = 2 }}
data = {{ source = "{folder}/text.txt", tokenizer = "bytes", cache = "{folder}/cache" }}
train = {{ steps = 6, eval_every = 3, eval_microbatches = 2 }}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its finished run, ``runs/parent``."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text.txt").write_text(TEXT)
    (folder / "parent.toml").write_text(RECIPE.format(folder=folder))
    assert train(folder, "parent") == 0
    return folder


def train(home: Path, name: str, *flags: str) -> int:
    words = ["train", str(home / "parent.toml"), "--quiet", "--out", str(home / "runs"), "--name", name]
    return cli.run([*words, *flags])


def losses(home: Path, name: str) -> dict[int, float]:
    return {m.step: m.loss for m in read_run(home / "runs" / name).trained}


def validations(run: Path) -> dict[int, float]:
    return {m.step: m.val_loss for m in read_run(run).validated}


@pytest.mark.parametrize("source", ["runs/parent", "runs/parent/model"])
@pytest.mark.parametrize("cut", ["1", "2"])
def test_a_run_starts_with_the_parents_weights(home: Path, source: str, cut: str) -> None:
    name = f"child-{source.count('/')}-{cut}"
    flags = ["--train.start", str(home / source), "--pipeline.stages", cut, "--checkpoint.keep", "9"]
    assert train(home, name, *flags) == 0
    first = next(s for s in CheckpointStore(home / "runs" / name / "checkpoints").list() if s.step == 0)
    parent, _ = open_model(home / "runs" / "parent")
    given = load_model(first).global_state()
    for tensor, weights in parent.global_state().items():
        assert torch.equal(given[tensor], weights), tensor
    before, after = validations(home / "runs" / "parent"), validations(home / "runs" / name)
    assert after[0] == pytest.approx(before[6], abs=1e-6)
    assert after[6] < after[0]


def test_the_fleet_starts_and_resumes_like_inline(home: Path) -> None:
    start = ["--train.start", str(home / "runs" / "parent")]
    assert train(home, "whole", *start) == 0
    assert train(home, "processes", *start, "--engine", "fleet", "--train.steps", "3") == 0
    processes = home / "runs" / "processes"
    assert cli.run(["train", "--resume", str(processes), "--quiet", "--train.steps", "6"]) == 0
    inline = losses(home, "whole")
    assert len(inline) == 6
    assert losses(home, "processes") == pytest.approx(inline, abs=1e-6)


def test_a_run_without_checkpoints_restarts_from_the_parents_weights(home: Path) -> None:
    assert train(home, "early", "--train.start", str(home / "runs" / "parent")) == 0
    before = losses(home, "early")
    shutil.rmtree(home / "runs" / "early" / "checkpoints")
    (home / "runs" / "early" / "metrics.jsonl").unlink()
    (home / "runs" / "early" / "state.json").unlink(missing_ok=True)
    assert cli.run(["train", "--resume", str(home / "runs" / "early"), "--quiet"]) == 0
    assert losses(home, "early") == before


@pytest.mark.slow
def test_replicas_start_equal_and_average_every_gradient(home: Path) -> None:
    """In both replicas of two processes, the norm of every gradient is equal to the last bit."""
    flags = ["--train.start", str(home / "runs" / "parent"), "--train.steps", "5", "--pipeline.stages", "1"]
    flags += ["--exchange.replicas", "2", "--exchange.kind", "allreduce"]
    assert train(home, "twins", *flags, "--engine", "fleet") == 0
    assert train(home, "twins-inline", *flags) == 0
    assert losses(home, "twins") == pytest.approx(losses(home, "twins-inline"), abs=1e-6)
    norms: dict[tuple[int, int], list[float]] = {}
    for _, fact in read_run(home / "runs" / "twins").history:
        if isinstance(fact, StageReady) and fact.mode == "train":
            assert fact.grad_norm is not None
            norms.setdefault((fact.step, fact.stage), []).append(fact.grad_norm)
    assert norms.keys() == {(step, stage) for step in range(5) for stage in (0, 1)}
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in norms.values())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--train.start", "nowhere"], "train.start = .nowhere.: no such run"),
        (["--model.hidden", "48"], "its model has hidden = 64, the recipe 48; remove model.hidden, or set it"),
        (["--data.tokenizer", "bpe"], "its tokenizer is not data.tokenizer = 'bpe'"),
    ],
)
def test_an_invalid_command_is_refused_before_anything_is_written(home: Path, flags: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        train(home, "wrong", "--train.start", str(home / "runs" / "parent"), *flags)
    assert not (home / "runs" / "wrong").exists()
