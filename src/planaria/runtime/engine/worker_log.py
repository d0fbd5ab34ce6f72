"""The log of a worker process in the run's folder: ``workers/NAME.log``."""

from __future__ import annotations

import os
import re
from pathlib import Path

WORKERS = "workers"
"""folder of the logs"""
_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Exit)\b.*)")
"""last line of a traceback"""


def last_error(folder: Path, lost: bool) -> str:
    """Return the newest error in the logs of the run in ``folder`` and the worker that it is from.

    Without an error, a hint at what leaves none if workers were ``lost``; else, and without logs, an empty text.
    """
    logs = sorted((folder / WORKERS).glob("*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in logs:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        if errors := [found[1] for line in text.splitlines() if (found := _ERROR.fullmatch(line.strip()))]:
            return f"{log.stem}: {errors[-1][:400]}"
    return "the workers' logs name no error: did the system kill them for lack of memory?" if logs and lost else ""


def log_to(file: Path) -> None:
    """Append this process's output and errors to ``file`` from now on."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # a full disk: the run lacks nothing without it
        handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
