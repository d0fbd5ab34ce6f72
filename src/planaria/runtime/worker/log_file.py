"""The log of a worker process in the run's folder: ``workers/NAME.log``, as text or JSON lines."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from pathlib import Path
from types import TracebackType

from planaria.common.logs import LogSettings, configure

log = logging.getLogger(__name__)

WORKERS = "workers"
"""folder of the logs"""
_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Exit)\b.*)")
"""last line of a traceback"""


def last_error(folder: Path, lost: bool) -> str:
    """Return the newest error in the workers' logs, and its worker.

    Without an error, hint at a lack of memory if workers were ``lost``, else return "".
    """
    logs = sorted((folder / WORKERS).glob("*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in logs:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        lines = [part for line in text.splitlines() for part in _as_text(line)]
        if errors := [match[1] for line in lines if (match := _ERROR.fullmatch(line.strip()))]:
            return f"{log.stem}: {errors[-1][:400]}"
    return "the workers' logs name no error; the system may have killed them to free memory" if logs and lost else ""


def _as_text(line: str) -> list[str]:
    """Return a line of text, or the lines of the traceback in a JSON line."""
    if not line.startswith("{"):
        return [line]
    try:
        return str(json.loads(line)["exception"]).splitlines()
    except (ValueError, KeyError, RecursionError):  # without a traceback, or cut off
        return []


def begin_log(folder: Path, run: str, worker: str, settings: LogSettings) -> None:
    """Write this process's logs, output, warnings and uncaught exceptions to the worker's log in the run's folder."""
    log_to(folder / WORKERS / f"{worker}.log")
    configure(settings.level or "info", settings.json, run=run, worker=worker)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("uncaught exception; the worker exits", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else "unknown"
        log.critical("uncaught exception in thread %s", name, exc_info=args.exc_value)


def log_to(file: Path) -> None:
    """Redirect this process's output and errors to ``file``."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # such as a full disk; the run does not need the log
        handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
