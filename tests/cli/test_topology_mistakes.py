"""Mistakes in ``planaria topology measure``: one line, before any node is started; and files whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.cli import main
from planaria.cli.commands import topology


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def started(*_: object) -> None:
        pytest.fail("nodes were started")

    monkeypatch.setattr(topology, "survey", started)
    (tmp_path / "recipe.toml").write_text("[pipeline]\nstages = 2\n")
    (tmp_path / "one.toml").write_text('matrix = "twelve_cities"\n[[nodes]]\nsite = "Iowa"\n')
    (tmp_path / "many.toml").write_text('matrix = "twelve_cities"\n[[nodes]]\nsite = "Iowa"\ncount = 129\n')
    return tmp_path / "recipe.toml"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes", "1"], "--nodes 1: 2 to 128 nodes can be measured"),
        (["--nodes", "1000000000000"], "--nodes 1000000000000: 2 to 128 nodes can be measured"),
        (["--network.topology", "one.toml"], "network.topology: 1 nodes: 2 to 128"),
        (["--network.topology", "many.toml"], "network.topology: 129 nodes: 2 to 128"),
        (["--network.topology", "one.toml", "--nodes", "3"], "--nodes 3: network.topology names the nodes already"),
        (["--network.topology", "none.toml"], "none.toml: there is no such topology"),
        (["--network.emulat", "true"], "did you mean '--network.emulate'?"),
        (["--to", "recipe.toml"], "recipe.toml is not a folder"),
        (["--to", "recipe.toml/deeper"], "recipe.toml is not a folder"),
    ],
)
def test_a_mistake_is_one_line(
    recipe: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    with pytest.raises(SystemExit) as exit_:
        main(["topology", "measure", "recipe.toml", "--to", "found", *flags])
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert err.count("\n") == 1 and said in err
    assert not (recipe.parent / "found").exists()


def test_what_to_do_with_a_topology_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["topology"])
    assert exit_.value.code == 2
    assert "WHAT" in capsys.readouterr().err


def test_files_are_written_all_or_none(tmp_path: Path) -> None:
    topology.write(tmp_path, {"a": "old", "b": "old"})
    with pytest.raises(FileNotFoundError):
        topology.write(tmp_path, {"a": "new", "no folder/b": "new"})
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a": "old", "b": "old"}
