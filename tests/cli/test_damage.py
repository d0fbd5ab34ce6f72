"""Damaged files of real runs and hostile inputs: a sample of the cases of two benchmarks."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
from benchmarks.hostile import DRY_S, carry_out
from benchmarks.hostile import damage_verdict as damaged
from benchmarks.hostile import verdict as answered

from benchmarks import hostile
from planaria.common import digests
from planaria.runtime.checkpoint.store import CheckpointStore

SEED = 34107


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small finished runs of one replica and of two replicas."""
    home = tmp_path_factory.mktemp("damage")
    hostile.prepare_damage(home, fleet=False)
    return home


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run of one replica that a test may change."""
    return Path(shutil.copytree(runs / "single", tmp_path / "single"))


@pytest.mark.slow
def test_a_damaged_file_is_refused_by_name_and_changes_nothing(runs: Path, tmp_path: Path) -> None:
    found = hostile.damage_cases(runs, SEED, 70)
    ended = {case.name: damaged(case, runs, tmp_path / "run", SEED) for case in found}
    wrong = {name: how for name, how in ended.items() if how[0] not in ("refused", "not read", "read")}
    assert not wrong
    assert sum(how == "refused" for how, _ in ended.values()) > 50


@pytest.mark.slow
def test_a_hostile_input_is_answered_in_one_line(tmp_path: Path) -> None:
    hostile.prepare(tmp_path)
    found = random.Random(SEED).sample(hostile.cases(tmp_path, SEED), 70)
    ended = {case.name: answered(case, tmp_path) for case in found}
    assert not {name: how for name, how in ended.items() if how[0]}
    slow = [case.name for case in found if "--dry-run" in case.words and ended[case.name][1] > 4 * DRY_S]
    assert not slow, "slower than load on the machine explains"


@pytest.mark.parametrize(
    "more", ["model.layers=1000000000", "exchange.replicas=1000000000", "pipeline.microbatches=1000000000"]
)
def test_an_absurd_size_is_refused_at_once(tmp_path: Path, more: str) -> None:
    begin = time.monotonic()
    (tmp_path / "mine.toml").touch()
    result = carry_out(["train", str(tmp_path / "mine.toml"), "--dry-run", f"--{more}"])
    assert result.kind and "at most" in result.err and more.partition("=")[0] in result.err
    assert time.monotonic() - begin < 10


def test_a_flipped_bit_in_a_tensor_is_found_before_use(run: Path) -> None:
    (saved,) = CheckpointStore(run / "checkpoints").list()[-1:]
    file = saved.folder / "stage-0002.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)
    for command in (["train", "--resume", str(run), "--train.steps", "6"], ["generate", str(run), "--prompt", "a"]):
        result = carry_out(command)
        assert result.kind, result.err
        assert f"{file}: " in result.err and "choose another checkpoint" in result.err
        assert "has changed since it was written" in result.err
    resume = ["train", "--resume", str(run), "--train.steps", "6"]
    assert carry_out(resume).err.rstrip().endswith(": --checkpoint step-00000002")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    assert carry_out(resume).err.rstrip().endswith(": there is no other, so start a new run")


def test_a_change_by_hand_is_named_and_can_be_accepted(run: Path) -> None:
    config = run / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"seed": 34107', '"seed": 34108'))
    assert config.read_text() != text
    generate = ["generate", str(run), "--prompt", "a", "--tokens", "1"]
    result = carry_out(generate)
    assert result.kind and f"{config} has changed since it was written" in result.err
    assert f"planaria run check {run} --accept" in result.err
    result = carry_out(["run", "check", str(run), "--accept"])
    assert (result.code, result.out) == (0, f"{config}: accepted in its current state\n")
    assert carry_out(["run", "check", str(run), "--accept"]).out == f"{run}: nothing changed\n"
    assert carry_out(generate).code == 0


def test_a_run_of_an_older_planaria_resumes_with_a_notice(run: Path) -> None:
    """Its folder and checkpoints have no digests."""
    (run / digests.FILE).unlink()
    for saved in CheckpointStore(run / "checkpoints").list():
        old = saved.manifest.model_dump_json(exclude={"digests"})
        (saved.folder / "manifest.json").write_text(old)
    result = carry_out(["train", "--resume", str(run), "--train.steps", "5", "--quiet"])
    assert result.code == 0, result.err
    assert f"{run}: written by an older planaria, without digests" in result.out
    assert CheckpointStore(run / "checkpoints").list()[-1].manifest.digests and (run / digests.FILE).is_file()


def test_a_run_that_lost_its_digests_is_refused(run: Path) -> None:
    (run / digests.FILE).unlink()
    result = carry_out(["train", "--resume", str(run), "--train.steps", "5", "--quiet"])
    assert result.kind and f"{run / digests.FILE} is missing" in result.err


@pytest.mark.parametrize(
    ("recipe", "command", "right"),
    [
        ("experts", "train", "experts train"),
        ("compare", "train", "compare"),
        ("swarm", "train", "swarm train"),
        ("train", "swarm train", "train"),
        ("drill", "swarm train", "compare"),
        ("swarm", "experts train", "swarm train"),
        ("experts", "plan", "experts train"),
    ],
)
def test_a_recipe_names_its_command(tmp_path: Path, recipe: str, command: str, right: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(hostile.KINDS[recipe][0])
    result = carry_out([*command.split(), str(file)])
    assert result.kind and f"is a recipe for `planaria {right}`; run `planaria {right} {file}`" in result.err
