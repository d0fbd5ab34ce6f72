"""Snapshots that outlive the workers that took them: files in the machine's memory, one folder for each run.

    /dev/shm/planaria-…/run.json                          the run's configuration and start, with a digest
                        step-00000040.g12.PART/stage-0003.safetensors        a stage's state
                                               stage-0003-at-1.safetensors   and the parities that it holds

Files of a memory file system survive their writer, but not a power failure. Each file appears complete, with digests.
A snapshot has a folder for each label (part of the run, generation, step), and every file contains the label, so that a
late write after a rollback cannot mix histories. The run's log (``control/log/reader.py``) determines the valid labels.
A worker keeps its two newest snapshots, because others may not have written theirs yet.
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
from planaria.control.facts.run_started import RunStarted, SnapshotLabel
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import StageLabel, read_labelled, write_labelled

SHARED = Path("/dev/shm")
RUN = "run.json"
_KEPT = 2
_PARITIES = 1
"""the ``place`` of files with parities"""
_FOLDER = re.compile(r"step-(\d{8,18})\.g(\d{1,18})\.([0-9a-f]{1,64})", re.ASCII)
_STATE = re.compile(r"stage-(\d{4,9})\.safetensors", re.ASCII)


class Owner(BaseModel):
    """The owner of snapshots."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    """the run's folder"""
    config: RunConfig
    started: RunStarted
    """start of the part of the run that took them"""


class MemoryFolder:
    """The snapshots of one run on this machine."""

    def __init__(self, run: Path, shared: Path = SHARED) -> None:
        """``run``: the run's folder."""
        self.run = run.absolute()
        self.folder = shared / f"planaria-{hashlib.sha256(os.fsencode(self.run)).hexdigest()[:24]}"

    def begin(self, config: RunConfig, started: RunStarted) -> None:
        """Prepare for a new part of the run: keep only the snapshot from which it starts.

        The run's folder is created if missing, since :func:`remove_orphaned` removes snapshots of runs without one.

        :raises UserError: if the folder cannot be created, or belongs to another user.
        """
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _require_own(self.folder)
            for label, old in self._snapshots():
                if label != started.recalled_from:
                    shutil.rmtree(old)
            owner = Owner(folder=str(self.run), config=config, started=started)
            atomic.write_text(self.folder / RUN, documents.seal(owner))
        except OSError as error:
            raise UserError(
                f"{atomic.write_error(self.folder, error)}; recovery.options.persist = true keeps snapshots there"
            ) from None

    def write(self, stage: int, label: SnapshotLabel, state: StageState, parities: Mapping[str, Tensor]) -> None:
        """Write a stage's part of a snapshot, after removing all but the newest earlier one.

        :raises OSError: if the memory is full.
        """
        snapshots = [(existing, folder) for existing, folder in self._snapshots() if existing != label]
        earlier = [(existing, folder) for existing, folder in snapshots if _stage_files(folder, stage)]
        earlier.sort(key=lambda snapshot: (snapshot[0].part == label.part, snapshot[0].generation, snapshot[0].step))
        for _, old in earlier[: max(0, len(earlier) + 1 - _KEPT)]:
            _drop(old, stage)
        folder = self._folder_of(label)
        write_labelled(folder, _label_of_file(stage, label, _PARITIES), StageState({}, outer=dict(parities)))
        write_labelled(folder, _label_of_file(stage, label), state)  # last, since it marks the part as complete

    def read(self, stage: int, label: SnapshotLabel) -> tuple[StageState, dict[str, Tensor]]:
        """Return the state and parities of :meth:`write`.

        :raises UserError: if they are missing, damaged, or of another stage or snapshot.
        """
        folder = self._folder_of(label)
        state, parity = (read_labelled(folder, _label_of_file(stage, label, index)) for index in (0, _PARITIES))
        return state, parity.outer

    def owner(self) -> Owner | None:
        """Return the owner, or None if it is missing or invalid."""
        try:
            _require_own(self.folder)
            return documents.read_sealed(self.folder / RUN, Owner, fix="remove it")
        except (OSError, UserError):
            return None

    def newest_first(self) -> list[SnapshotLabel]:
        labels = [label for label, _ in self._snapshots()]
        return sorted(labels, key=lambda label: (label.step, label.generation), reverse=True)

    def whole_stages(self, label: SnapshotLabel) -> frozenset[int]:
        """Return the stages of a snapshot with complete and valid files."""
        matches = (_STATE.fullmatch(path.name) for path in self._folder_of(label).glob("stage-*"))
        return frozenset(stage for match in matches if match and self._is_whole(stage := int(match[1]), label))

    def remove(self) -> None:
        """Remove the snapshots of a run that has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_whole(self, stage: int, label: SnapshotLabel) -> bool:
        try:
            self.read(stage, label)
        except UserError:
            return False
        return True

    def _snapshots(self) -> list[tuple[SnapshotLabel, Path]]:
        matched = ((_FOLDER.fullmatch(folder.name), folder) for folder in self.folder.glob("step-*"))
        return [
            (SnapshotLabel(part=match[3], generation=int(match[2]), step=int(match[1])), folder)
            for match, folder in matched
            if match
        ]

    def _folder_of(self, label: SnapshotLabel) -> Path:
        return self.folder / f"step-{label.step:08d}.g{label.generation}.{label.part}"


def remove_orphaned() -> None:
    """Remove the snapshots of runs whose folders were removed."""
    for folder in SHARED.glob("planaria-*"):
        snapshots = MemoryFolder(Path())
        snapshots.folder = folder
        owner = snapshots.owner()
        if owner is not None and not Path(owner.folder).is_dir():
            snapshots.remove()


def require_room(size: int, shared: Path = SHARED) -> None:
    """Raise UserError if snapshots of ``size`` bytes do not fit in this machine's memory."""
    try:
        stats = os.statvfs(shared)
    except OSError:
        raise UserError(
            f"recovery.options.persist = true: this machine has no memory file system at {shared}; remove it"
        ) from None
    if (free := stats.f_bavail * stats.f_frsize) < size:
        raise UserError(
            f"recovery.options.persist = true: two snapshots of all stages take {size / 1e6:,.1f} MB, and {shared} has "
            f"{free / 1e6:,.1f} MB free; make room there, or remove it"
        )


def _label_of_file(stage: int, label: SnapshotLabel, index: int = 0) -> StageLabel:
    return StageLabel(stage=stage, step=label.step, index=index, part=label.part, generation=label.generation)


def _stage_files(folder: Path, stage: int) -> list[Path]:
    """Return all files of a stage, including unfinished ones of a killed writer."""
    return list(folder.glob(f"*stage-{stage:04d}[.-]*"))


def _drop(folder: Path, stage: int) -> None:
    for path in _stage_files(folder, stage):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # not empty: other stages have files there
        folder.rmdir()


def _require_own(folder: Path) -> None:
    """Raise OSError if other users could have written the folder, since anyone can create folders there."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(1, "is not accessible by this user only", str(folder))
