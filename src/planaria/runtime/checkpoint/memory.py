"""Snapshots that outlive the workers that took them: files in the machine's memory, one folder for each run.

    /dev/shm/planaria-…/run.json                          the run's configuration and start, with a digest
                        step-00000040.g12.PART/stage-0003.safetensors        a stage's state
                                               stage-0003-at-1.safetensors   and the parities that it holds

Files of a memory file system stay when their writer is killed, and are lost with the machine's power. Each appears
whole, with digests, as a checkpoint's does. A snapshot has a folder for each label (part of the run, generation, step),
and every file carries the label: a worker that writes late, after a rollback, cannot mix histories. Which labels may be
used is decided by the run's log (``control/logs.py``). A worker keeps its two newest snapshots: others may not have
written theirs yet.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.started import RunStarted, SnapshotLabel
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import Label, read_labelled, write_labelled

SHARED = Path("/dev/shm")
RUN = "run.json"
_KEPT = 2
_PARITIES = 1
"""the place, beside the state's, at which parities are written"""
_FOLDER = re.compile(r"step-(\d{8,18})\.g(\d{1,18})\.([0-9a-f]{1,64})", re.ASCII)
_STATE = re.compile(r"stage-(\d{4,9})\.safetensors", re.ASCII)


class Remembered(BaseModel):
    """Whose snapshots they are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    """the run's"""
    config: RunConfig
    started: RunStarted
    """how the part of the run began in which they were taken"""


class MemoryFolder:
    """What the workers of one run remember on this machine."""

    def __init__(self, run: Path, shared: Path = SHARED) -> None:
        """``run``: the run's folder."""
        self.run = run.absolute()
        self.folder = shared / f"planaria-{hashlib.sha256(os.fsencode(self.run)).hexdigest()[:24]}"

    def begin(self, config: RunConfig, started: RunStarted) -> None:
        """Prepare for a new part of the run: keep only the snapshot from which it begins.

        :raises UserError: when the folder cannot be made, or is somebody else's.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _require_own(self.folder)
            for label, old in self._snapshots():
                if label != started.recalled_from:
                    shutil.rmtree(old)
            whose = Remembered(folder=str(self.run), config=config, started=started)
            atomic.write_text(self.folder / RUN, documents.sealed(whose))
        except OSError as error:
            raise UserError(
                f"{atomic.refused(self.folder, error)}; recovery.options.outlive = true keeps snapshots there"
            ) from None

    def write(self, stage: int, label: SnapshotLabel, state: StageState, parities: Mapping[str, Tensor]) -> None:
        """Write a stage's part of a snapshot, after dropping all but the newest of its earlier ones.

        :raises OSError: when the memory is full.
        """
        mine = [(other, folder) for other, folder in self._snapshots() if other != label and _of_stage(folder, stage)]
        mine.sort(key=lambda found: (found[0].part == label.part, found[0].generation, found[0].step))
        for _, old in mine[: max(0, len(mine) + 1 - _KEPT)]:
            _drop(old, stage)
        folder = self._at(label)
        write_labelled(folder, _file(stage, label, _PARITIES), StageState({}, outer=dict(parities)))
        write_labelled(folder, _file(stage, label), state)  # the last, because it is looked for

    def read(self, stage: int, label: SnapshotLabel) -> tuple[StageState, dict[str, Tensor]]:
        """Return what :meth:`write` wrote.

        :raises UserError: when it is missing, damaged, or of another stage or snapshot.
        """
        folder = self._at(label)
        state, beside = (read_labelled(folder, _file(stage, label, place)) for place in (0, _PARITIES))
        return state, beside.outer

    def whose(self) -> Remembered | None:
        """None when there is nothing, or nothing that can be used."""
        try:
            _require_own(self.folder)
            return documents.unsealed(self.folder / RUN, Remembered, mend="remove it")
        except (OSError, UserError):
            return None

    def newest_first(self) -> list[SnapshotLabel]:
        """The snapshots of which there is something, the newest step first."""
        found = [label for label, _ in self._snapshots()]
        return sorted(found, key=lambda label: (label.step, label.generation), reverse=True)

    def whole(self, label: SnapshotLabel) -> frozenset[int]:
        """The stages of a snapshot whose files are whole; damaged and mislabelled ones do not count."""
        found = (_STATE.fullmatch(path.name) for path in self._at(label).glob("stage-*"))
        return frozenset(stage for match in found if match and self._whole(stage := int(match[1]), label))

    def remove(self) -> None:
        """The run has ended, and needs it no more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _whole(self, stage: int, label: SnapshotLabel) -> bool:
        try:
            self.read(stage, label)
        except UserError:
            return False
        return True

    def _snapshots(self) -> list[tuple[SnapshotLabel, Path]]:
        """Folders of snapshots with their labels."""
        found = ((_FOLDER.fullmatch(folder.name), folder) for folder in self.folder.glob("step-*"))
        return [
            (SnapshotLabel(part=match[3], generation=int(match[2]), step=int(match[1])), folder)
            for match, folder in found
            if match
        ]

    def _at(self, label: SnapshotLabel) -> Path:
        return self.folder / f"step-{label.step:08d}.g{label.generation}.{label.part}"


def sweep(shared: Path = SHARED) -> None:
    """Remove what runs left that are no more: their folder is gone."""
    for folder in shared.glob("planaria-*"):
        found = MemoryFolder(Path(), shared)
        found.folder = folder
        kept = found.whose()
        if kept is not None and not Path(kept.folder).is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def require_room(size: int, shared: Path = SHARED) -> None:
    """UserError when snapshots of so many bytes in all do not fit in this machine's memory."""
    try:
        found = os.statvfs(shared)
    except OSError:
        raise UserError(
            f"recovery.options.outlive = true: this machine has no memory file system at {shared}; leave it out"
        ) from None
    if (free := found.f_bavail * found.f_frsize) < size:
        raise UserError(
            f"recovery.options.outlive = true: two snapshots of all stages take {size / 1e6:,.1f} MB, and {shared} has "
            f"{free / 1e6:,.1f} MB free; make room there, or leave it out"
        )


def _file(stage: int, label: SnapshotLabel, place: int = 0) -> Label:
    """The header of a snapshot's file."""
    return Label(stage=stage, step=label.step, place=place, part=label.part, generation=label.generation)


def _of_stage(folder: Path, stage: int) -> list[Path]:
    """All files of a stage, those that a killed writer left unfinished included."""
    return list(folder.glob(f"stage-{stage:04d}[.-]*"))


def _drop(folder: Path, stage: int) -> None:
    for path in _of_stage(folder, stage):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # other stages have files there
        folder.rmdir()


def _require_own(folder: Path) -> None:
    """:raises OSError: when others could have written it: everybody may make folders there."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(1, "is not a folder of this user alone", str(folder))
