"""One command of planaria in this process, as fast as it can be tried: what it said, how it ended, how long it took."""

from __future__ import annotations

import contextlib
import io
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class TooSlow(BaseException):
    """Nobody waits that long; not an Exception, so that no command takes it for one of its own."""


@dataclass(frozen=True)
class Said:
    """How a command ended. ``code`` -1: with a traceback; -2: it gave no answer in time."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """What it complained of."""
        return [line for line in self.err.splitlines() if line.strip()]

    @property
    def kind(self) -> bool:
        """Was it refused as it should be: exit code 2, and one line?"""
        return self.code == 2 and len(self.lines) == 1 and self.lines[0].startswith("planaria: ")


def carry_out(arguments: Sequence[str], limit_s: float = 30.0) -> Said:
    """Run one command line to its end, or for ``limit_s`` at most. To be called from the main thread."""
    from planaria.cli import main

    out, err, code, begin = io.StringIO(), io.StringIO(), 0, time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _within(limit_s):
                main(list(arguments))
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except TooSlow:
            code = -2
        except BaseException:
            traceback.print_exc()
            code = -1
    return Said(code, out.getvalue(), err.getvalue(), time.monotonic() - begin)


@contextlib.contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """TooSlow when the block takes longer."""

    def ring(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
