"""Standard output and error that survive the loss of their reader."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

Notify = Callable[[str], None]
"""receives notes and results for the user, line by line"""
_errors: list[str] = []


class _Outlet:
    """A stream that discards output after the first write error."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._redirect(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._redirect(error)

    def _redirect(self, error: OSError) -> None:
        _errors.append(f"{self._name}: {error.strerror or error}")
        # Redirect buffered output, and what the interpreter flushes at exit, to the null device.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._stream.flush()


@contextmanager
def tolerate_closed_output() -> Iterator[None]:
    """Discard output that can no longer be written, instead of failing."""
    _errors.clear()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast(TextIO, _Outlet(stream, name))
        for stream, name in zip(before, ("standard output", "standard error"), strict=True)
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def lost_output() -> str:
    """Return why output was lost since :func:`tolerate_closed_output` began, or an empty string if none was."""
    return _errors[0] if _errors else ""


def open_standard_streams() -> None:
    """Open standard streams that were closed at the start to the null device.

    Otherwise the next opened file would take their place and receive printed text. Output is flushed by line, also to
    files and pipes, and characters outside a stream's encoding are escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 (it stays)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
