"""A run's durable states: folders that appear whole or not at all, each with a manifest.

``checkpoints/step-00000100/`` holds every stage; ``step-00000137.partial/`` is what survived a loss that could not be
repaired. Resuming from a partial one takes the missing stages from the newest whole one, or from the seed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.bounds import Natural, Positive, Replicas, Stages
from planaria.config.names import STAGE_FILE, replica_name
from planaria.config.schema import ExchangeConfig, ModelConfig
from planaria.control.events import Standing
from planaria.runtime.checkpoint.stage_file import refuse_link, stage_file

FORMAT = 1
MANIFEST = "manifest.json"
NONE: Mapping[int, int] = MappingProxyType({})
_UNFINISHED = ".unfinished"
_REPLACED = f".replaced{_UNFINISHED}"
_DROPPED = f".old{_UNFINISHED}"
_FILE = rf"^(replica-\d+/)?{STAGE_FILE}$"
_WHOLE = re.compile(r"step-(\d+)")
"""how a whole checkpoint is called"""


class Manifest(BaseModel):
    """What a checkpoint folder holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    step: Natural
    stages: list[Natural]
    """stages that are present"""
    pipeline_stages: Stages
    """block stages the model was cut into"""
    samples: Natural | None = None
    """that trained it; as many as its steps took, unless said"""
    replicas: Replicas = 1
    """where several, each has a folder ``replica-R`` and the model is their mean (``loading.py``)"""
    first_block: Natural | None = None
    """all blocks of samples before this one were used (a block: one replica's samples of a step), unless as ``samples``
    says"""
    blocks_ahead: list[Natural] = []
    """and these beyond: some replicas were ahead of others"""
    standings: dict[Natural, Standing] = {}
    """where each of several replicas was"""
    digests: dict[Annotated[str, Field(pattern=_FILE)], str] = {}
    """file of the folder → its digest (``stage_file.Written``); empty where an older planaria wrote it"""
    model: ModelConfig
    exchange: ExchangeConfig | None = None
    """how its replicas agreed; not known where an older planaria wrote it"""
    block: Positive | None = None
    """samples of a block; as the recipe says unless given"""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.stages or len({*self.stages}) < len(self.stages) or max(self.stages) > self.pipeline_stages:
            raise ValueError(f"stages {self.stages} are not those of 0 … {self.pipeline_stages}, each once")
        if why := self.model.uncut(self.pipeline_stages):
            raise ValueError(why)
        return self


