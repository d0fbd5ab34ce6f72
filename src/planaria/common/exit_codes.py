"""Exit codes of commands, and the line that each failure prints."""

from __future__ import annotations

import sys
from collections.abc import Callable

from planaria.common.errors import LedgerError, RunStopped, UserError
from planaria.common.printing import escape

MAX_MESSAGE_CHARS = 2000
"""maximum characters of an error message"""
NO_THREAD = "can't start new thread"
"""Python's message for a RuntimeError without a class"""


def exit_code(call: Callable[[], int]) -> int:
    """Run a command, report its failure in one line, and return its exit code.

    :raises BaseException: for errors that no user causes.
    """
    try:
        return call()
    except UserError as error:
        print(f"planaria: {one_line(str(error))}", file=sys.stderr)
        return 2
    except LedgerError as error:
        print(f"planaria: {one_line(str(error))}", file=sys.stderr)
        return 3
    except RunStopped as stopped:
        print(f"planaria: {one_line(str(stopped))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("planaria: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or NO_THREAD in str(error)):
            raise
        label = "memory" if isinstance(error, MemoryError) else "memory or processes for another thread"
        print(
            f"planaria: not enough {label}; use a smaller model, free some, or raise the limit (`ulimit -a`)",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        location = str(error.filename or "the operating system")
        print(
            f"planaria: {one_line(f'{location}: {error.strerror or error}; fix that, and try again')}", file=sys.stderr
        )
        return 2


def one_line(message: str) -> str:
    """Return a message as one line of printable text, shortened in the middle if it is too long."""
    shown = escape(message)
    return (
        shown
        if len(shown) <= MAX_MESSAGE_CHARS
        else f"{shown[: MAX_MESSAGE_CHARS // 2]} … {shown[-MAX_MESSAGE_CHARS // 2 :]}"
    )
