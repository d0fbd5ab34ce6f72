"""Write files atomically: a reader, or a process killed at any point, sees the old or the complete new content.

Writers raise OSError if the folder is not writable or its disk is full.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""errors of file systems without hard links (FAT, many mounted buckets and remote folders)"""


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` on success and is removed on failure."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file with this text in UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file with this content, atomically."""
    with replace_atomically(path) as unfinished:
        unfinished.write_bytes(content)


def write_durable(path: Path, content: bytes) -> None:
    """Replace a file with this content, atomically; it is on disk when this returns."""
    with replace_atomically(path) as unfinished, unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return once the names of the files in ``folder`` are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(path: Path, data: bytes, mode: int) -> bool:
    """Write ``data`` to ``path`` in an existing folder; return False, without writing, if ``path`` exists.

    Of several concurrent writers exactly one gets True. A killed writer leaves a hidden temporary file.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        return _link_new(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _link_new(unfinished: Path, path: Path) -> bool:
    """Link rather than rename: a link never replaces a file."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # a file created between this check and the rename is replaced
            return False
        unfinished.rename(path)
    return True


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``path`` on success and removed on failure.

    :raises OSError: if ``path`` cannot be created, is a file, or is a folder that is not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        unfinished = Path(temporary) / "made"
        unfinished.mkdir()
        yield unfinished
        unfinished.replace(path)


def write_error(path: Path, error: Exception) -> str:
    """Describe why ``path`` could not be written, in one clause with the file and the free space of its disk."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return f"cannot write {path} ({reason.splitlines()[0]}{_free_space(path)})"


def _free_space(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            free = shutil.disk_usage(folder).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            break
        return f"; {free / 1e6:,.1f} MB free there"
    return ""
