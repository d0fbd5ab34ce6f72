"""Compiled functions: the cache of machine code, and operation without one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from planaria.common.cache import cache_folder
from planaria.common.compiled import _folder, compile_function
from planaria.common.errors import UserError

pytest.importorskip("numba")


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _folder.cache_clear()
    yield
    _folder.cache_clear()


def kept(folder: Path) -> list[Path]:
    """Return the files of machine code below a folder."""
    return list(folder.rglob("*.nbc"))


def test_code_is_cached_in_the_users_cache_or_numbas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_function(add)(2, 3) == 5 and kept(tmp_path / "cache" / "planaria" / "compiled")
    _folder.cache_clear()
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert compile_function(add)(2, 3) == 5 and kept(tmp_path / "numba") and not kept(tmp_path / "cache")
    again: Any = compile_function(add)
    assert again(2, 3) == 5 and sum(again.machine.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_functions_are_compiled_without_a_writable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (tmp_path / "file").touch()  # a folder below it cannot be made, not even by root
    monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    assert compile_function(add)(2, 3) == 5 and _folder(Path(__file__).parent) is None


def test_a_removed_or_damaged_cache_costs_only_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    function: Any = compile_function(add)
    assert function.machine is not None
    shutil.rmtree(tmp_path / "numba")
    (tmp_path / "numba").touch()
    assert function(2, 3) == 5 and (tmp_path / "numba").is_file()


def test_a_missing_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert compile_function(add)(2, 3) == 5
    with pytest.raises(UserError, match=r"data\.cache: Could not .* set data\.cache or XDG_CACHE_HOME to a folder"):
        cache_folder()
