"""The cache folder and its lock."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from planaria.common.cache import cache_folder, hold_lock


def test_the_cache_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "planaria"
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_folder() == Path("/home/someone/.cache/planaria")
    assert cache_folder("~/here") == Path("/home/someone/here")


def test_a_second_holder_reports_and_waits(tmp_path: Path) -> None:
    order, waiting = [], threading.Event()

    def second() -> None:
        with hold_lock(tmp_path / "lock", waiting.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with hold_lock(tmp_path / "lock", lambda: order.append("must not wait")):
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
