"""Room on a run's disk that is given back when the disk is full: for the last lines of its log."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

BYTES = 256 << 10
"""some hundred lines: what is told while a run comes to its next whole step, and is saved"""


class Reserve:
    """A file of :data:`BYTES` in ``folder``, as long as there is room for it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".reserve"
        try:
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, BYTES)
        except OSError:
            self.release()

    def release(self) -> None:
        """Give the room back."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
