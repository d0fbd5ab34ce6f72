"""Damaged files of real runs, and inputs made to break a command: the cases of two benchmarks, some of them."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
from benchmarks import hostile
from benchmarks.hostile import DRY_S, carry_out
from benchmarks.hostile import damage_verdict as damaged
from benchmarks.hostile import verdict as answered

from planaria.common import digests
from planaria.runtime.checkpoint.store import CheckpointStore

SEED = 34107


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small finished runs of one replica and of two."""
    home = tmp_path_factory.mktemp("damage")
    hostile.prepare_damage(home, fleet=False)
    return home


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """One of them, to be changed."""
    return Path(shutil.copytree(runs / "single", tmp_path / "single"))


@pytest.mark.slow
def test_a_damaged_file_is_refused_by_name_and_nothing_is_changed(runs: Path, tmp_path: Path) -> None:
    found = hostile.damage_cases(runs, SEED, 70)
    ended = {case.name: damaged(case, runs, tmp_path / "run", SEED) for case in found}
    wrong = {name: how for name, how in ended.items() if how[0] not in ("refused", "not read", "read")}
    assert not wrong
    assert sum(how == "refused" for how, _ in ended.values()) > 50


@pytest.mark.slow
def test_what_is_meant_to_break_a_command_gets_an_answer_in_one_line(tmp_path: Path) -> None:
    hostile.prepare(tmp_path)
    found = random.Random(SEED).sample(hostile.cases(tmp_path, SEED), 70)
    ended = {case.name: answered(case, tmp_path) for case in found}
    assert not {name: how for name, how in ended.items() if how[0]}
    slow = [case.name for case in found if "--dry-run" in case.words and ended[case.name][1] > 4 * DRY_S]
    assert not slow, "a busy machine takes longer, but not that much"


@pytest.mark.parametrize(
    "more", ["model.layers=1000000000", "exchange.replicas=1000000000", "pipeline.microbatches=1000000000"]
)
def test_a_size_beyond_reason_is_refused_at_once(tmp_path: Path, more: str) -> None:
    begin = time.monotonic()
    (tmp_path / "mine.toml").touch()
    said = carry_out(["train", str(tmp_path / "mine.toml"), "--dry-run", f"--{more}"])
    assert said.kind and "at most" in said.err and more.partition("=")[0] in said.err
    assert time.monotonic() - begin < 10


def test_a_flipped_bit_in_a_tensor_is_found_before_anything_is_read_or_written(run: Path) -> None:
    (saved,) = CheckpointStore(run / "checkpoints").list()[-1:]
    file = saved.folder / "stage-0002.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)
    for command in (["train", "--resume", str(run), "--train.steps", "6"], ["generate", str(run), "--prompt", "a"]):
        said = carry_out(command)
        assert said.kind, said.err
        assert f"{file}: " in said.err and "choose another checkpoint" in said.err
        assert "has changed since it was written" in said.err
    resume = ["train", "--resume", str(run), "--train.steps", "6"]
    assert carry_out(resume).err.rstrip().endswith(": --checkpoint step-00000002")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    assert carry_out(resume).err.rstrip().endswith(": there is no other, so start a new run")


def test_what_was_changed_by_hand_is_named_and_can_be_accepted(run: Path) -> None:
    config = run / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"seed": 34107', '"seed": 34108'))
    assert config.read_text() != text
    generate = ["generate", str(run), "--prompt", "a", "--tokens", "1"]
    said = carry_out(generate)
    assert said.kind and f"{config}: has changed since it was written" in said.err
    assert f"planaria accept {run}" in said.err
    said = carry_out(["accept", str(run)])
    assert (said.code, said.out) == (0, f"{config}: accepted as it is now\n")
    assert carry_out(["accept", str(run)]).out == f"{run}: nothing had changed\n"
    assert carry_out(generate).code == 0


def test_flags_of_a_resumption_are_no_change_by_hand(run: Path) -> None:
    assert carry_out(["train", "--resume", str(run), "--train.steps", "5", "--quiet"]).code == 0
    said = carry_out(["generate", str(run), "--prompt", "a", "--tokens", "1"])
    assert said.code == 0, said.err


def test_a_run_of_an_older_planaria_goes_on_and_is_told_of(run: Path) -> None:
    """Neither its folder nor its checkpoints have digests."""
    (run / digests.FILE).unlink()
    for saved in CheckpointStore(run / "checkpoints").list():
        old = saved.manifest.model_dump_json(exclude={"digests"})
        (saved.folder / "manifest.json").write_text(old)
    said = carry_out(["train", "--resume", str(run), "--train.steps", "5", "--quiet"])
    assert said.code == 0, said.err
    assert f"{run}: an older planaria wrote it, without digests" in said.out
    assert CheckpointStore(run / "checkpoints").list()[-1].manifest.digests and (run / digests.FILE).is_file()


def test_a_list_that_is_gone_is_no_older_run(run: Path) -> None:
    (run / digests.FILE).unlink()
    said = carry_out(["train", "--resume", str(run), "--train.steps", "5", "--quiet"])
    assert said.kind and f"{run / digests.FILE}: is gone" in said.err


@pytest.mark.parametrize(
    ("recipe", "command", "right"),
    [
        ("experts", "train", "experts"),
        ("compare", "train", "compare"),
        ("swarm", "train", "swarm"),
        ("train", "swarm", "train"),
        ("drill", "swarm", "drill"),
        ("swarm", "experts", "swarm"),
        ("experts", "plan", "experts"),
    ],
)
def test_a_recipe_knows_the_command_it_is_for(tmp_path: Path, recipe: str, command: str, right: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(hostile.KINDS[recipe][0])
    said = carry_out([command, str(file)])
    assert said.kind and f"is a recipe for `planaria {right}`; run `planaria {right} {file}`" in said.err
