"""A run's durable states: folders that appear atomically, each with a manifest.

``checkpoints/step-00000100/`` holds every stage; ``step-00000137.partial/`` holds the stages that survived a loss
without recovery. Resuming from a partial one takes the missing stages from the newest whole one, or from the seed.
"""

from __future__ import annotations

import errno
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

from planaria.common import atomic, documents
from planaria.common.documents import former_names
from planaria.common.errors import UserError
from planaria.config.bounds import Natural, Positive, Replicas, Stages
from planaria.config.names import STAGE_FILE, replica_name
from planaria.config.schema import ExchangeConfig, ModelConfig
from planaria.control.facts.events import ReplicaPosition
from planaria.runtime.checkpoint.stage_file import refuse_link, stage_file

FORMAT = 1
MANIFEST = "manifest.json"
NO_GENERATIONS: Mapping[int, int] = MappingProxyType({})
_UNFINISHED = ".unfinished"
_REPLACED = f".replaced{_UNFINISHED}"
_DROPPED = f".old{_UNFINISHED}"
_FILE = rf"^(replica-\d+/)?{STAGE_FILE}$"
_WHOLE = re.compile(r"step-(\d+)")
"""name of a whole checkpoint"""


class CheckpointManifest(BaseModel):
    """Contents of a checkpoint folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    _former = former_names(positions="standings")
    format: int = FORMAT
    step: Natural
    stages: list[Natural]
    """stages that are present"""
    pipeline_stages: Stages
    """number of block stages"""
    samples: Natural | None = None
    """samples used for training; default: those of its steps"""
    replicas: Replicas = 1
    """number of replicas; if several, each has a folder ``replica-R``, and the model is their mean (``loading.py``)"""
    first_block: Natural | None = None
    """first block of samples (of one replica's step) that is not used completely; default: it follows from ``samples``
    """
    blocks_ahead: list[Natural] = []
    """used blocks beyond it, if some replicas were ahead of others"""
    positions: dict[Natural, ReplicaPosition] = {}
    """progress of each of several replicas"""
    digests: dict[Annotated[str, Field(pattern=_FILE)], str] = {}
    """file → its digest (``stage_file.Written``); empty from an older planaria"""
    model: ModelConfig
    exchange: ExchangeConfig | None = None
    """exchange between its replicas, or None from an older planaria"""
    block: Positive | None = None
    """samples of a block; default: the recipe's"""

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if not self.stages or len({*self.stages}) < len(self.stages) or max(self.stages) > self.pipeline_stages:
            raise ValueError(f"stages {self.stages} must be distinct and within 0 … {self.pipeline_stages}")
        if why := self.model.why_uncuttable(self.pipeline_stages):
            raise ValueError(why)
        return self


@dataclass(frozen=True)
class SealedCheckpoint:
    folder: Path
    manifest: CheckpointManifest

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
        """Return the folder of an unsealed checkpoint.

        Each generation has its own, so that a stopped holder that continues cannot overwrite its successor's stage.
        """
        return self.folder / f"step-{step:08d}.g{generation}{_UNFINISHED}"

    def unsealed_replica_folder(self, step: int, replicas: int, replica: int, generation: int) -> Path:
        """Return the folder in which a replica collects its stages for the checkpoint of ``step``."""
        if replicas == 1:
            return self.unfinished(step, generation)
        return self.unfinished(step) / f"{replica_name(replica)}.g{generation}"

    def create_replica_folder(self, step: int, replicas: int, replica: int, generation: int) -> None:
        """Create the :meth:`unsealed_replica_folder`; remote machines may send stages only while it exists."""
        with suppress(OSError):  # reported by the workers that write there
            self.unsealed_replica_folder(step, replicas, replica, generation).mkdir(parents=True, exist_ok=True)

    def seal(
        self, name: str, manifest: CheckpointManifest, keep: int, generations: Mapping[int, int] = NO_GENERATIONS
    ) -> SealedCheckpoint:
        """Publish a collected checkpoint as ``name``, and remove whole ones beyond the newest ``keep``.

        ``generations``: replica → the generation of its last save; default 0. Remains of failed and interrupted saves
        are removed.

        :raises OSError: if the disk is full; the checkpoint stays unsealed, and an existing one keeps its name.
        """
        final = self.folder / name
        gathered = self.unfinished(manifest.step, 0 if manifest.replicas > 1 else generations.get(0, 0))
        if final.exists() and not gathered.exists() and read_manifest(final) == manifest:
            return SealedCheckpoint(final, manifest)  # by a controller that was lost then
        self._keep_sealed_files(gathered, manifest, generations)
        atomic.write_durable(gathered / MANIFEST, documents.seal(manifest).encode())
        replaced = self._mark_for_removal(final, _REPLACED) if final.exists() else None
        try:
            gathered.replace(final)
        except OSError:
            if replaced is not None:
                replaced.replace(final)
            raise
        atomic.sync_folder(self.folder)
        # Later checkpoints belong to a history that was abandoned on resumption; keep them.
        for old in [s for s in self.list() if s.whole and s.step <= manifest.step][:-keep]:
            self._mark_for_removal(old.folder, _DROPPED)
        self.discard_unfinished()
        return SealedCheckpoint(final, manifest)

    def _keep_sealed_files(self, gathered: Path, manifest: CheckpointManifest, generations: Mapping[int, int]) -> None:
        """Leave only the checkpoint's stages in ``gathered``, those of several replicas in a folder for each."""
        several = manifest.replicas > 1
        parts = {
            r: self.unsealed_replica_folder(manifest.step, manifest.replicas, r, generations.get(r, 0))
            for r in manifest.positions
            if several
        }
        stages = [stage_file(part, s) for part in parts.values() or [gathered] for s in manifest.stages]
        if not several:  # single nodes have additional files
            stages += [gathered / name for name in manifest.digests]
        if absent := [file for file in stages if not file.is_file()]:
            raise FileNotFoundError(errno.ENOENT, "a stage is missing", str(absent[0]))
        kept = {*parts.values()} if several else {*stages}
        for stray in set(gathered.iterdir()) - kept:  # written by a stopped former holder
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink(missing_ok=True)
        for replica, part in parts.items():
            part.replace(replica_folder(gathered, replica))

    def set_aside_after(self, origin: SealedCheckpoint) -> None:
        """Rename checkpoints later than ``origin``, which belong to a history that is abandoned."""
        checkpoints = self.list()
        later = checkpoints[[saved.folder for saved in checkpoints].index(origin.folder) + 1 :]
        for saved in later:
            self.set_aside(saved)

    def set_aside(self, saved: SealedCheckpoint) -> None:
        saved.folder.replace(saved.folder.with_name(f"abandoned-{time.time_ns()}-{saved.folder.name}"))

    def bring_back(self) -> None:
        """Restore the name of a checkpoint whose replacement was interrupted."""
        for aside in self.folder.glob(f"*{_REPLACED}"):
            if not (before := aside.with_name(aside.name.removesuffix(_REPLACED))).exists():
                aside.replace(before)

    def _mark_for_removal(self, folder: Path, why: str) -> Path:
        """Rename a folder before its removal, so that a crash never leaves a partial checkpoint under its name."""
        doomed = folder.with_name(f"{folder.name}{why}")
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.replace(doomed)
        return doomed

    def discard_unfinished(self, step: int | None = None) -> None:
        """Remove remains of interrupted saves: all, or those of the checkpoint of ``step``.

        Files that cannot be removed are tried again next time.
        """
        for folder in self.folder.glob(f"{'*' if step is None else f'step-{step:08d}.g*'}{_UNFINISHED}"):
            shutil.rmtree(folder, ignore_errors=True)

    def list(self) -> list[SealedCheckpoint]:
        """Return all sealed checkpoints, oldest first; a partial one follows a whole one of the same step."""
        folders = [f for f in self.folder.glob("step-*") if f.is_dir() and f.suffix != _UNFINISHED]
        saved = [SealedCheckpoint(folder, read_manifest(folder)) for folder in folders]
        return sorted(saved, key=lambda s: (s.step, not s.whole))

    def newest(self, whole_only: bool = False) -> SealedCheckpoint | None:
        """Return the newest checkpoint, or the newest whole one."""
        candidates = [s for s in self.list() if s.whole or not whole_only]
        return candidates[-1] if candidates else None

    def newest_step_by_name(self) -> int:
        """Return the newest whole checkpoint's step, 0 without one, from names alone, since other processes may change
        them.
        """
        return max((step_of(folder.name) for folder in self.folder.glob("step-*")), default=0)


def step_of(name: str) -> int:
    """Return the step of the whole checkpoint of this name; 0 for other names."""
    match = _WHOLE.fullmatch(name)
    return int(match[1]) if match else 0


def replica_folder(folder: Path, replica: int) -> Path:
    return folder / replica_name(replica)


def stage_name(stage: int, replica: int, replicas: int) -> str:
    """Return a stage's file of a replica, as a manifest names it."""
    return replica_file(stage_file(Path(), stage).name, replica, replicas)


def replica_file(file: str, replica: int, replicas: int) -> str:
    """Return a replica's file, as a manifest names it."""
    return (Path() if replicas == 1 else replica_folder(Path(), replica)).joinpath(file).as_posix()


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of a sealed checkpoint; UserError if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    refuse_link(path)
    if not path.exists():
        raise UserError(f"{folder}: no {MANIFEST}, so it is not a checkpoint; remove it or choose another")
    manifest = documents.read_sealed(path, CheckpointManifest, fix="choose another checkpoint, or remove this")
    if manifest.format != FORMAT:
        raise UserError(f"{path}: format {manifest.format}; this planaria reads format {FORMAT}")
    return manifest
