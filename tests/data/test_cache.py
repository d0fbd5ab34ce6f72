"""Where the cache is, and that its lock locks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from planaria.common.cache import cache_folder, locked


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "planaria"
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_folder() == Path("/home/someone/.cache/planaria")
    assert cache_folder("~/here") == Path("/home/someone/here")


def test_second_holder_waits_and_says_so(tmp_path: Path) -> None:
    told, waiting = [], threading.Event()

    def second() -> None:
        with locked(tmp_path / "lock", waiting.set):
            told.append("second")

    thread = threading.Thread(target=second)
    with locked(tmp_path / "lock", lambda: told.append("must not wait")):
        thread.start()
        assert waiting.wait(10)
        told.append("first")
    thread.join(10)
    assert told == ["first", "second"]
