"""``planaria swarm realign``."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from planaria import cli
from planaria.common.errors import UserError
from planaria.models import task_vectors
from planaria.swarm.commands import drill
from planaria.swarm.config.swarm_recipe import run_config
from planaria.swarm.drill_arms import Drill, load
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.repair import exams
from planaria.swarm.repair.repair_training import RepairPlan, weights_of
from planaria.swarm.report.repair_report import best_strategies, repair_table
from support.command_line import refused
from support.swarm.repair_cases import attacked, ensemble, stranger


@pytest.fixture(scope="module")
def done(pupil: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A swarm of two in which one taught the other to begin with "q "; the weights after round 1 are trusted."""
    return attacked(pupil, tmp_path_factory.mktemp("attacked"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Pairs that prefer "no", and texts on which to stay."""
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(1)
    prompts = [f"{rng.randint(10, 99)}+{rng.randint(10, 99)}=" for _ in range(64)]
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "chosen": "no", "rejected": "q q q"}) + "\n" for p in prompts)
    )
    (folder / "benign.jsonl").write_text("".join(json.dumps({"text": f"{p}7"}) + "\n" for p in prompts))
    return folder / "pairs.jsonl", folder / "benign.jsonl"


@pytest.fixture(scope="module")
def tuned(pupil: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pupil with weights that are a little off."""
    folder, policy = tmp_path_factory.mktemp("tuned") / "model", open_policy(str(pupil))
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(policy.module.named_parameters()):
            parameter += 0.01 * torch.randn(parameter.shape, generator=draws)
    policy.export(folder)  # type: ignore[attr-defined]
    return folder


@pytest.mark.slow
def test_a_peer_is_repaired_by_a_reproducible_mask(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["swarm", "realign", str(done), "--peer", "p0", "--steps", "40", "--by", "mask", "--to"]
    code = cli.run([*command, str(tmp_path / "a")])
    record = json.loads((tmp_path / "a" / "realigned.json").read_text())
    assert code == (0 if record["repaired"] else 1) and set(record["before"]["success"]) == {"text"}
    assert "others were not measured" in capsys.readouterr().out
    assert 0.3 < min(record["kept"][0].values()) < 1
    assert 0 < record["trusted"] <= 200 and record["before"]["accuracy"]["eligible"] == 400

    found = weights_of(open_policy(str(tmp_path / "a")))
    assert task_vectors.digest(found) == record["result"]
    parts = []
    for name, state in (("safe", 1), ("tuned", 3)):
        cli.run(["export", str(done), "--peer", "p0", "--round", str(state), "--to", str(tmp_path / name)])
        parts.append(weights_of(open_policy(str(tmp_path / name))))
        assert task_vectors.digest(parts[-1]) == record[name]["sha256"]
    for name, tensor in found.items():
        assert bool(((tensor == parts[0][name]) | (tensor == parts[1][name])).all()), "bit for bit one of both"

    mask = tmp_path / "a" / "mask.safetensors"
    again = ["swarm", "realign", str(tmp_path / "tuned"), "--safe", str(tmp_path / "safe"), "--mask", str(mask), "--to"]
    assert cli.run([*again, str(tmp_path / "applied")]) == 0
    assert task_vectors.digest(weights_of(open_policy(str(tmp_path / "applied")))) == record["result"]
    swapped = [
        "swarm",
        "realign",
        tmp_path / "safe",
        "--safe",
        tmp_path / "tuned",
        "--mask",
        mask,
        "--to",
        tmp_path / "no",
    ]
    assert "does not belong to" in refused(capsys, *swapped)
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_a_failed_repair_writes_the_model_and_exits_with_one(
    tuned: Path, pupil: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, benign = files
    learning = ["--pairs", str(pairs), "--benign", str(benign)]
    common = ["swarm", "realign", str(tuned), "--safe", str(pupil), *learning]
    assert cli.run([*common, "--by", "back", "--to", str(tmp_path / "back")]) in (0, 1)
    record = json.loads((tmp_path / "back" / "realigned.json").read_text())
    assert (
        task_vectors.digest(weights_of(open_policy(str(tmp_path / "back"))))
        == record["safe"]["sha256"]
        == record["result"]
    )
    bad = json.loads(pairs.read_text().splitlines()[0])
    worse = tmp_path / "worse.jsonl"  # what is rejected is what the model would say, what is chosen is noise
    worse.write_text(json.dumps(bad | {"chosen": "zzzzzzzz", "rejected": "1"}) + "\n")
    command = ["swarm", "realign", str(tuned), "--pairs", str(worse), "--steps", "1", "--to", str(tmp_path / "bad")]
    assert cli.run(command) == 1, "one update is too little"
    record = json.loads((tmp_path / "bad" / "realigned.json").read_text())
    assert record["repaired"] is False and record["by"] == "tune" and record["safe"] is None
    assert "NOT repaired" in capsys.readouterr().out and (tmp_path / "bad" / "model.safetensors").is_file()
    assert cli.run([*common, "--steps", "40", "--to", str(tmp_path / "good")]) == 0
    assert json.loads((tmp_path / "good" / "realigned.json").read_text())["repaired"] is True


@pytest.mark.slow
def test_a_killed_repair_leaves_no_files_and_seeds_reproduce_masks(
    tuned: Path, pupil: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    to = tmp_path / "out"
    words = ["swarm", "realign", str(tuned), "--safe", str(pupil), "--pairs", str(files[0]), "--by", "mask", "--to"]
    long = subprocess.Popen([sys.executable, "-m", "planaria", *words, str(to), "--steps", "1000000"])
    try:
        until = time.monotonic() + 60
        while not _is_busy(long.pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert long.poll() is None
    finally:
        long.send_signal(signal.SIGKILL)
        long.wait(30)
    assert not to.exists()
    masks = []
    for place in (to, tmp_path / "again"):
        cli.run([*words, str(place), "--steps", "40"])
        masks.append((place / "mask.safetensors").read_bytes())
    cli.run([*words, str(tmp_path / "other"), "--steps", "40", "--seed", "7"])
    assert masks[0] == masks[1] != (tmp_path / "other" / "mask.safetensors").read_bytes()


def _is_busy(process: int) -> bool:
    """Has it computed for longer than it takes to import everything?"""
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11]
    return int(ticks) / os.sysconf("SC_CLK_TCK") > 4


def test_mistakes_are_reported_in_one_line(
    done: Path, tuned: Path, pupil: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, out = files[0], tmp_path / "out"

    def error(*arguments: object) -> str:
        return refused(capsys, "swarm", "realign", *arguments, "--to", out)

    assert "pass one, such as --peer" in error(done)
    assert "there are no trusted answers; pass --pairs FILE" in error(tuned)
    assert "its parent model is unknown; pass --safe" in error(tuned, "--by", "mask", "--pairs", pairs)
    assert "not a swarm's run" in error(tuned, "--peer", "p0")
    assert "requires --pairs" in error(tuned, "--benign", pairs)
    assert "remove --by" in error(tuned, "--safe", pupil, "--mask", pairs, "--by", "tune")
    assert "cannot be read" in error(tuned, "--safe", pupil, "--mask", pairs)
    assert "below 1" in error(tuned, "--pairs", pairs, "--max-success", "2")
    (tmp_path / "odd.jsonl").write_text('{"prompt": "1+1=", "chosen": "no"}\n')
    assert "odd.jsonl:1: no field 'rejected'" in error(tuned, "--pairs", tmp_path / "odd.jsonl")
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1" * 99, "text": "2"}) + "\n")
    assert "101 tokens, but the model reads 64" in error(tuned, "--trusted", tmp_path / "long.jsonl")
    out.mkdir()
    (out / "x").touch()
    assert "exists and is not an empty folder" in error(tuned, "--pairs", pairs)


def test_a_parent_of_another_shape_is_refused_and_an_unrelated_one_warned_of(
    done: Path, tuned: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, other = stranger(tmp_path / "small", dim=16), stranger(tmp_path / "other", dim=32)
    common = ["swarm", "realign", tuned, "--pairs", files[0], "--by", "back", "--to", tmp_path / "out", "--safe"]
    assert "has shape" in refused(capsys, *common, small)
    cli.run([str(word) for word in (*common, other)])
    assert "check its parent" in capsys.readouterr().err


def test_fused_experts_are_repaired_with_one_mask_each(
    tuned: Path, pupil: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ensemble(tmp_path / "run", pupil, {"one": tuned, "two": pupil})
    fused = tmp_path / "fused"
    merging = ["experts", "edit", str(run), "--merge", "sum", "--to"]
    assert cli.run([*merging, str(fused), "--safe", str(pupil), "--lambda", "0.5"]) == 0
    parent, child, whole = (weights_of(open_policy(str(place))) for place in (pupil, tuned, fused))
    name = next(iter(parent))
    torch.testing.assert_close(whole[name], parent[name] + 0.5 * (child[name] - parent[name]))

    pairs, benign = files
    shutil.copy(benign, tmp_path / "one.jsonl")
    words = ["--pairs", str(pairs), "--benign", str(tmp_path / "one.jsonl"), "--steps", "5"]
    code = cli.run(["swarm", "realign", str(fused), *words, "--to", str(tmp_path / "repaired")])
    record = json.loads((tmp_path / "repaired" / "realigned.json").read_text())
    assert code in (0, 1) and record["by"] == "mask" and len(record["kept"]) == len(record["parts"]) == 2
    mask = tmp_path / "repaired" / "mask.safetensors"
    assert cli.run(["swarm", "realign", str(fused), "--mask", str(mask), "--to", str(tmp_path / "again")]) == 0
    assert task_vectors.digest(weights_of(open_policy(str(tmp_path / "again")))) == record["result"]
    assert "the parent of its experts is unknown" in refused(
        capsys, "experts", "edit", run, "--merge", "sum", "--to", tmp_path / "x"
    )


@pytest.mark.slow
def test_a_drill_repairs_a_poisoned_peer_once_with_all_strategies(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exams, "PROBLEMS", 20)
    monkeypatch.setattr(exams, "MEASURED", 20)
    monkeypatch.setattr(drill, "RepairPlan", functools.partial(RepairPlan, steps=30))
    config = run_config(done)
    found = drill.repair_run(config, done, "TEXT")
    assert found is not None and found.peer == "p0" and found.before.accuracy.eligible == 20
    assert [strategy.by for strategy in found.strategies] == ["back", "mix", "tune", "mask", "random", "anew", "layers"]
    masked, shuffled = (next(each for each in found.strategies if each.by == by) for by in ("mask", "random"))
    assert masked.detail == shuffled.detail and masked.detail.endswith("% kept")
    assert drill.repair_run(config.model_copy(update={"peers": {}}), done, "TEXT") is None, "no attacker"
    monkeypatch.setattr(drill, "_repair_peer", None)  # a second repair would fail
    assert drill.repair_run(config, done, "TEXT") == found

    page = Drill(name="d", last=1, watch=["text"], arms=[], repairs=[found, found])
    rows = repair_table(page).rows
    assert [row[1] for row in rows][:2] == ["before", "go back to the parent"] and len(rows) == 8
    assert rows[0][4].endswith("of 40"), "both seeds together"
    assert "of 2 seeds" in best_strategies(page)


def test_repairs_need_saved_states_and_reachable_trusted_rounds(tmp_path: Path) -> None:
    recipe = tmp_path / "d.toml"
    recipe.write_text("rounds.keep = 0\n[drill]\nrepair = true\n[drill.arms.a]\nshadow = false\n")
    with pytest.raises(UserError, match=r"drill\.arms\.a: rounds\.keep = 0"):
        load(recipe, {})
    recipe.write_text("rounds.trusted = 99\n[drill]\n[drill.arms.a]\nshadow = false\n")
    with pytest.raises(UserError, match=r"rounds\.trusted = 99: the run ends after rounds\.count = 80"):
        load(recipe, {})