@dataclass(frozen=True)
class Saved:
    """A sealed checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def whole(self) -> bool:
        return len(self.manifest.stages) == self.manifest.pipeline_stages + 1


class CheckpointStore:
    """The checkpoints of one run, below ``runs/NAME/checkpoints``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def unfinished(self, step: int, generation: int = 0) -> Path:
        """Where the stages of a checkpoint are gathered until it is sealed.

        Each generation has a place of its own: a frozen holder that wakes up must not write over its successor's stage.
        """
        return self.folder / f"step-{step:08d}.g{generation}{_UNFINISHED}"

    def part(self, step: int, replicas: int, replica: int, generation: int) -> Path:
        """Where one of so many replicas gathers its stages for the checkpoint of ``step``."""
        if replicas == 1:
            return self.unfinished(step, generation)
        return self.unfinished(step) / f"{replica_name(replica)}.g{generation}"

    def collect(self, step: int, replicas: int, replica: int, generation: int) -> None:
        """Make the folder of :meth:`part`. Machines that do not see it may send their stages only while it is there."""
        with suppress(OSError):  # the workers that write there report why they cannot
            self.part(step, replicas, replica, generation).mkdir(parents=True, exist_ok=True)

    def seal(self, name: str, manifest: Manifest, keep: int, generations: Mapping[int, int] = NONE) -> Saved:
        """Make a gathered checkpoint appear as ``name``, and drop whole ones beyond the newest ``keep``.

        ``generations``: replica → the one in which it was saved last; 0 unless said.

        What failed and interrupted saves have left is removed.

        :raises OSError: when the disk is full; the checkpoint stays unfinished, and what had its name keeps it.
        """
        several, step, final = manifest.replicas > 1, manifest.step, self.folder / name
        gathered = self.unfinished(step, 0 if several else generations.get(0, 0))
        parts = {r: self.part(step, manifest.replicas, r, generations.get(r, 0)) for r in manifest.standings if several}
        stages = [stage_file(part, s) for part in parts.values() or [gathered] for s in manifest.stages]
        if not several:  # what is the own of single nodes lies beside
            stages += [gathered / name for name in manifest.digests]
        if absent := [file for file in stages if not file.is_file()]:
            raise FileNotFoundError(errno.ENOENT, "a stage is missing", str(absent[0]))
        kept = {*parts.values()} if several else {*stages}
        for stray in set(gathered.iterdir()) - kept:  # a frozen former holder that wakes up may be faster
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink(missing_ok=True)
        for replica, part in parts.items():
            part.replace(replica_folder(gathered, replica))
        with (gathered / MANIFEST).open("w") as file:
            file.write(documents.sealed(manifest))
            file.flush()
            os.fsync(file.fileno())
        replaced = self._out_of_the_way(final, _REPLACED) if final.exists() else None
        try:
            gathered.replace(final)
        except OSError:
            if replaced is not None:
                replaced.replace(final)
            raise
        _sync_folder(self.folder)
        # Later ones are of a history that was abandoned when the run was resumed from an earlier state: not this one's.
        for old in [s for s in self.list() if s.whole and s.step <= manifest.step][:-keep]:
            self._out_of_the_way(old.folder, _DROPPED)
        self.discard_unfinished()
        return Saved(final, manifest)

    def set_aside_after(self, origin: Saved) -> None:
        """Rename checkpoints later than ``origin``, from which the run goes on: they belong to a history it leaves."""
        found = self.list()
        later = found[[saved.folder for saved in found].index(origin.folder) + 1 :]
        for saved in later:
            saved.folder.replace(saved.folder.with_name(f"abandoned-{time.time_ns()}-{saved.folder.name}"))

    def bring_back(self) -> None:
        """Give back its name to a checkpoint that was about to be replaced, where the seal was killed before it was."""
        for aside in self.folder.glob(f"*{_REPLACED}"):
            if not (before := aside.with_name(aside.name.removesuffix(_REPLACED))).exists():
                aside.replace(before)

    def _out_of_the_way(self, folder: Path, why: str) -> Path:
        """Rename a folder before it is removed, so that a crash never leaves half a checkpoint under its name."""
        doomed = folder.with_name(f"{folder.name}{why}")
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.replace(doomed)
        return doomed

    def discard_unfinished(self, step: int | None = None) -> None:
        """Remove what interrupted saves left behind: all of it, or what the checkpoint of ``step`` was to be.

        What cannot be removed now is in nobody's way until the next time.
        """
        for folder in self.folder.glob(f"{'*' if step is None else f'step-{step:08d}.g*'}{_UNFINISHED}"):
            shutil.rmtree(folder, ignore_errors=True)

    def list(self) -> list[Saved]:
        """All sealed checkpoints, oldest first; a partial one comes after a whole one of the same step."""
        folders = [f for f in self.folder.glob("step-*") if f.is_dir() and f.suffix != _UNFINISHED]
        saved = [Saved(folder, read_manifest(folder)) for folder in folders]
        return sorted(saved, key=lambda s: (s.step, not s.whole))

    def newest(self, whole_only: bool = False) -> Saved | None:
        """The newest checkpoint, or the newest that has every stage."""
        found = [s for s in self.list() if s.whole or not whole_only]
        return found[-1] if found else None

    def reached(self) -> int:
        """The newest whole checkpoint's step, 0 without one, by names alone: another process may save and drop them."""
        return max((step_of(folder.name) for folder in self.folder.glob("step-*")), default=0)


def step_of(name: str) -> int:
    """The step of the whole checkpoint of this name; 0 if it is no name of one."""
    match = _WHOLE.fullmatch(name)
    return int(match[1]) if match else 0


def replica_folder(folder: Path, replica: int) -> Path:
    """Where a checkpoint keeps the stages of one of several replicas."""
    return folder / replica_name(replica)


def stage_name(stage: int, replica: int, replicas: int) -> str:
    """The file of a stage of one of so many replicas, as a manifest names it."""
    return named(stage_file(Path(), stage).name, replica, replicas)


def named(file: str, replica: int, replicas: int) -> str:
    """A file of one of so many replicas, as a manifest names it."""
    return (Path() if replicas == 1 else replica_folder(Path(), replica)).joinpath(file).as_posix()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a sealed checkpoint.

    :raises UserError: when it is missing, damaged or of another format.
    """
    path = folder / MANIFEST
    refuse_link(path)
    if not path.exists():
        raise UserError(f"{folder}: no {MANIFEST}, so it is no checkpoint; remove it or choose another")
    manifest = documents.unsealed(path, Manifest, mend="choose another checkpoint, or remove this")
    if manifest.format != FORMAT:
        raise UserError(f"{path}: format {manifest.format}; this planaria reads format {FORMAT}")
    return manifest


def _sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
