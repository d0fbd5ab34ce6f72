from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from planaria.common import atomic, digests
from planaria.common.errors import UserError


def require(folder: Path, *names: str) -> None:
    digests.require(folder, names, digests.read(folder))


def test_written_files_match_their_list(tmp_path: Path) -> None:
    digests.write_files(tmp_path, {"a": b"one", "b": b"two"})
    digests.write_files(tmp_path, {"b": b"three"})
    assert digests.read(tmp_path) == {
        "a": (hashlib.sha256(b"one").hexdigest(),),
        "b": (hashlib.sha256(b"three").hexdigest(),),
    }
    require(tmp_path, "a", "b", "neither present nor listed")
    done = subprocess.run(["sha256sum", "--check", "--strict", digests.FILE], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("after", range(5))
def test_a_kill_while_writing_leaves_no_file_that_looks_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The writes are: the list with both digests, two files, the list with the new digests."""
    digests.write_files(tmp_path, {"a": b"one", "b": b"two"})
    left, real = [after], atomic.replace_atomically

    def until_killed(path: Path):  # type: ignore[no-untyped-def]
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(path)

    monkeypatch.setattr(atomic, "replace_atomically", until_killed)
    try:
        digests.write_files(tmp_path, {"a": b"ONE", "b": b"TWO"})
    except KeyboardInterrupt:
        assert after < 4
    else:
        assert after == 4
    require(tmp_path, "a", "b")


def test_changed_files_are_refused_with_the_fix(tmp_path: Path) -> None:
    digests.write_files(tmp_path, {"a": b"one", "b": b"two"})
    (tmp_path / "a").write_bytes(b"One")
    (tmp_path / "b").unlink()
    (tmp_path / "c").touch()
    for name, complaint in (("a", "has changed since"), ("b", "is missing"), ("c", "does not list it")):
        with pytest.raises(UserError, match=rf"{name}\b.*{complaint}.*planaria run check {tmp_path} --accept"):
            require(tmp_path, name)
    assert digests.replace_list(tmp_path, ("a", "b", "c")) == ["a", "b", "c"]
    require(tmp_path, "a", "b", "c")


@pytest.mark.parametrize("place", [0, 5, 60, 80, 150, -1])
def test_a_damaged_list_is_refused(tmp_path: Path, place: int) -> None:
    digests.write_files(tmp_path, {"a": b"one", "b": b"two"})
    content = bytearray((tmp_path / digests.FILE).read_bytes())
    content[place] ^= 1
    (tmp_path / digests.FILE).write_bytes(content)
    with pytest.raises(UserError, match=rf"{digests.FILE}: (damaged|is not text)"):
        digests.read(tmp_path)
