"""``planaria network measure``: errors before any node is started, and files written completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.cli.commands import network
from support.command_line import refused


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def started(*_: object) -> None:
        pytest.fail("nodes were started")

    monkeypatch.setattr("planaria.runtime.engine.link_survey.survey", started)
    (tmp_path / "recipe.toml").write_text("[pipeline]\nstages = 2\n")
    (tmp_path / "one.toml").write_text('matrix = "twelve_cities"\n[[nodes]]\nsite = "Iowa"\n')
    (tmp_path / "many.toml").write_text('matrix = "twelve_cities"\n[[nodes]]\nsite = "Iowa"\ncount = 129\n')
    return tmp_path / "recipe.toml"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--nodes", "1"], "--nodes 1: 2 to 128 nodes can be measured"),
        (["--nodes", "1000000000000"], "--nodes 1000000000000: 2 to 128 nodes can be measured"),
        (["--network.topology", "one.toml"], "network.topology: 1 nodes: 2 to 128"),
        (["--network.topology", "many.toml"], "network.topology: 129 nodes: 2 to 128"),
        (["--network.topology", "one.toml", "--nodes", "3"], "--nodes 3: network.topology already lists the nodes"),
        (["--network.topology", "none.toml"], "none.toml: no such topology"),
        (["--network.emulat", "true"], "did you mean '--network.emulate'?"),
        (["--to", "recipe.toml"], "recipe.toml is not a folder"),
        (["--to", "recipe.toml/deeper"], "recipe.toml is not a folder"),
    ],
)
def test_invalid_options_are_refused(
    recipe: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    assert complaint in refused(capsys, "network", "measure", "recipe.toml", "--to", "found", *flags)
    assert not (recipe.parent / "found").exists()


def test_no_file_is_replaced_if_one_cannot_be_written(tmp_path: Path) -> None:
    network.write_all(tmp_path, {"a": "old", "b": "old"})
    with pytest.raises(FileNotFoundError):
        network.write_all(tmp_path, {"a": "new", "no folder/b": "new"})
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a": "old", "b": "old"}
