"""A controller that is killed at a given line of its log, in a separate process."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from planaria.cli import main
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.report.observe.run_observer import RunObserver
from planaria.runtime.api import execution
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet import spawner

Moment = Literal["before", "after"]
_LIFE_S = 90.0


class _Mortal(RunObserver):
    lines: int
    moment: Moment

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        self._count("before")
        super().on_event(t, event, notice)
        self._count("after")

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self._count("before")
        super().on_decision(t, decision)
        self._count("after")

    def _count(self, moment: Moment) -> None:
        if moment == self.moment:
            type(self).lines -= 1
            if not self.lines:
                os.kill(os.getpid(), signal.SIGKILL)


def lead(words: list[str], lines: int, moment: Moment, log: Path) -> int | None:
    """Run a ``planaria`` command that leads a run; it is killed ``moment`` it writes the log's line ``lines``.

    Returns its exit code.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    preload = [*PRELOAD, "planaria.runtime.api.training", __name__]
    child = spawner.spawner().spawn("planaria", partial(_lead, words, lines, moment, list(sys.path)), preload, [handle])
    code = child.join(_LIFE_S)
    if code is None:
        child.kill(1.0)
        pytest.fail(f"planaria {words[0]} takes longer than {_LIFE_S} s: {log.read_text()}")
    return code


def _lead(words: list[str], lines: int, moment: Moment, path: list[str], handle: int) -> None:
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    _Mortal.lines, _Mortal.moment = lines, moment
    execution.RunObserver = _Mortal  # type: ignore[misc]
    main(words)
