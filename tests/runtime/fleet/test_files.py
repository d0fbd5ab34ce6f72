"""A run's files over a connection: fetched, stored and rejected files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.runtime.fleet import files
from planaria.runtime.fleet.control_connections import BlockingConnection, ControlListener, call
from planaria.runtime.fleet.files import Files, FileServer
from planaria.runtime.transport.listener import FILES
from planaria.runtime.transport.secure import new_key
from support.waiting import until

PART = "checkpoints/step-00000004.g2.unfinished/stage-0001.safetensors"
READABLE = [
    "data/text/train.bin",
    "run/schedule.json",
    "checkpoints/step-00000002/manifest.json",
    "checkpoints/step-00000002/stage-0001.safetensors",
    "checkpoints/step-00000002/replica-1/stage-0001-at-2.safetensors",
]
SECRET = ["address.json", "events.jsonl", "workers/w0.log", "data/.hidden", "checkpoints/notes", "config.json", PART]


class Run:
    """A controller's folders and its control_listener."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, new_key()
        saved, collected = (folder / "checkpoints" / name for name in ("step-00000002", "step-00000004.g2.unfinished"))
        for place in (saved / "replica-1", collected, folder / "data", folder / "workers"):
            place.mkdir(parents=True)
        (folder / "data" / "train.bin").write_bytes(bytes(range(256)) * 9000)
        for file in READABLE[1:]:
            (folder / file.removeprefix("run/")).write_bytes(b"yes")
        for file in SECRET:
            (folder / file).write_bytes(b"no")
        self.listener = ControlListener("127.0.0.1", 0, self.key, 1000, lambda _, connection: connection.close())
        roots = {"run/schedule.json": folder / "schedule.json", "data/text": folder / "data"}
        self.listener.on_file_request = FileServer(roots | {"checkpoints": folder / "checkpoints"}).serve
        self.files = Files(self.listener.address, self.key)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    run.listener.close()


def test_a_file_is_fetched_byte_for_byte(run: Run, tmp_path: Path) -> None:
    assert run.files.names("data/text") == ["train.bin"]
    run.files.fetch(READABLE[0], tmp_path / "new" / "mine.bin")
    assert (tmp_path / "new" / "mine.bin").read_bytes() == (run.folder / "data" / "train.bin").read_bytes()
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["mine.bin"]
    for name in READABLE[1:]:
        run.files.fetch(name, tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"yes"


def test_a_part_of_a_checkpoint_is_stored(run: Run, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"weights" * 100_000)
    run.files.put(tmp_path / "part", PART)
    assert (run.folder / PART).read_bytes() == b"weights" * 100_000


@pytest.mark.parametrize(
    "name",
    [
        "data/text/../../address.json",
        "data/text/.hidden",
        "data/text//train.bin",
        "data/other/train.bin",
        "/etc/passwd",
        "run/schedule.json/x",
        "data/text",
        "checkpoints/step-00000002",
        *(f"{root}/{name}" for name in SECRET for root in ("run", "run/schedule.json/..", "data/text/..")),
        *SECRET,
    ],
)
def test_nothing_else_can_be_fetched(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="no such name in a run"):
        run.files.fetch(name, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("name", ["run", "checkpoints", "checkpoints/step-00000002", "data", "data/..", "data/text/.."])
def test_nothing_else_can_be_listed(run: Run, name: str) -> None:
    with pytest.raises(OSError, match="no such name in a run"):
        run.files.names(name)


def test_links_are_not_followed_and_strangers_get_nothing(run: Run, tmp_path: Path) -> None:
    (run.folder / "data" / "link").symlink_to(run.folder / "address.json")
    with pytest.raises(OSError, match="link"):
        run.files.fetch("data/text/link", tmp_path / "mine")
    with pytest.raises(OSError, match="not this run's"):
        Files(run.listener.address, new_key()).fetch(READABLE[0], tmp_path / "mine")


@pytest.mark.parametrize(
    "name",
    [
        "data/text/train.bin",
        "checkpoints/step-00000002/stage-0001.safetensors",
        "checkpoints/step-00000004.g2.unfinished/manifest.json",
        "checkpoints/step-00000004.g2.unfinished/../stage-0001.safetensors",
        "checkpoints/../run.json",
        PART.replace("g2", "g3"),
        PART.replace("00000004", "00000005"),
        PART.replace("stage-", "replica-0.g2/stage-"),
    ],
)
def test_nothing_else_can_be_written(run: Run, tmp_path: Path, name: str) -> None:
    """A part of a checkpoint that is not being collected has no folder, or a sealed one."""
    before = {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()}
    (tmp_path / "part").write_bytes(b"other")
    with pytest.raises(OSError, match=r"no such (name|checkpoint)"):
        run.files.put(tmp_path / "part", name)
    assert {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()} == before


def test_a_full_disk_is_reported_to_the_worker(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    (tmp_path / "part").write_bytes(b"weights")
    with pytest.raises(OSError, match="No space left"):
        run.files.put(tmp_path / "part", PART)
    assert (run.folder / PART).read_bytes() == b"no", "what was there before"


def test_a_wrong_digest_is_refused(run: Run, tmp_path: Path) -> None:
    """The server announces another digest than that of the bytes it sent."""

    def is_byzantine(connection: BlockingConnection) -> None:
        files._next(connection)
        files._send_message(connection, files.FileContent(size=4))
        connection.send_bytes(b"four")
        files._send_message(connection, files.Digest(sha256="0" * 64))

    run.listener.on_file_request = is_byzantine
    with pytest.raises(OSError, match="damaged in transfer"):
        run.files.fetch(READABLE[0], tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_part_that_breaks_off_leaves_nothing(run: Run) -> None:
    connection = call(run.listener.address, run.key, "files", FILES)
    files._send_message(connection, files.Put(name=PART, size=100))
    files._next(connection)
    connection.send_bytes(b"a few")
    connection.close()
    until(lambda: [*(run.folder / PART).parent.iterdir()] == [run.folder / PART])
