"""A full disk: its cost, its report and the files that remain. The disk is a small one in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.cli import main
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.runtime.api import execution
from planaria.runtime.api import import_export as export
from planaria.runtime.checkpoint.store import CheckpointStore
from support.live.harness import LiveWorkers, ending, facts, folder_of, losses, reason, resume, tiny, train
from support.observer import train_inline

ROOM = 64 << 10
"""bytes that are left on a full disk: enough for lines of a log, not for a stage"""


class Disk:
    """A separate disk for ``runs``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self, room: int = ROOM) -> None:
        """Leave ``room`` bytes."""
        free = shutil.disk_usage(self.folder).free
        if free > room:
            with self._filler.open("ab") as file:
                file.write(b"x" * (free - room))

    def clear(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "planaria-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def config(tmp_path: Path, **sections: dict[str, object]) -> RunConfig:
    return tiny(tmp_path, steps=12, checkpoint={"every": 4}, **sections)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_save_without_room_costs_that_save_alone(tmp_path: Path, disk: Disk, replicas: int) -> None:
    def hook(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.Save) and decision.step == 8:
            disk.fill()
        if isinstance(decision, d.Discard):
            disk.clear()

    several = {"exchange": {"replicas": replicas, "kind": "diloco", "options": {"every": 4}}}
    record = train(config(tmp_path, **several if replicas > 1 else {}), hook=hook)
    failed = facts(record, e.SaveFailed)
    assert failed and {f.step for f in failed} == {8}
    assert all("stage-" in f.detail and "No space left" in f.detail and "MB free" in f.detail for f in failed)
    assert ending(record).outcome == "finished", (ending(record), [f.detail for f in failed])
    assert [s.step for s in facts(record, d.Seal)] == [4, 12]
    assert left(record.folder) == ["step-00000004", "step-00000012"]


@pytest.mark.slow
def test_a_run_that_ends_on_a_full_disk_fails_and_can_be_resumed(tmp_path: Path, disk: Disk) -> None:
    def hook(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.Save) and decision.step == 12:
            disk.fill()

    record = train(config(tmp_path), hook=hook)
    assert ending(record).outcome == "failed"
    assert "stage-" in reason(record) and "MB free" in reason(record) and "step-00000008" in reason(record)
    assert left(record.folder) == ["step-00000004", "step-00000008"]
    disk.clear()
    whole = resume(record.folder)
    assert ending(whole).outcome == "finished" and losses(whole) == losses(record)


@pytest.mark.slow  # tests/control has it without processes
def test_a_manifest_that_cannot_be_written_seals_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal, tries = CheckpointStore.seal, []

    def full(self: CheckpointStore, name: str, *rest: object) -> object:
        tries.append(name)
        if len(tries) in (2, 3):
            raise OSError(28, "No space left on device")
        return seal(self, name, *rest)

    monkeypatch.setattr(CheckpointStore, "seal", full)
    record = train(config(tmp_path))
    assert [(f.worker, f.step) for f in facts(record, e.SaveFailed)] == [(e.CONTROLLER, 8), (e.CONTROLLER, 12)]
    assert ending(record).outcome == "finished" and left(folder_of(record.config)) == ["step-00000004", "step-00000012"]


def test_a_full_disk_in_one_process_costs_that_save_alone(tmp_path: Path, disk: Disk) -> None:
    full = []

    def hook(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.Commit) and decision.step == 7:
            disk.fill()
        if isinstance(decision, d.RunStep) and decision.step == 8:
            full.append(left(workers.folder))
            disk.clear()

    record = train(config(tmp_path), hook=hook, engine=train_inline)
    failed, *more = facts(record, e.SaveFailed)
    assert {failed.step, *(f.step for f in more)} == {8} and "stage-" in failed.detail and "MB free" in failed.detail
    assert full == [["step-00000004"]], "what was half written was removed"
    assert ending(record).outcome == "finished" and left(record.folder) == ["step-00000004", "step-00000012"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("again", [False, True])
def test_an_unwritable_log_stops_the_run_at_a_whole_step(tmp_path: Path, disk: Disk, again: bool) -> None:
    """The log's reserve holds all that happened until then. ``again``: there is room for the last save.

    The log's last page may have room for a few more steps; the next save is far.
    """

    def hook(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.RunStep) and decision.step == 16:
            disk.fill(room=0)
        if again and isinstance(decision, d.Save) and decision.step > 15:
            disk.clear()

    record = train(tiny(tmp_path, steps=45, checkpoint={"every": 15}), hook=hook)
    assert "cannot be written (No space left on device)" in facts(record, e.StopRequested)[0].reason
    assert ending(record).outcome == ("stopped" if again else "failed")
    assert (".jsonl" if again else "stage-") in reason(record)
    steps = len(losses(record))
    assert steps < 30, "before the next save"
    assert left(record.folder) == ["step-00000015", f"step-{steps:08d}"][: 1 + again]
    assert not (record.folder / ".reserve").exists()
    disk.clear()
    assert ending(resume(record.folder)).outcome == "finished"


def test_an_export_without_room_fails_in_one_line(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def crowded(folder: Path, to: Path) -> Path:
        disk.fill()
        return export.export_run(folder, to)

    recipe_file = tmp_path / "run.toml"
    recipe_file.write_text(recipe.dump(config(tmp_path)))
    run = disk.folder / "run"
    monkeypatch.setattr(execution, "export_run", crowded)
    for words in (["train", recipe_file, "--engine", "inline", "--quiet"], ["export", run, "--to", run / "there"]):
        with pytest.raises(SystemExit) as exit_:
            main(list(map(str, words)))
        _, err = capfd.readouterr()
        assert exit_.value.code == 2 and err.startswith("planaria: export: cannot write ") and err.count("\n") == 1, err
        assert "No space left" in err and "MB free there" in err
    assert not [path for path in run.iterdir() if "model" in path.name or "there" in path.name]
    assert ending(read_run(run)).outcome == "finished" and left(run)[-1] == "step-00000012"
