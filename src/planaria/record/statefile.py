"""Who holds what in a live run, for other terminals: ``runs/NAME/state.json``, replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from planaria import atomic, documents
from planaria.errors import UserError
from planaria.record.state import RunState


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


def describe(state: RunState) -> StateFile:
    """What the state file says of ``state``, written by this process."""
    nodes, stage_of = {worker: node for node, worker in state.holders.items()}, state.settings.stage_of
    stages = {worker: stage_of[node] for worker, node in nodes.items()}
    workers = [
        LiveWorker(
            worker=name,
            incarnation=w.incarnation,
            pid=w.pid,
            born=born(w.pid),
            node=nodes.get(name),
            stage=stages.get(name),
        )
        for name, w in state.workers.items()
        if w.status in ("spare", "member")
    ]
    phases = sorted({replica.phase for replica in state.replicas.values()})
    return StateFile(
        controller=os.getpid(),
        generation=max(replica.generation for replica in state.replicas.values()),
        step=state.progress,
        phase="over" if state.over else ", ".join(phases),
        workers=workers,
    )


def write_state(path: Path, state: RunState) -> None:
    """Replace the state file."""
    atomic.write_text(path, documents.sealed(describe(state)))


def read_state(folder: Path) -> StateFile:
    """The state of the run in ``folder``.

    :raises UserError: when there is no such run, or it never started.
    """
    path = folder / "state.json"
    if not path.exists():
        raise UserError(f"{folder}: no live run here (it has no state.json); start one with `planaria train`")
    return documents.unsealed(path, StateFile, mend="bring it back, or remove it")


def born(pid: int) -> int | None:
    """Start time of a process, which tells it from a later one with the same number; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
