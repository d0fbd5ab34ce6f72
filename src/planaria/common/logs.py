"""Configuration of logging: ``--log-level``, ``--log-json`` and the environment variable PLANARIA_LOG.

Modules log to ``logging.getLogger(__name__)``. The library configures nothing; commands and worker processes call
:func:`configure`. Levels: ``warning`` for problems that neither the command's output nor the run's event log reports,
``info`` for important events of a worker or the controller, ``debug`` for every step and connection. Nothing is logged
per microbatch, and no message contains a key or token.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from json import dumps
from typing import TextIO

from planaria.common.errors import UserError
from planaria.common.printing import escape

VARIABLE = "PLANARIA_LOG"
LEVELS = ("debug", "info", "warning", "error")
_SHOWN = ("worker", "peer", "stage", "step")
"""context at the beginning of a line of text, instead of the logger"""
_LOGGERS = ("planaria", "py.warnings")
"""the second receives Python's warnings in processes that capture them"""

Fields = Mapping[str, object]


@dataclass(frozen=True)
class LogSettings:
    """Level and format of logs; workers get those of the command that starts them."""

    level: str = ""
    """one of :data:`LEVELS`; empty: ``warning`` on a terminal, ``info`` in files of workers"""
    json: bool = False
    """JSON lines instead of text"""

    def __str__(self) -> str:
        return ",".join(filter(None, (self.level, "json" if self.json else "")))


DEFAULT = LogSettings()


def from_environment() -> LogSettings:
    """Return the settings in PLANARIA_LOG: a level, ``json``, or both separated by a comma.

    :raises UserError: if it has another value.
    """
    text = os.environ.get(VARIABLE, "")
    words = [word.strip() for word in text.split(",") if word.strip()]
    levels = [word for word in words if word != "json"]
    if len(levels) > 1 or not set(levels) <= set(LEVELS):
        raise UserError(f"{VARIABLE} = {text!r}: use {', '.join(LEVELS)}, json, or a level and json, as in debug,json")
    return LogSettings(levels[0] if levels else "", "json" in words)


class TextFormatter(logging.Formatter):
    """One line of text: local time, level, source, message. A traceback follows on further lines."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "context", {})
        source = ", ".join(f"{name} {fields[name]}" for name in _SHOWN if name in fields)
        message = escape(record.getMessage().strip())
        time = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        line = f"{time} {record.levelname} {source or record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time (ISO 8601, UTC), level, logger, message, context, the record's ``fields``, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, "context", {}) | getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return dumps(line, default=str)


_source: ContextVar[Callable[[], Fields]] = ContextVar("_source", default=dict)


@contextmanager
def add_context(source: Callable[[], Fields]) -> Iterator[None]:
    """Add the fields that ``source`` returns (run, worker, stage, …) to each message of this thread or greenlet."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


class _Handler(logging.Handler):
    """Writes to a stream, by default to the standard error of the moment, which a progress bar may have replaced."""

    def __init__(self, stream: TextIO | None, process: Fields) -> None:
        """:param process: context of all messages of this process."""
        super().__init__()
        self._stream, self._process = stream, process

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.context = {**self._process, **_source.get()()}
            stream = self._stream or sys.stderr
            stream.write(f"{self.format(record)}\n")
            stream.flush()
        except Exception:
            self.handleError(record)


def configure(level: str, json: bool = False, stream: TextIO | None = None, **process: object) -> None:
    """Write planaria's logs only to ``stream`` (default: standard error); ``process``: context of all messages."""
    reset()
    handler = _Handler(stream, process)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level.upper())


def reset() -> None:
    for logger in map(logging.getLogger, _LOGGERS):
        for handler in [installed for installed in logger.handlers if isinstance(installed, _Handler)]:
            logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@contextmanager
def command_logs(level: str | None = None, json: bool = False) -> Iterator[None]:
    """Configure logging for a command: its flags, else PLANARIA_LOG. Processes that it starts inherit the settings.

    :raises UserError: if PLANARIA_LOG is invalid.
    """
    before, default = os.environ.get(VARIABLE, ""), from_environment()
    settings = LogSettings(level or default.level, json or default.json)
    os.environ[VARIABLE] = str(settings)
    configure(settings.level or "warning", settings.json)
    try:
        yield
    finally:
        reset()
        os.environ[VARIABLE] = before
