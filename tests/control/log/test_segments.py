"""Segmented logs keep all lines in order under truncation, kills and concurrent reads."""

from __future__ import annotations

import errno
import gzip
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.control.log import segments
from planaria.control.log.segments import (
    LogEnd,
    RotatingLog,
    end_of_log,
    keep_first,
    pack,
    packed,
    read,
    uncompressed_path,
)

MOST = 3_000
"""lines written during concurrent reads"""
LINES = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=40), max_size=40)


def texts(path: Path, upto: LogEnd | None = None) -> list[str]:
    return [line.text.decode() for line in read(path, upto or end_of_log(path))]


def write(path: Path, lines: list[str], full: int = 100) -> None:
    log = RotatingLog(path, full)
    for line in lines:
        log.write(line)
    log.close()


@given(LINES, st.integers(1, 400), st.integers(0, 40), st.data())
@settings(deadline=None, max_examples=60)
def test_a_truncated_log_resumes_with_all_complete_lines(
    lines: list[str], full: int, resumed: int, data: st.DataObject
) -> None:
    """Any number of segments, some still plain; truncated within the newest lines; then more is written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        write(path, lines, full)
        assert texts(path) == lines
        assert path.stat().st_size <= max(full, max(map(len, map(str.encode, lines)), default=0) + 1)
        for number in (
            data.draw(st.sets(st.sampled_from(range(1, end_of_log(path).segments + 1)))) if end_of_log(path)[0] else ()
        ):
            inflated = gzip.decompress(packed(path, number).read_bytes())
            uncompressed_path(path, number).write_bytes(inflated)
            if data.draw(st.booleans()):  # killed before it was compressed; else between that and its removal
                packed(path, number).unlink()
                (path.parent / "segments" / f".{packed(path, number).name}.123").write_bytes(b"half")
        tail = path.read_bytes()
        cut = data.draw(st.integers(0, len(tail)))
        path.write_bytes(tail[:cut])
        whole = lines[: len(lines) - tail[cut:].count(b"\n")]
        assert texts(path) == whole
        more = [f"more {n}" for n in range(resumed)]
        write(path, more, full)
        assert texts(path) == whole + more
        assert not [*path.parent.glob("segments/.*"), *path.parent.glob("segments/*.jsonl")], "all is compressed"


class _Killed(Exception):
    pass


STEPS: dict[str, Callable[[pytest.MonkeyPatch, Callable[..., object]], None]] = {
    "before it is renamed": lambda patch, stop: patch.setattr(Path, "rename", stop),
    "before a new file is begun": lambda patch, stop: patch.setattr(Path, "open", stop),
    "before it is compressed": lambda patch, stop: patch.setattr(gzip, "compress", stop),
    "before that has its name": lambda patch, stop: patch.setattr(Path, "replace", stop),
    "before the plain one is removed": lambda patch, stop: patch.setattr(Path, "unlink", stop),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kill_during_a_rotation_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path, lines = tmp_path / "log.jsonl", [f"line {n}" for n in range(30)]
    (tmp_path / "segments").mkdir()
    log = RotatingLog(path, 100)
    done = []

    def stop(*_: object, **__: object) -> None:
        raise _Killed

    try:
        for line in lines:
            if len(done) == 9:
                STEPS[step](monkeypatch, stop)
            log.write(line)
            done.append(line)
        while log._packing is not None and log._packing.is_alive():
            log._packing.join()
    except _Killed:
        pass
    monkeypatch.undo()
    assert len(done) > 9, "the kill was during a rotation"
    assert texts(path) == done
    write(path, ["and on"], 100)
    assert texts(path) == [*done, "and on"]


def test_a_killed_writer_loses_no_written_line(tmp_path: Path) -> None:
    """A real process and a real SIGKILL."""
    path, (reading_end, writing_end) = tmp_path / "log.jsonl", os.pipe()
    child = os.fork()
    if child == 0:
        try:
            log = RotatingLog(path, 2000)
            for number in range(10**9):
                log.write(f"line {number}")
                os.write(writing_end, b".")
        finally:
            os._exit(1)
    os.close(writing_end)
    written_lines = 0
    while written_lines < 5000:
        written_lines += len(os.read(reading_end, 4096))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading_end, 65536):
        written_lines += len(more)
    os.close(reading_end)
    found = texts(path)
    assert len(found) in (written_lines, written_lines + 1)
    assert found == [f"line {number}" for number in range(len(found))]


def test_a_concurrent_reader_sees_a_stable_prefix(tmp_path: Path) -> None:
    path, over = tmp_path / "log.jsonl", threading.Event()

    def write_lines() -> None:
        log, number = RotatingLog(path, 500), 0
        while not over.is_set() and number < MOST:  # each look reads all: they grow longer and longer
            log.write(f"line {number}")
            number += 1
        log.close()

    writer = threading.Thread(target=write_lines)
    writer.start()
    try:
        seen = []
        while writer.is_alive() and (len(seen) < 30 or seen[-1][0].segments < 20):
            upto = end_of_log(path)
            seen.append((upto, texts(path, upto)))
    finally:
        over.set()
        writer.join()
    whole = texts(path)
    for upto, lines in seen:
        assert lines == whole[: len(lines)]
        assert texts(path, upto) == lines
    assert [len(lines) for _, lines in seen] == sorted(len(lines) for _, lines in seen)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    write(path, [f"line {n}" for n in range(40)])
    assert end_of_log(path).segments > 2
    return path


def bomb(size: int) -> bytes:
    return gzip.compress(b"x" * 60 + b"\n" + bytes(size))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda file: file.unlink(), "missing, so the log has a gap"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-9]), "not a complete gzip stream"),
    "flipped": (lambda file: file.write_bytes(file.read_bytes()[:-8] + b"\0" * 8), "damaged"),
    "no gzip": (lambda file: file.write_bytes(b"line 3\n"), "damaged"),
    "twice": (lambda file: file.write_bytes(2 * file.read_bytes()), "not a complete gzip stream"),
    "a bomb": (lambda file: file.write_bytes(bomb(64 << 20)), "holds more than"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_is_named(long: Path, damage: str) -> None:
    do, error = DAMAGES[damage]
    do(packed(long, 2))
    with pytest.raises(UserError, match=rf"log-000002\.jsonl\.gz.*{error}") as caught:
        texts(long)
    assert "\n" not in str(caught.value)


def test_an_endless_line_is_reported_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LONGEST_LINE", 1 << 20)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"line\n")
    os.truncate(path, 1 << 36)
    with pytest.raises(UserError, match=r"log\.jsonl:2: over 1 MB"):
        texts(path)


def test_an_unsegmented_log_continues_in_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays plain if it is larger than a compressed segment can be."""
    monkeypatch.setattr(segments, "LARGEST", 150)
    path, old = tmp_path / "log.jsonl", [f"old {n}" for n in range(100)]
    path.write_text("".join(f"{line}\n" for line in old))
    write(path, [f"new {n}" for n in range(30)])
    assert uncompressed_path(path, 1).exists() and packed(path, 2).exists()
    assert texts(path) == old + [f"new {n}" for n in range(30)]


