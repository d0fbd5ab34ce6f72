"""``python -m planaria.lab.commands.codes``: output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planaria.lab.commands.codes import search
from planaria.recovery import codes
from support.command_line import exit_code, refused

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


def test_a_missing_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Missing option '--shards'; see `python -m planaria.lab.commands.codes --help`" in refused(capsys, search)
