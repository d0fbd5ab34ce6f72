"""Snapshots that outlive the workers that took them: files in the machine's memory, one folder for each run.

    /dev/shm/planaria-…/run.json                          how the run began, with a seal
                        step-00000040/stage-0003.safetensors        a stage's state
                                      stage-0003-at-1.safetensors   and the parities that it holds

Files of a memory file system stay when their writer is killed, and go with the machine's power. Each appears whole,
with digests, as a checkpoint's does. A worker keeps its two newest snapshots: others may not have written theirs yet.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from planaria import atomic, documents
from planaria.checkpoint.stage_file import read_stage, stage_file, write_stage
from planaria.config import RunConfig
from planaria.errors import UserError
from planaria.model.state import StageState
from planaria.record.started import RunStarted

SHARED = Path("/dev/shm")
RUN = "run.json"
_KEPT = 2
_PARITIES = 1
"""the place, beside the state's, at which parities are written"""
_STEP = re.compile(r"step-(\d{8})")


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
        """A part of the run begins; only what it begins from stays.

        :raises UserError: when the folder cannot be made, or is somebody else's.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _require_own(self.folder)
            for old in self._steps():
                if _step(old) != started.recalled:
                    shutil.rmtree(old)
            whose = Remembered(folder=str(self.run), config=config, started=started)
            atomic.write_text(self.folder / RUN, documents.sealed(whose))
        except OSError as error:
            raise UserError(
                f"{atomic.refused(self.folder, error)}; recovery.options.outlive = true keeps snapshots there"
            ) from None

    def write(self, stage: int, step: int, state: StageState, parities: Mapping[str, Tensor]) -> None:
        """Write what a stage's worker remembers of ``step``; then its third newest snapshot goes.

        :raises OSError: when the memory is full.
        """
        folder = self.folder / f"step-{step:08d}"
        mine = [other for other in self._steps() if stage_file(other, stage).exists() and other != folder]
        for old in mine[: max(0, len(mine) + 1 - _KEPT)]:
            self._drop(old, stage)
        write_stage(folder, stage, step, StageState({}, outer=dict(parities)), _PARITIES)
        write_stage(folder, stage, step, state)  # the last, because it is looked for

    def read(self, stage: int, step: int) -> tuple[StageState, dict[str, Tensor]]:
        """What :meth:`write` wrote.

        :raises UserError: when it is missing or damaged.
        """
        folder = self.folder / f"step-{step:08d}"
        state, beside = read_stage(folder, stage), read_stage(folder, stage, place=_PARITIES)
        return state, beside.outer

    def whose(self) -> Remembered | None:
        """None when there is nothing, or nothing that can be used."""
        try:
            _require_own(self.folder)
            return documents.unsealed(self.folder / RUN, Remembered, mend="remove it")
        except (OSError, UserError):
            return None

    def newest_first(self) -> Iterator[tuple[int, frozenset[int]]]:
        """Steps of which there is something, and the stages whose files are whole; damaged ones do not count."""
        for folder in reversed(self._steps()):
            step = _step(folder)
            found = (int(path.name[6:10]) for path in folder.glob("stage-????.safetensors"))
            yield step, frozenset(stage for stage in found if self._whole(stage, step))

    def remove(self) -> None:
        """The run has ended, and needs it no more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _whole(self, stage: int, step: int) -> bool:
        try:
            self.read(stage, step)
        except UserError:
            return False
        return True

    def _steps(self) -> list[Path]:
        """Folders of snapshots, the oldest first."""
        return sorted(f for f in self.folder.glob("step-*") if _STEP.fullmatch(f.name))

    def _drop(self, folder: Path, stage: int) -> None:
        for path in (stage_file(folder, stage), stage_file(folder, stage, _PARITIES)):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # others have files there yet
            folder.rmdir()


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


def _step(folder: Path) -> int:
    """Of which a folder's snapshot is."""
    return int(folder.name.removeprefix("step-"))


def _require_own(folder: Path) -> None:
    """:raises OSError: when others could have written it: everybody may make folders there."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(1, "is not a folder of this user alone", str(folder))
