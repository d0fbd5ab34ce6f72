"""Where a worker process writes what it has to say: a log of its own in the run's folder."""

from __future__ import annotations

import os
from pathlib import Path


def log_to(file: Path) -> None:
    """Append this process's output and errors to ``file`` from now on."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # a full disk: the run lacks nothing without it
        handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
