"""``planaria checkpoint show | verify | convert``, and resuming with another number of stages or replicas."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from benchmarks.hostile import carry_out

import planaria
from planaria.control.log.reader import read_run
from planaria.runtime.checkpoint.store import CheckpointStore

RECIPE = """
engine = "inline"
model = {{ vocab = 260, dim = 16, layers = 4, heads = 2, hidden = 24, context = 8 }}
pipeline = {{ stages = 4, microbatches = 2, microbatch_size = 2 }}
data = {{ source = "{corpus}", tokenizer = "bytes", cache = "{cache}" }}
optim = {{ clip = 0.0 }}
train = {{ steps = 6, eval_every = 0 }}
checkpoint = {{ every = 3 }}
exchange = {{ replicas = {replicas}, kind = "noloco", options = {{ every = 2 }} }}
observe = {{ trackers = "" }}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs of four stages: ``one`` has one replica, ``two`` has two."""
    home, rng = tmp_path_factory.mktemp("checkpoints"), random.Random(34107)
    corpus = home / "corpus.txt"
    corpus.write_text(" ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(3000)))
    for name, replicas in (("one", 1), ("two", 2)):
        recipe = home / f"{name}.toml"
        recipe.write_text(RECIPE.format(corpus=corpus, cache=home / "cache", replicas=replicas))
        planaria.train(recipe, progress=False, settings={"out": str(home / "runs")})
    return home


def copied(made: Path, name: str, to: Path) -> Path:
    return Path(shutil.copytree(made / "runs" / name, to / name))


@pytest.mark.slow
def test_show_lists_every_parameter_with_its_state(made: Path) -> None:
    result = carry_out(["checkpoint", "show", str(made / "runs" / "two")])
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert "step 6, 4 stages, replicas: 2 (noloco)" in result.out
    row = next(line for line in lines if line[:1] == ["model.layers.2.mlp.up_proj.weight"])
    assert row[1:3] == ["3", "average"] and row[3:6] == ["F32", "[24,", "16]"]
    assert row[6:9] == ["6", "1", f"{3 * 4 * 24 * 16:,}"] and len(row[9]) == 12
    first = carry_out(["checkpoint", "show", str(made / "runs" / "one"), "--checkpoint", "step-00000003"])
    assert "step 3, 4 stages, replicas: 1, " in first.out and " unique " in first.out


def test_verify_names_the_damaged_file(made: Path, tmp_path: Path) -> None:
    run = copied(made, "two", tmp_path)
    result = carry_out(["checkpoint", "show", str(run), "--verify"])
    assert result.code == 0 and result.out.count("tensors: unchanged") == 2 and "step-00000006: 10 files" in result.out
    path = run / "checkpoints" / "step-00000003" / "replica-1" / "stage-0002.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)
    result = carry_out(["checkpoint", "show", str(run), "--verify"])
    assert (
        result.code == 2
        and result.kind
        and f"{path}: " in result.err
        and "has changed since it was written" in result.err
    )
    assert carry_out(["checkpoint", "show", str(run), "--verify", "--checkpoint", "step-00000006"]).code == 0


@pytest.mark.slow
def test_a_converted_checkpoint_resumes_like_the_original(made: Path, tmp_path: Path) -> None:
    """Resuming at the converted shape needs no further re-cut."""
    direct, moved = (copied(made, "two", tmp_path / place) for place in ("direct", "moved"))
    flags = ["--pipeline.stages", "2", "--exchange.replicas", "3"]
    result = carry_out(["checkpoint", "convert", str(moved), "--to", str(tmp_path / "made"), *flags])
    assert result.code == 0 and "of 2 replicas, now 3 replicas" in result.out
    shutil.rmtree(moved / "checkpoints")
    shutil.move(tmp_path / "made", moved / "checkpoints")
    (saved,) = CheckpointStore(moved / "checkpoints").list()
    assert (saved.manifest.pipeline_stages, saved.manifest.replicas, saved.whole) == (2, 3, True)
    courses = []
    for run in (direct, moved):
        result = carry_out(["train", "--resume", str(run), *flags, "--train.steps", "9", "--quiet"])
        assert result.code == 0, result.err
        assert ("re-cut by parameter" in result.out) == (run == direct)
        courses.append({m.step: m.loss for m in read_run(run).trained})
    assert courses[0] == courses[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint"], "checkpoint: use one of its commands: convert, show"),
        (["checkpoint", "show", "RUN", "--checkpoint", "step-7"], "no such checkpoint"),
        (["checkpoint", "show", "nowhere", "--verify"], "not a run"),
        (["checkpoint", "convert", "RUN", "--to", "RUN/checkpoints"], "would replace a checkpoint"),
        (["checkpoint", "convert", "RUN", "--to", "x", "--pipeline.stages", "3"], "does not divide"),
        (["train", "--resume", "RUN", "--train.steps", "9", "--pipeline.stages", "3"], "does not divide"),
        (["train", "--resume", "RUN", "--train.steps", "9", "--model.layers", "8"], "cannot change"),
        (["train", "--resume", "RUN", "--train.steps", "9", "--routing.kind", "swaped"], "swapped"),
        (["train", "--resume", "RUN", "--train.steps", "9", "--routing.schedule", "none.json"], "none.json"),
    ],
)
def test_an_invalid_command_is_refused_in_one_line(made: Path, words: list[str], message: str) -> None:
    run = str(made / "runs" / "one")
    result = carry_out([word.replace("RUN", run) for word in words])
    assert result.code == 2 and result.kind and message in result.err, result.err
