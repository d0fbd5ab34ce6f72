"""Errors that are the user's to mend: one clear line, exit code 2, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Something the user gave is wrong. The message names the thing, the place and the mend."""

    folder: Path | None = None
    """of the run that it ended, if one had begun"""


class RunStopped(Exception):
    """A run ended before its last step for a reason that is nobody's mistake (exit code 1).

    Raised after everything that could be saved was saved; the message says what was lost and how to go on.
    """

    folder: Path | None = None
    """of the run, which can be loaded and resumed"""


def nearest(word: str, known: Iterable[str]) -> str:
    """A "did you mean" clause naming the known word nearest to ``word``, or all of them when none is near."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(options)}"
