"""A worker's part of a checkpoint: written immediately, or copied and then written by a thread during training."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.models.packing import digest, entries, weights_digest
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import files_for, load_stage
from planaria.runtime.checkpoint.stage_file import Written, stage_file, write_stage
from planaria.runtime.checkpoint.store import MANIFEST
from planaria.runtime.fleet.files import Files
from planaria.runtime.worker.control_link import ControlLink
from planaria.runtime.worker.setup import CHECKPOINTS, Setup


class StageFiles:
    """Access of a worker to the checkpoints of its run."""

    def __init__(self, setup: Setup, worker: str) -> None:
        """Remove temporary files of a killed predecessor."""
        self._setup = setup
        self._files = Files(setup.files, setup.key) if setup.files else None
        self._temporary = setup.scratch / worker
        """folder for temporary files"""
        if self._files is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def read(self, name: str, stage: int, replica: int) -> StageState:
        """Return a replica's stage from the checkpoint ``name``; UserError if it cannot be read or fetched."""
        config = self._setup.config
        if self._files is None:
            return load_stage(self._setup.checkpoints / name, config, stage, replica)
        try:
            with self._scratch() as path:
                self._fetch(path / name, [MANIFEST])
                self._fetch(path / name, files_for(path / name, config, stage))
                return load_stage(path / name, config, stage, replica)
        except OSError as error:
            raise UserError(f"stage {stage} of {name} cannot be fetched from {self._setup.files} ({error})") from None

    def write(self, folder: Path, stage: int, step: int, state: StageState, index: int) -> Written:
        """Write a stage durably into a checkpoint folder, here or at the controller; see :func:`write_stage`.

        :raises OSError: if it cannot be written or sent.
        """
        if self._files is None:
            return write_stage(folder, stage, step, state, index)
        with self._scratch() as scratch:
            written = write_stage(scratch, stage, step, state, index)
            file, name = stage_file(scratch, stage, index), folder.relative_to(self._setup.checkpoints).as_posix()
            self._files.put(file, f"{CHECKPOINTS}/{name}/{file.name}")
        return written

    def _fetch(self, folder: Path, names: Sequence[str]) -> None:
        assert self._files is not None
        for name in names:
            self._files.fetch(f"{CHECKPOINTS}/{folder.name}/{name}", folder / name)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        self._temporary.mkdir(parents=True, exist_ok=True)
        try:
            yield self._temporary
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)


Keeps = Literal["stage", "outer", "nothing"]
"""part of a state that is written; the digest of its weights is reported in any case"""


@dataclass(frozen=True)
class CheckpointPart:
    """A worker's part of a checkpoint; the worker's assignment may change before it is written."""

    folder: Path
    stage: int
    worker: str
    node: int
    generation: int
    step: int
    index: int = 0
    """index among the nodes of the stage, if only the node's own state is written"""
    keeps: Keeps = "stage"

    def report(self, control_link: ControlLink, kind: type[e.Fact], **fields: Any) -> None:
        """Report an event of this ``kind`` with these ``fields`` and the matching ones of the part."""
        control_link.report(
            kind.model_validate({k: v for k, v in vars(self).items() if k in kind.model_fields} | fields)
        )


def keeps_for(order: d.Save, node: int) -> Keeps:
    """Return the part of its stage that ``node`` writes for ``order``."""
    if order.whole and node not in order.whole:
        return "outer"
    return "nothing" if node in order.compared else "stage"


def selected_part(state: StageState, keeps: Keeps, compared: bool) -> StageState:
    """Return that part of ``state``; if another node writes the weights, they are kept only if ``compared``."""
    if keeps == "stage":
        return state
    return StageState(state.weights if compared else {}, outer=state.outer if keeps == "outer" else {})


