"""Sources of live pages, and frames of folders other than runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from planaria.report.live_page.frames import SCHEMA, Json, StateChange, difference
from planaria.report.observe.tally import RunTally


class PageSource(ABC):
    """Reads files as they grow; finished ones work the same way."""

    state: Json
    """state shown after everything that was read"""
    began = False
    """whether there is something to show"""
    tally: RunTally | None = None
    """totals of a run for ``/metrics``, or None for others"""

    @abstractmethod
    def _files(self) -> list[Path]:
        """Return the files that grow."""

    @property
    def age_s(self) -> float:
        """Seconds since the last write to any of the files; infinite without any."""
        times = []
        for file in self._files():
            try:
                times.append(file.stat().st_mtime)
            except OSError:
                continue
        return max(0.0, time.time() - max(times)) if times else float("inf")

    def initial_frame(self) -> StateChange:
        """Return the initial frame."""
        return StateChange(0, 0.0, self.state, routine=False)

    @abstractmethod
    def read(self, limit: int) -> Iterator[StateChange | None]:
        """Yield a frame for each of the next ``limit`` facts, None if it changes nothing; end when there are no more.

        :raises UserError: if the files cannot be read.
        """


class FolderSource(PageSource):
    """Base of the sources of folders that hold no run: their state and frames."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        self._folder = folder
        self.state = {"schema": SCHEMA, "run": {"kind": kind, "name": name}}
        self._number = 0
        self._origin: float | None = None

    def _update(
        self, when: float, updates: Mapping[str, object], line: tuple[int, str, str] | None = None
    ) -> StateChange | None:
        """Set these parts of the state at Unix time ``when``; return the frame, or None if nothing changed.

        ``line``: step, tone and text of a line to show.
        """
        self._origin = when if self._origin is None else self._origin
        change = difference({name: self.state[name] for name in updates if name in self.state}, updates)
        if not change and line is None:
            return None
        self.state = {**self.state, **updates}
        self._number += 1
        shown = None if line is None else dict(zip(("step", "tone", "text"), line, strict=True))
        return StateChange(self._number, max(0.0, when - self._origin), change, shown, routine=line is None)
