"""Offline programs, such as ``python -m planaria.lab.codes``: output, files and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import exit_code, refused
from planaria.faults import trace
from planaria.lab.codes import search
from planaria.recovery import codes

TARGET = (
    search,
    *("--shards", "16", "--data", "8", "--distance", "4", "--weight", "4", "--seed", "4", "--tries", "3000"),
)


def test_a_found_code_is_usable_in_a_recipe_and_has_a_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, product = tmp_path / "code.json", tmp_path / "product.json"
    assert exit_code(*TARGET, "--to", to, "--product", product) == 0
    out = capsys.readouterr().out
    assert "[16, 8, 4]" in out and "[[320, 64, 4]]" in out
    rows = {line.split("  ")[1].strip(): line.split() for line in out.splitlines() if line.startswith("  ")}
    assert rows["this code"][2] == "3" and rows["local, groups of 4"][4] == "3" and rows["reed_solomon"][1] == "8"
    assert rows["local, groups of 4"][5:11] == ["1"] * 6, "any six are survived"
    assert rows["this code"][3:6] == ["1"] * 3 and float(rows["this code"][6]) < 1
    assert codes.make_code(str(to), 16, 3).data == 8
    made = json.loads(product.read_text())
    assert (made["qubits"], made["logical"], made["distance"]) == (320, 64, 4)
    assert all(len({*x} & {*z}) % 2 == 0 for x in made["x"] for z in made["z"])


def test_a_code_that_misses_the_target_is_reported_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "code.json"
    few = [search, "--shards", "14", "--data", "3", "--distance", "6", "--weight", "3", "--tries", "1"]
    assert exit_code(*few, "--to", to) == 1
    assert "falls short: distance" in capsys.readouterr().out and to.is_file()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (["--distance", "8"], "distance = 8: checks of 4 allow at most 7"),
        (["--tries", "0"], "--tries: 0; use 1 to 10000000"),
        (["--weight", "1"], "a check 2 or more"),
        (["--data", "17", "--shards", "40"], "data has 1 to 16"),
        (["--shards", "60", "--distance", "9"], "lower it, or --shards"),
        (["--degree", "9"], "degree = 9: a shard can be in at most 8 checks"),
        (["--to", "nowhere/code.json"], "nowhere/code.json: nowhere is not a folder"),
        (["--data", "eight"], "'--data': Input should be a valid integer"),
    ],
)
def test_impossible_targets_are_refused(wrong: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint in refused(capsys, *TARGET, *wrong)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=60)


def test_a_generated_trace_is_usable_in_a_recipe(tmp_path: Path) -> None:
    to = tmp_path / "mine.json"
    rates = ["--hourly", "0.9", "--step-seconds", "5", "--stages", "4", "--steps", "300", "--exempt", "1"]
    done = run("planaria.lab.trace", to, *rates, "--exempt", "4", "--forbid-adjacent", "--seed", "3")
    found = trace.read(to)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{to}: {len(found.faults)} faults, digest {trace.digest(found)[:16]}\n"
    assert {fault.stage for fault in found.faults} <= {2, 3}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("module", "words", "line"),
    [
        ("planaria.lab.codes", [], "Missing option '--shards'; see `python -m planaria.lab.codes --help`"),
        ("planaria.lab.trace", ["x", "--rate", "3"], "--rate: unknown flag; see `python -m planaria.lab.trace --help`"),
        ("planaria.swarm.settlement", ["--hops", "0"], "hops: 0; give 1 to 32"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(module: str, words: list[str], line: str) -> None:
    done = run(module, *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"planaria: {line}\n")


def test_the_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert exit_code(search, flag) == 0
        assert "--product FILE" in capsys.readouterr().out