class Buffer:
    """Memory for copies of a state, reused because writing to new memory takes several times as long."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def copy(self, state: StageState) -> StageState:
        """Copy ``state`` into CPU memory, which invalidates the previous copy.

        :raises MemoryError: if there is too little memory.
        """
        memory: dict[str, Tensor] = {}

        def copy_of(name: str, tensor: Tensor) -> Tensor:
            before = self._memory.get(name)
            fits = before is not None and (before.dtype, before.shape) == (tensor.dtype, tensor.shape)
            memory[name] = before if before is not None and fits else torch.empty(tensor.shape, dtype=tensor.dtype)
            return memory[name].copy_(tensor)

        try:
            copied = replace(
                state,
                weights={name: copy_of(f"weights.{name}", w) for name, w in state.weights.items()},
                moments={
                    name: {key: copy_of(f"{key}.{name}", tensor) for key, tensor in moments.items()}
                    for name, moments in state.moments.items()
                },
                generators={kind: copy_of(f"generators.{kind}", g) for kind, g in state.generators.items()},
                outer={name: copy_of(f"outer.{name}", tensor) for name, tensor in state.outer.items()},
                clocks=dict(state.clocks),
                scales=dict(state.scales),
            )
        except RuntimeError as error:  # torch's out-of-memory error
            raise MemoryError(str(error).splitlines()[0]) from None
        self._memory = memory
        return copied


class Saver:
    """Writes a worker's parts of checkpoints, one at a time."""

    def __init__(self, control_link: ControlLink, files: StageFiles) -> None:
        self._control_link = control_link
        self._files = files
        self._buffer = Buffer()
        self._thread: threading.Thread | None = None

    def use(self, files: StageFiles) -> None:
        """Write further parts to ``files``."""
        self._files = files

    def save(self, part: CheckpointPart, state: StageState) -> e.Span:
        """Write and report the part; return the span of that work."""
        self._control_link.set_activity("write", part.step)
        self._finish_last()
        return self._write(part, state, "save")

    def save_in_background(self, part: CheckpointPart, state: StageState) -> e.Span:
        """Copy the part and write the copy in a thread; return the span of the copy.

        ``state`` may change after the return. Both the copy and the write are reported.
        """
        self._control_link.set_activity("copy", part.step)
        self._finish_last()
        start = time.monotonic()
        try:
            copied = self._buffer.copy(state)
        except MemoryError as error:
            part.report(self._control_link, e.SaveFailed, detail=f"no memory for a copy of stage {part.stage}: {error}")
        else:
            part.report(self._control_link, e.StageCopied, seconds=time.monotonic() - start)
            self._control_link.writing = part.step, time.monotonic()
            self._thread = threading.Thread(
                target=self._write_in_background, args=(part, copied), name="checkpoint", daemon=True
            )
            self._thread.start()
        return e.Span(action="save", start=start, end=time.monotonic())

    def _finish_last(self) -> None:
        """Wait for an earlier write, even of a cancelled save, so that there is one file and one copy at a time."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write_in_background(self, part: CheckpointPart, state: StageState) -> None:
        try:
            self._control_link.inject_in_background("write")
            part.report(self._control_link, e.WorkReport, spans=[self._write(part, state, "write")], sent_bytes={})
        except Exception as error:  # a thread's exception would be lost
            detail = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            part.report(self._control_link, e.WorkerFailed, detail=detail)
        finally:
            self._control_link.writing = None

    def _write(self, part: CheckpointPart, state: StageState, kind: e.SpanKind) -> e.Span:
        start = time.monotonic()
        try:
            written = self._write_kept(part, state)
        except OSError as error:
            part.report(self._control_link, e.SaveFailed, detail=str(error))
        else:
            file = "" if part.keeps == "nothing" else stage_file(part.folder, part.stage, part.index).name
            seconds = time.monotonic() - start
            part.report(self._control_link, e.StageSaved, **written._asdict(), file=file, seconds=seconds)
        return e.Span(action=kind, start=start, end=time.monotonic())

    def _write_kept(self, part: CheckpointPart, state: StageState) -> Written:
        """Write what the part keeps; OSError as in :meth:`StageFiles.write`."""
        if part.keeps == "stage":
            return self._files.write(part.folder, part.stage, part.step, state, part.index)
        weights = {name: digest(name, tensor) for name, tensor in entries(StageState(state.weights)).items()}
        checked = Written(0, "", weights_digest(weights))
        if part.keeps == "nothing":
            return checked
        outer = StageState({}, outer=state.outer)
        written = self._files.write(part.folder, part.stage, part.step, outer, part.index)
        return written._replace(weights=checked.weights)
