"""The cache folder of prepared data, and locks by which one process at a time writes an entry."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from planaria.common.errors import UserError


def cache_folder(chosen: str | None = None) -> Path:
    """Return the folder of ``data.cache``, or ``planaria`` below ``XDG_CACHE_HOME`` (default ``~/.cache``).

    :raises UserError: if neither is set and the user has no home folder.
    """
    try:
        if chosen is not None:
            return Path(chosen).expanduser()
        # The XDG specification: unset, empty and relative values all mean the default.
        root = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (root if root.is_absolute() else Path("~/.cache").expanduser()) / "planaria"
    except RuntimeError as error:
        raise UserError(f"data.cache: {error}; set data.cache or XDG_CACHE_HOME to a folder") from None


@contextmanager
def hold_lock(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold ``file``'s lock. Call ``on_wait`` once if another process holds it.

    The kernel releases the lock when its holder dies. The file stays: deleting it would let two processes hold locks on
    two files of the same name.
    """
    with file.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
