"""Files that appear whole: whoever looks sees what was there before or all of the new, whoever is killed when."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The file to write into; it takes the name ``path`` when all is written, and goes when that fails.

    :raises OSError: when the folder cannot be written to, or its disk is full.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The file with this text in UTF-8, over what was there; whole or not at all.

    :raises OSError: when the folder cannot be written to, or its disk is full.
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """The file with this content, over what was there; whole or not at all.

    :raises OSError: when the folder cannot be written to, or its disk is full.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The folder to write into; it takes the name ``path`` when all is written, and goes when that fails.

    :raises OSError: when ``path`` cannot be made, is a file, or is a folder with something in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        yield made
        made.replace(path)


def refused(path: Path, error: Exception) -> str:
    """Why ``path`` could not be written, in one clause with the file and the room that its disk has."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return f"cannot write {path} ({reason.splitlines()[0]}{_room(path)})"


def _room(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            free = shutil.disk_usage(place).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            break
        return f"; {free / 1e6:,.1f} MB free there"
    return ""
