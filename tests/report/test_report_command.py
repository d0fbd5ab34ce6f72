"""``planaria report`` of every kind of folder, with its numbers as files; other folders are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria import cli
from planaria.planner import schedule
from support.report.every_page import drilled, mixed, planned, swarmed
from support.report.synthetic_comparison import compared


def written(kind: str, folder: Path) -> Path:
    """Return a folder with the results of a command of this kind."""
    folder.mkdir()
    if kind == "schedule":
        schedule.write(planned(), folder / "x.schedule.json")
        return folder / "x.schedule.json"
    name, made = {
        "comparison": ("comparison.json", compared()),
        "drill": ("drill.json", drilled()),
        "experts": ("results.json", mixed()),
    }[kind]
    (folder / name).write_text(made.model_dump_json())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["comparison", "drill", "experts", "schedule"])
def test_every_kind_has_its_page_and_its_numbers_again(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = written(kind, tmp_path / "run")
    assert cli.run(["report", str(given), "--csv", str(tmp_path / "new" / "csv")]) == 0
    page, *files = map(Path, capsys.readouterr().out.splitlines())
    assert page.parent == tmp_path / "run" and 'id="verdict"' in page.read_text()
    assert sorted(files) == sorted((tmp_path / "new" / "csv").iterdir()) and len(files) > 3
    assert cli.run(["report", str(given), "--to", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == page.read_text()


def test_a_swarms_numbers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, outcome = swarmed(tmp_path / "run")
    from planaria.report.page import write_sheets
    from planaria.swarm.report.swarm_report import body

    files = {
        file.name: file.read_text() for file in write_sheets(tmp_path / "csv", body(tmp_path / "run", config, outcome))
    }
    assert files["accuracy.csv"].splitlines()[:2] == ["series,round,problems solved", "p0,0,0.2"]


@pytest.mark.parametrize("kind", ["comparison", "drill", "experts"])
def test_damage_is_named_in_a_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = written(kind, tmp_path / "run").iterdir()
    file.write_text(file.read_text()[:-9])
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / "run")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and file.name in line


def test_a_folder_of_files_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = written("drill", tmp_path / "run")
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(given), "--csv", str(tmp_path / "taken")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "taken" in line and "choose another folder" in line
    assert (tmp_path / "taken").read_text() == "mine"
