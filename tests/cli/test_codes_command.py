"""``planaria codes`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planaria.cli import main
from planaria.recovery import codes

ASKED = ["codes", "--shards", "16", "--data", "8", "--distance", "4", "--weight", "4", "--seed", "4", "--tries", "3000"]


def ended(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    code = ending.value.code
    assert isinstance(code, int)
    return code


def test_it_finds_a_code_that_a_recipe_can_name_and_writes_its_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, product = tmp_path / "code.json", tmp_path / "product.json"
    assert ended([*ASKED, "--to", str(to), "--product", str(product)]) == 0
    said = capsys.readouterr().out
    assert "[16, 8, 4]" in said and "[[320, 64, 4]]" in said
    rows = {line.split("  ")[1].strip(): line.split() for line in said.splitlines() if line.startswith("  ")}
    assert rows["this code"][2] == "3" and rows["local, groups of 4"][4] == "3" and rows["reed_solomon"][1] == "8"
    assert rows["local, groups of 4"][5:11] == ["1"] * 6, "any six are survived"
    assert rows["this code"][3:6] == ["1"] * 3 and float(rows["this code"][6]) < 1
    assert codes.code(str(to), 16, 3).data == 8
    made = json.loads(product.read_text())
    assert (made["qubits"], made["logical"], made["distance"]) == (320, 64, 4)
    assert all(len({*x} & {*z}) % 2 == 0 for x in made["x"] for z in made["z"])


def test_what_falls_short_is_said_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "code.json"
    few = ["codes", "--shards", "14", "--data", "3", "--distance", "6", "--weight", "3", "--tries", "1"]
    assert ended([*few, "--to", str(to)]) == 1
    assert "falls short: distance" in capsys.readouterr().out and to.is_file()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--distance", "8"], "distance = 8: checks of 4 allow at most 7"),
        (["--tries", "0"], "--tries: 0; give 1 to 10000000"),
        (["--weight", "1"], "a check 2 or more"),
        (["--data", "17", "--shards", "40"], "data has 1 to 16"),
        (["--shards", "60", "--distance", "9"], "lower it, or --shards"),
        (["--degree", "9"], "degree = 9: a shard can be in at most 8 checks"),
        (["--to", "nowhere/code.json"], "nowhere/code.json: nowhere is no folder"),
        (["--data", "eight"], "invalid int value"),
    ],
)
def test_what_cannot_be_is_one_line(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([*ASKED, *wrong]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told and "\n" not in told
