"""Who holds what in a live run, for other terminals: ``runs/NAME/state.json``, replaced atomically.

A new generation is in it at once: a run that is resumed goes on with the next. So is any other change in who is there,
as long as that takes no more than a twentieth of the controller's time; how far the run has come may be a second old.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.control.state import RunState

STATE = "state.json"
SHARE = 1 / 20
"""of the controller's time, at most, for changes in who is there"""
PROGRESS_S = 1.0
"""from one write to the next while only steps are made"""


class LiveWorker(BaseModel):
    """A living worker; a spare has neither node nor stage. ``born``: its process's start, in clock ticks after boot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str
    incarnation: int
    pid: int
    born: int | None
    node: int | None
    stage: int | None


class StateFile(BaseModel):
    """The run as of the last change in its membership."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    controller: int
    generation: int
    step: int
    phase: str
    workers: list[LiveWorker]


Births = Mapping[tuple[str, int], int | None]
"""(worker, incarnation) → start of its process"""


def describe(state: RunState, known: Births = MappingProxyType({})) -> StateFile:
    """What the state file says of ``state``, written by this process; starts of workers not ``known`` are looked up."""
    nodes, stage_of = {worker: node for node, worker in state.holders.items()}, state.settings.stage_of
    workers = [
        LiveWorker(
            worker=name,
            incarnation=w.incarnation,
            pid=w.pid,
            born=known[name, w.incarnation] if (name, w.incarnation) in known else born(w.pid),
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
    """Keeps the state file of one run."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """``clock`` tells monotonic seconds."""
        self._path, self._clock = path, clock
        self._told: RunState | None = None
        """what was written last"""
        self._ended = self._took = 0.0
        """of the last write"""
        self._births: Births = {}

    def due(self, state: RunState) -> float:
        """When ``state`` is to be written, in monotonic seconds."""
        told = self._told
        if told is state:
            return math.inf
        if told is None or state.over or told.replicas.generation != state.replicas.generation:
            return -math.inf
        pause = self._took / SHARE
        return self._ended + (pause if told.roster is not state.roster else max(pause, PROGRESS_S))

    def write(self, state: RunState) -> None:
        """Replace the file.

        :raises OSError: when that cannot be; it counts as written, so that the next change is tried again.
        """
        began, self._told = self._clock(), state
        try:
            file = describe(state, self._births)
            self._births = {(w.worker, w.incarnation): w.born for w in file.workers}
            atomic.write_text(self._path, documents.sealed(file))
        finally:
            self._ended = self._clock()
            self._took = self._ended - began


def read_state(folder: Path) -> StateFile:
    """The state of the run in ``folder``.

    :raises UserError: when there is no such run, or it never started.
    """
    path = folder / STATE
    if not path.exists():
        raise UserError(f"{folder}: no live run here (it has no state.json); start one with `planaria train`")
    return documents.unsealed(path, StateFile, mend="bring it back, or remove it")


def born(pid: int) -> int | None:
    """Start time of a process, which tells it from a later one with the same number; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
