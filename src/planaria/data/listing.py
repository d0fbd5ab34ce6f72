"""The files of a corpus on this machine: which are read, in which order, and why others are skipped."""

from __future__ import annotations

import difflib
import os
import sysconfig
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NoReturn

from planaria.common.cache import cache_folder
from planaria.common.errors import UserError
from planaria.config.data_config import DataConfig
from planaria.config.names import expand_home

STDLIB, LOCAL = "stdlib", "file://"
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})
"""folders of the standard library that hold tests, third-party code or no source"""
Passed = dict[str, list[str]]
"""reason → skipped files and folders"""


def list_files(config: DataConfig, passed: Passed) -> tuple[Path, list[str]]:
    """Return the corpus's folder and the sorted names of the files below it."""
    path, cache = expand_home(config.source.removeprefix(LOCAL)), cache_folder(config.cache).resolve()
    try:
        if config.source == STDLIB:
            path = Path(sysconfig.get_paths()["stdlib"])
            return path, [name for name in _walk(path, _not_stdlib) if name.endswith(".py")]
        if path.is_dir():
            # Prepared data must not become part of the corpus.
            return path, _walk(path, lambda folder: folder.resolve() == cache, passed)
        if path.is_file():
            return path.parent, [path.name]
        if not path.exists():
            _raise_missing(config.source, path)
    except OSError as error:
        raise UserError(
            f"data.source = {config.source!r}: cannot read {error.filename} ({error.strerror}); change its permissions"
        ) from error
    raise UserError(f"data.source = {config.source!r} is neither a file nor a folder; use the path of one")


def _not_stdlib(folder: Path) -> bool:
    return folder.name in NOT_STDLIB


def _walk(root: Path, leave_out: Callable[[Path], bool], passed: Passed | None = None) -> list[str]:
    """Return the sorted relative names of all files below ``root``, except hidden ones and folders in ``leave_out``.

    With ``passed``, follow links to folders, read each folder once, and record skipped paths.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk would skip unreadable folders and silently change the corpus

    def skip(path: Path, reason: str) -> None:
        if passed is not None:
            passed.setdefault(reason, []).append(path.relative_to(root).as_posix())

    names = list[str]()
    visited = set[tuple[int, int]]()
    waiting = [root]
    while waiting:  # links come last, so that a folder with both has its name without a link
        for folder, below, files in os.walk(waiting.pop(0), onerror=refuse):
            current, status = Path(folder), Path(folder).stat()
            if (status.st_dev, status.st_ino) in visited:
                skip(current, "a link to a folder that is read already")
                below.clear()
                continue
            visited.add((status.st_dev, status.st_ino))
            for path in [current / name for name in sorted(below)]:
                if (hidden := path.name.startswith(".")) or leave_out(path):
                    skip(path, "hidden" if hidden else "prepared data (data.cache)")
                    below.remove(path.name)
                elif passed is not None and path.is_symlink():
                    waiting.append(path)
            for path in [current / name for name in files]:
                if why := _why_skipped(path):
                    skip(path, why)
                else:
                    names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _why_skipped(path: Path) -> str:
    """Return why a file of a folder is skipped, or an empty string if it is read."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_file():
        return ""
    return "a broken link" if path.is_symlink() else "not a regular file"


def _raise_missing(source: str, path: Path) -> NoReturn:
    """Raise UserError for a missing path, suggesting existing names."""
    while not path.parent.is_dir():
        path = path.parent
    names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(path.name, [*names, STDLIB], n=1, cutoff=0.5)
    some = ", ".join(islice(names, 6)) + (", …" if len(names) > 6 else "")
    hint = f"did you mean {close[0]!r}?" if close else f"known there: {some or 'nothing'}"
    raise UserError(f"data.source = {source!r}: there is no {path.name!r} in {path.parent.resolve()}; {hint}")
