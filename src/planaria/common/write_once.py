"""Write-once files: a reader sees the whole file or none."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""errors of file systems without hard links (FAT, many mounted buckets and remote folders)"""


def write_new(path: Path, data: bytes, mode: int) -> bool:
    """Write ``data`` to ``path`` in an existing folder; return False, without writing, if something is there.

    Of several concurrent writers exactly one gets True. A killed writer leaves a hidden temporary file.

    :raises OSError: if the folder is not writable, or its disk is full.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        return _take_name(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _take_name(unfinished: Path, path: Path) -> bool:
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
