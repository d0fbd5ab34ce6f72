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
    """Return the newest error in the workers' logs, and its worker.

    Without an error, return a hint at lack of memory if workers were ``lost``, else "".
    """
    logs = sorted((folder / WORKERS).glob("*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in logs:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        if errors := [found[1] for line in text.splitlines() if (found := _ERROR.fullmatch(line.strip()))]:
            return f"{log.stem}: {errors[-1][:400]}"
    return "the workers' logs name no error: did the system kill them for lack of memory?" if logs and lost else ""


def log_to(file: Path) -> None:
    """Redirect this process's output and errors to ``file``."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # such as a full disk; the run does not need the log
        handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
