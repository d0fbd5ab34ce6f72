"""The folder of a standby on another machine; an existing one is replaced, renamed or left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.common.object_store import Retry, Store
from planaria.control.log.reader import ID
from planaria.control.log.shared_log import SharedLog
from planaria.runtime.preparation.run_folders import FOLLOWER
from planaria.runtime.standby.remote_standby import _new_folder

OWN, OTHER = b"0" * 32, b"1" * 32


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedLog:
    monkeypatch.chdir(tmp_path)
    shared = SharedLog(Store(str(tmp_path / "shared" / "run"), "fleet.shared_log", Retry(tries=1)))
    shared.put_file(ID, OWN)
    return shared


def existing(identity: bytes, *marks: str) -> Path:
    """Create the folder ``runs/run`` of a run."""
    folder = Path("runs/run")
    folder.mkdir(parents=True)
    (folder / ID).write_bytes(identity)
    for mark in marks:
        (folder / mark).touch()
    return folder


def test_an_earlier_copy_is_replaced(log: SharedLog) -> None:
    existing(OWN, FOLLOWER, "events.jsonl")
    assert [path.name for path in _new_folder(log, pytest.fail).iterdir()] == [FOLLOWER]


def test_the_folder_of_an_earlier_leader_is_renamed(log: SharedLog) -> None:
    existing(OWN, "events.jsonl")
    notices = list[str]()
    assert [path.name for path in _new_folder(log, notices.append).iterdir()] == [FOLLOWER]
    assert notices == ["renamed runs/run to runs/run.older-1: a newer copy of the run replaces it"]
    assert Path("runs/run.older-1/events.jsonl").exists()


def test_another_runs_folder_is_left_alone(log: SharedLog) -> None:
    folder = existing(OTHER)
    with pytest.raises(UserError, match="runs/run is not of this run; start the standby in another directory"):
        _new_folder(log, pytest.fail)
    assert [path.name for path in folder.iterdir()] == [ID]
