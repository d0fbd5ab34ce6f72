"""Errors that end a command with one line and an exit code, without a traceback."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from planaria.common.printing import escape


def without_numbers(text: str) -> str:
    """Return ``text`` without Python's ``[Errno N]`` prefix of operating system errors."""
    return re.sub(r"\[Errno -?\d+\] ", "", text)


MAX_MESSAGE_CHARS = 2000
"""maximum characters of an error message"""
NO_THREAD = "can't start new thread"
"""Python's message for a RuntimeError without a class"""
MAX_CHOICES = 24
"""known words that a message lists"""


class UserError(Exception):
    """An error that the user can fix. The message names the problem, the location and the fix, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(without_numbers(message))

    folder: Path | None = None
    """folder of the run that it ended, if one had begun"""


class RunStopped(Exception):
    """A run ended before its last step without a user's mistake (exit code 1).

    All state that can be saved has been saved; the message states what was lost and how to resume.
    """

    def __init__(self, message: str) -> None:
        super().__init__(without_numbers(message))

    folder: Path | None = None
    """folder of the run, which can be loaded and resumed"""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of planaria, in any folder."""
    return f"pip install 'planaria[{extra}]'"


def missing_package(label: str, package: str, extra: str, otherwise: str = "") -> UserError:
    """Return the error for a missing package: the feature, the package and the command to run."""
    return UserError(f"{label} needs the package {package!r}; install it with: {install_command(extra)}{otherwise}")


class LedgerError(RunStopped):
    """Samples of a run were lost or used twice (exit code 3), although its log has no error."""


def suggestion(word: str, choices: Iterable[str], for_comparison: Collection[str] = ()) -> str:
    """Return a "did you mean" clause with the known word nearest to ``word``, or a list of all if none is near.

    :param for_comparison: choices that serve comparisons only; the list ends with them.
    """
    options = sorted(choices)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    listed = [option for option in options if option not in for_comparison]
    more = f" and {len(listed) - MAX_CHOICES} more" if len(listed) > MAX_CHOICES else ""
    controls_text = f"; for comparisons: {', '.join(sorted(for_comparison))}" if for_comparison else ""
    return f"known here: {', '.join(listed[:MAX_CHOICES])}{more}{controls_text}"


_CODES: dict[type[Exception], int] = {UserError: 2, LedgerError: 3, RunStopped: 1}
"""exit code of each error that a command raises; the first class that matches counts"""


def exit_code(call: Callable[[], int]) -> int:
    """Run a command, report its failure in one line, and return its exit code.

    :raises BaseException: for errors that no user causes.
    """
    try:
        return call()
    except tuple(_CODES) as error:
        print(f"planaria: {one_line(str(error))}", file=sys.stderr)
        return next(code for kind, code in _CODES.items() if isinstance(error, kind))
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
        line = one_line(f"{location}: {error.strerror or error}; fix that, and try again")
        print(f"planaria: {line}", file=sys.stderr)
        return 2


def one_line(message: str) -> str:
    """Return a message as one line of printable text, shortened in the middle if it is too long."""
    shown = escape(message)
    half = MAX_MESSAGE_CHARS // 2
    return shown if len(shown) <= 2 * half else f"{shown[:half]} … {shown[-half:]}"
