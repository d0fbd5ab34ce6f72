"""Files that appear whole and are never replaced: whoever looks sees nothing, or all of it."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""what file systems without hard links answer (FAT, many mounted buckets and remote folders)"""


def appear(path: Path, data: bytes, mode: int) -> bool:
    """Write ``data`` as ``path``, whose folder is there; False, and nothing is written, if something is there already.

    Of several who write the same path at once exactly one gets True. Whoever is killed while writing leaves a hidden
    file that nobody reads.

    :raises OSError: when the folder cannot be written to, or its disk is full.
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
    """A link never replaces a file, a rename would."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # another's may come between this look and the rename: it is then replaced, whole
            return False
        unfinished.rename(path)
    return True