def test_a_write_error_names_the_file_and_leaves_complete_lines(tmp_path: Path) -> None:
    """A disk takes only a part of a line; the log continues once there is space."""
    path = tmp_path / "log.jsonl"
    log = RotatingLog(path)
    log.write("first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(OSError) as caught:
            log.write("x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(path)
    log.write("second")
    log.close()
    assert texts(path) == ["first", "second"]


def test_a_failed_rotation_leaves_the_log_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    log = RotatingLog(path, 10)
    log.write("first")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space") as caught:
            log.write("second")
    assert caught.value.filename == str(path)
    log.write("third")
    log.close()
    assert texts(path) == ["first", "third"]


def test_segments_that_cannot_be_compressed_stay_readable(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(long.parent / "segments")
    lines = [f"line {n}" for n in range(40)]
    long.unlink()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        write(long, lines)
        assert uncompressed_path(long, 1).exists() and not packed(long, 1).exists()
        assert texts(long) == lines
    pack(long)
    assert packed(long, 1).exists() and not uncompressed_path(long, 1).exists()
    assert texts(long) == lines


@given(LINES, st.integers(1, 400), st.integers(0, 45))
@settings(deadline=None, max_examples=60)
def test_a_log_that_keeps_its_first_lines_continues_after_them(lines: list[str], full: int, kept: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        write(path, lines, full)
        keep_first(path, kept)
        assert texts(path) == lines[:kept]
        write(path, ["next"], full)
        assert texts(path) == [*lines[:kept], "next"]
