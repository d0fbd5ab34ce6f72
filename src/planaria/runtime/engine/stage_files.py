"""Where a worker reads and writes its stage's files of checkpoints: in the run's folder, or at the controller's.

On a machine that does not see the run's folder, a part that was written is sent to the controller, and what a stage is
made of is fetched from there; neither stays on this machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from planaria.common.errors import UserError
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import files_for, stage_for
from planaria.runtime.checkpoint.stage_file import Written, stage_file, write_stage
from planaria.runtime.checkpoint.store import MANIFEST
from planaria.runtime.engine.setup import CHECKPOINTS, Setup
from planaria.runtime.fleet.files import Files


class StageFiles:
    """A worker's way to the checkpoints of its run."""

    def __init__(self, setup: Setup, worker: str) -> None:
        """What this worker's predecessor has left here when it was killed is removed."""
        self._setup = setup
        self._files = Files(setup.files, setup.key) if setup.files else None
        self._place = setup.scratch / worker
        """for files on their way"""
        if self._files is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def read(self, name: str, stage: int, replica: int) -> StageState:
        """A replica's stage, made of the checkpoint ``name``.

        :raises UserError: when that cannot be read or fetched.
        """
        config = self._setup.config
        if self._files is None:
            return stage_for(self._setup.checkpoints / name, config, stage, replica)
        try:
            with self._scratch() as place:
                self._fetch(place / name, [MANIFEST])
                self._fetch(place / name, files_for(place / name, config, stage))
                return stage_for(place / name, config, stage, replica)
        except OSError as error:
            raise UserError(f"stage {stage} of {name} cannot be fetched from {self._setup.files} ({error})") from None

    def write(self, folder: Path, stage: int, step: int, state: StageState, place: int) -> Written:
        """Write a stage durably into a folder of checkpoints, as :func:`write_stage`; at the controller's, if so.

        :raises OSError: when it cannot be written or sent.
        """
        if self._files is None:
            return write_stage(folder, stage, step, state, place)
        with self._scratch() as scratch:
            written = write_stage(scratch, stage, step, state, place)
            file, name = stage_file(scratch, stage, place), folder.relative_to(self._setup.checkpoints).as_posix()
            self._files.put(file, f"{CHECKPOINTS}/{name}/{file.name}")
        return written

    def _fetch(self, folder: Path, names: Sequence[str]) -> None:
        assert self._files is not None
        for name in names:
            self._files.fetch(f"{CHECKPOINTS}/{folder.name}/{name}", folder / name)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        self._place.mkdir(parents=True, exist_ok=True)
        try:
            yield self._place
        finally:
            shutil.rmtree(self._place, ignore_errors=True)
