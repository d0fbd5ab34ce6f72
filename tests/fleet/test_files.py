"""A run's files over a line: what can be had, what can be stored, and what is refused."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.fleet import files
from planaria.fleet.files import Files, FileServer
from planaria.fleet.switchboard import FILES, Switchboard, call
from planaria.transport.secure import new_key

PART = "checkpoints/step-00000004.g2.unfinished/stage-0001.safetensors"


class Run:
    """A controller's folders and its switchboard."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, new_key()
        (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
        (folder / "data").mkdir()
        (folder / "data" / "train.bin").write_bytes(bytes(range(256)) * 9000)
        (folder / "data" / ".hidden").write_bytes(b"no")
        (folder / "secret").write_bytes(b"no")
        self.board = Switchboard("127.0.0.1", 0, self.key, 1000, lambda _, line: line.close())
        self.board.asked = FileServer({"data": folder / "data", "checkpoints": folder / "checkpoints"}).serve
        self.files = Files(self.board.address, self.key)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    run.board.close()


def test_a_file_is_fetched_byte_for_byte(run: Run, tmp_path: Path) -> None:
    assert run.files.names("data") == ["train.bin"]
    run.files.fetch("data/train.bin", tmp_path / "new" / "mine.bin")
    assert (tmp_path / "new" / "mine.bin").read_bytes() == (run.folder / "data" / "train.bin").read_bytes()
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["mine.bin"]


def test_a_part_of_a_checkpoint_is_stored(run: Run, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"weights" * 100_000)
    run.files.put(tmp_path / "part", PART)
    assert (run.folder / PART).read_bytes() == b"weights" * 100_000


@pytest.mark.parametrize(
    "name",
    ["data/../secret", "secret", "data/.hidden", "data//train.bin", "/etc/passwd", "data/absent", "run/a.json", "data"],
)
def test_nothing_else_can_be_had(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"no such name in a run|[nN]o such file|directory"):
        run.files.fetch(name, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_link_is_not_followed(run: Run, tmp_path: Path) -> None:
    (run.folder / "data" / "link").symlink_to(run.folder / "secret")
    with pytest.raises(OSError, match="link"):
        run.files.fetch("data/link", tmp_path / "mine")


@pytest.mark.parametrize(
    "name",
    [
        "data/train.bin",
        "checkpoints/step-00000002/stage-0001.safetensors",
        "checkpoints/step-00000004.g2.unfinished/manifest.json",
        "checkpoints/step-00000004.g2.unfinished/../stage-0001.safetensors",
        "checkpoints/../run.json",
    ],
)
def test_nothing_else_can_be_written(run: Run, tmp_path: Path, name: str) -> None:
    before = (run.folder / "data" / "train.bin").read_bytes()
    (tmp_path / "part").write_bytes(b"other")
    with pytest.raises(OSError, match="no such name"):
        run.files.put(tmp_path / "part", name)
    assert (run.folder / "data" / "train.bin").read_bytes() == before
    assert sorted(f.name for f in (run.folder / "checkpoints").iterdir()) == ["step-00000002"]


def test_a_stranger_gets_nothing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not this run's"):
        Files(run.board.address, new_key()).fetch("data/train.bin", tmp_path / "mine")


def test_a_full_disk_there_is_said_here(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    (tmp_path / "part").write_bytes(b"weights")
    with pytest.raises(OSError, match="No space left"):
        run.files.put(tmp_path / "part", PART)
    assert not (run.folder / PART).exists()


def test_damage_on_the_way_is_noticed(run: Run, tmp_path: Path) -> None:
    """A server that says another digest than that of what it sent."""

    def lies(line: files.WorkerLine) -> None:
        files._next(line)
        files._say(line, files.Content(size=4))
        line.send_bytes(b"four")
        files._say(line, files.Digest(sha256="0" * 64))

    run.board.asked = lies
    with pytest.raises(OSError, match="damaged on its way"):
        run.files.fetch("data/train.bin", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_part_that_breaks_off_leaves_nothing(run: Run) -> None:
    line = call(run.board.address, run.key, "files", FILES)
    files._say(line, files.Put(name=PART, size=100))
    files._next(line)
    line.send_bytes(b"a few")
    line.close()
    for _ in range(100):
        if not list((run.folder / PART).parent.iterdir()):
            break
        threading.Event().wait(0.05)
    assert not list((run.folder / PART).parent.iterdir())


@given(words=st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_anything_else_ends_the_line(words: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    key = new_key()
    served = FileServer({})
    with ours, theirs:
        ends: list[ssl.SSLSocket] = []
        other = threading.Thread(target=lambda: ends.append(_secured(theirs, key, False)))
        other.start()
        mine = _secured(ours, key, True)
        other.join()
        line = files.WorkerLine(files_secured(mine), 1 << 20, "")
        for word in words:
            line.send_bytes(word)
        line.hang_up()
        served.serve(files.WorkerLine(files_secured(ends[0]), 1 << 20, ""))
        line.close()


def _secured(raw: socket.socket, key: bytes, calling: bool) -> ssl.SSLSocket:
    from planaria.transport.secure import begin, prove

    tls = begin(raw, key, calling)
    prove(tls, key, 10.0)
    return tls


def files_secured(tls: ssl.SSLSocket) -> object:
    from planaria.transport.channel import Secured

    return Secured(tls)
