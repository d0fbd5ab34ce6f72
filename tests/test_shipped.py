"""Shipped recipes: found by name, listed, copied, and included in the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planaria import cli
from planaria.config import kinds, recipe, shipped
from planaria.config.schema import ModelConfig
from planaria.models.families import make_family
from planaria.models.transformers.recipe_section import model_section
from support.command_line import refused

ROOT = Path(__file__).parents[1]


def test_a_name_is_a_shipped_recipe_unless_a_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped.find("demo") == shipped.FOLDER / "demo.toml"
    assert shipped.find("drills/alone").is_file()
    Path("demo").write_text("name = 'own'\n")
    assert shipped.find("demo") == Path("demo")
    for name in ("nothing", "../recipes/demo", "topologies/twelve_cities", "", "."):
        assert shipped.find(name) == Path(name)


@pytest.mark.parametrize(("race", "published"), [("race_124m", "llama_124m")])
def test_a_race_at_a_published_size_trains_the_published_shapes(race: str, published: str) -> None:
    assert recipe.load(shipped.find(race), {}).model == recipe.load(shipped.find(published), {}).model


def test_all_are_listed_with_their_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped.names()
    commands = dict(re.split(r"\s{2,}", line)[:2] for line in lines)
    expected = {
        "demo": "train",
        "recovery": "compare",
        "hdee": "experts train",
        "drills": "compare",
        "arithmetic_swarm": "swarm train",
    }
    assert expected.items() <= commands.items()
    assert all(len(line.split()) > 4 for line in lines), "each has a description"


@pytest.mark.parametrize("name", [name for name in shipped.names() if "drill" not in name and "swarm" not in name])
def test_a_copy_is_the_same_recipe(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "mine.toml"
    assert cli.run(["recipes", name, "--to", str(copy)]) == 0
    *written, then = capsys.readouterr().out.splitlines()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*map(Path, written)}
    mine, theirs = recipe.read(copy), recipe.read(shipped.find(name))
    assert mine.pop("name", "mine") == "mine" and recipe.load(copy, {}).name == "mine"
    theirs.pop("name", None)
    assert mine == theirs
    *command, file = then.removeprefix("next          planaria ").split()
    assert " ".join(command) in map(kinds.command_of, kinds.kinds_of(mine)) and file == str(copy)
    clock = mine.get("compare", {}).get("clock")
    assert clock is None or (tmp_path / clock).is_file()


@pytest.mark.parametrize("name", ["smollm2", "smollm2_sft", "qwen3_lora", "gemma3_270m"])
def test_missing_weights_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, "train", name, "--train.start", "./weights", silent=True)
    assert "train.start = './weights': no such run, folder or file" in message


def test_missing_dialogues_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "data.source = 'dialogues.jsonl'" in refused(capsys, "train", "smollm2_sft")


def test_the_stages_of_gemma3_are_alike(tmp_path: Path) -> None:
    """With the layers of Gemma 3 270M, and not in another number of stages."""
    gemma = pytest.importorskip("transformers").Gemma3TextConfig
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 64}
    gemma(num_hidden_layers=18, num_key_value_heads=1, **small).save_pretrained(tmp_path)
    place = str(tmp_path / "config.json")
    model = ModelConfig.model_validate(model_section(json.loads(Path(place).read_text()), place))
    stages = recipe.load(shipped.find("gemma3_270m"), {}).pipeline.stages
    made = make_family(model)
    assert made.stage_difference(model, stages) == "" and "different kinds" in made.stage_difference(model, 2)


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.trace.json").write_text("mine")
    assert "demo.trace.json already exists" in refused(capsys, "recipes", "demo", "--to", tmp_path / "mine.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["demo.trace.json"]


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(tmp_path: Path) -> None:
    """Built from the sources, installed into an empty folder, run from another."""
    sources, site, elsewhere = tmp_path / "sources", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, sources]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("planaria-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True, capture_output=True
    )

    def planaria(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "planaria", *arguments],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [sys.executable, "-c", "import planaria; print(planaria.__file__)"]
    found = subprocess.run(
        where, cwd=elsewhere, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()).is_relative_to(site)
    assert "demo" in planaria("recipes")
    planaria("recipes", "demo", "--to", "my.toml")
    assert "dim = 128" in planaria("train", "my.toml", "--dry-run")
    (elsewhere / "text").write_text((ROOT / "README.md").read_text())
    model = ["--model.dim", "32", "--model.hidden", "64", "--model.vocab", "300", "--data.source", "text"]
    steps = ["--engine", "inline", "--train.steps", "2", "--train.eval_every", "0", "--data.validation", "0.1"]
    assert "completion" in planaria("train", "demo", *model, *steps, "--quiet")
    planaria("report", "runs/demo")
    assert "checkpoint" in planaria("advise", "demo")
