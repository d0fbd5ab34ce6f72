"""Assignments of a live run for other terminals: ``runs/NAME/state.json``, replaced atomically.

A new generation is written immediately, since a resumed run continues with the next one. Other changes of workers are
written immediately if writing takes at most a twentieth of the controller's time. Progress may be a second old.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from planaria.common import atomic, documents
from planaria.common.documents import former_names
from planaria.common.errors import UserError
from planaria.config.names import WorkerId
from planaria.control.state.run import RunState

STATE = "state.json"
MAX_WRITE_SHARE = 1 / 20
"""largest share of the controller's time for changes of workers"""
PROGRESS_S = 1.0
"""seconds between writes while only steps are made"""


class LiveWorker(BaseModel):
    """A living worker; a spare has neither node nor stage. ``start_ticks``: start time of its process, in clock ticks
    after boot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    _former = former_names(start_ticks="born")
    worker: str
    incarnation: int
    pid: int
    start_ticks: int | None
    node: int | None
    stage: int | None


class StateFile(BaseModel):
    """The run as of the last change of workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    controller: int
    generation: int
    step: int
    phase: str
    workers: list[LiveWorker]


StartTicks = Mapping[WorkerId, int | None]
"""worker → start time of its process"""


def describe(state: RunState, ticks: StartTicks = MappingProxyType({})) -> StateFile:
    """Return the file's content for ``state``, written by this process; looks up start times not in ``ticks``."""
    nodes, stage_of = {worker: node for node, worker in state.holders.items()}, state.started.stage_of
    workers = [
        LiveWorker(
            worker=name,
            incarnation=w.incarnation,
            pid=w.pid,
            start_ticks=ticks[key] if (key := WorkerId(name, w.incarnation)) in ticks else start_ticks(w.pid),
            node=nodes.get(name),
            stage=stage_of.get(nodes.get(name, -1)),
        )
        for name, w in state.workers.items()
        if w.status in ("spare", "member")
    ]
    phases = sorted({replica.phase for replica in state.replicas.values()})
    return StateFile(
        controller=os.getpid(),
        generation=state.replicas.generation,
        step=state.progress,
        phase="over" if state.over else ", ".join(phases),
        workers=workers,
    )


class StateWriter:
    """Writer of one run's state file."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """:param clock: returns monotonic seconds."""
        self._path, self._clock = path, clock
        self._written: RunState | None = None
        """the state last written"""
        self._ended = self._took = 0.0
        """end and duration of the last write"""
        self._start_ticks: StartTicks = {}

    def due(self, state: RunState) -> float:
        """Return when ``state`` must be written, in monotonic seconds."""
        written = self._written
        if written is state:
            return math.inf
        if written is None or state.over or written.replicas.generation != state.replicas.generation:
            return -math.inf
        pause = self._took / MAX_WRITE_SHARE
        return self._ended + (pause if written.roster is not state.roster else max(pause, PROGRESS_S))

    def write(self, state: RunState) -> None:
        """Replace the file.

        :raises OSError: if that fails; the next change tries again.
        """
        began, self._written = self._clock(), state
        try:
            file = describe(state, self._start_ticks)
            self._start_ticks = {WorkerId(w.worker, w.incarnation): w.start_ticks for w in file.workers}
            atomic.write_text(self._path, documents.seal(file))
        finally:
            self._ended = self._clock()
            self._took = self._ended - began


def read_state(folder: Path) -> StateFile:
    """Return the state of the run in ``folder``.

    :raises UserError: if there is no such run, or it never started.
    """
    path = folder / STATE
    if not path.exists():
        raise UserError(f"{folder}: no live run here (it has no state.json); start one with `planaria train`")
    return documents.read_sealed(path, StateFile, fix="restore it, or remove it")


def start_ticks(pid: int) -> int | None:
    """Return a process's start time, which distinguishes it from a later one with the same number; None if it has
    ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
