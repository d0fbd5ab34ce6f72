"""Write files atomically: a reader, or a process killed at any point, sees the old or the complete new content."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` on success and is removed on failure.

    :raises OSError: if the folder is not writable or its disk is full.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file with this text in UTF-8, atomically.

    :raises OSError: if the folder is not writable or its disk is full.
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file with this content, atomically.

    :raises OSError: if the folder is not writable or its disk is full.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``path`` on success and removed on failure.

    :raises OSError: if ``path`` cannot be created, is a file, or is a folder that is not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        yield made
        made.replace(path)


def write_error(path: Path, error: Exception) -> str:
    """Describe why ``path`` could not be written, in one clause with the file and the free space of its disk."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return f"cannot write {path} ({reason.splitlines()[0]}{_room(path)})"


def _room(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            free = shutil.disk_usage(folder).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            break
        return f"; {free / 1e6:,.1f} MB free there"
    return ""
