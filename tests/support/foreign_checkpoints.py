"""Checkpoints in formats of other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planaria.config.schema import RunConfig
from planaria.models.state import StageState
from planaria.runtime.checkpoint.foreign import ReadRequest, dcp, universal
from planaria.runtime.checkpoint.foreign.folder import DigestedParameter, ExportNote, leave_note
from planaria.runtime.checkpoint.foreign.reading import FolderStages
from planaria.runtime.checkpoint.loading import atoms_of_model
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import SealedCheckpoint
from support.sample_checkpoints import STEP, states_of
from support.stage_states import assert_same_state

OPTIM = RunConfig().optim

KINDS_OF = ("weights", "exp_avg", "exp_avg_sq")

SAMPLES = 77


def even(given: RunConfig) -> Any:
    """States whose parameters have equal clocks and one learning-rate scale."""
    found = states_of(given)
    for held in found.values():
        held.clocks, held.lr_scale, held.scales = dict.fromkeys(held.clocks, STEP), 1.0, {}
    return found


def written(saved: SealedCheckpoint, folder: Path, kind: str) -> Path:
    sums, model = dict[str, str](), saved.manifest.model
    atoms = [DigestedParameter(a.name, a.shape, a.clock, a.scale, a.how, sums) for a in atoms_of_model(saved)]
    folder.mkdir(parents=True)
    if kind == "dcp":
        dcp.write(atoms, folder)
    else:
        universal.write(atoms, folder, STEP, SAMPLES, model.vocab, OPTIM)
    scales = {atom.name: atom.scale for atom in atoms if atom.scale != 1.0}
    leave_note(folder, ExportNote(step=STEP, samples=SAMPLES, model=model, scales=scales, sums=sums))
    return folder


def job(folder: Path, wanted: RunConfig, kind: str, names: Path | None = None) -> ReadRequest:
    to = folder.parent / f"{folder.name}-read"
    path = None if names is None else str(names)
    return ReadRequest(
        folder=str(folder), format=kind, names=path, model=wanted.model, stages=wanted.pipeline.stages, to=str(to)
    )


def taken(folder: Path, wanted: RunConfig, kind: str, names: Path | None = None) -> dict[int, StageState]:
    """Read a folder in this process; return its stages."""
    given = job(folder, wanted, kind, names)
    reply = FolderStages(given).carry_out()
    return {stage: read_stage(Path(given.to), stage, reply.step, sha256) for stage, sha256 in enumerate(reply.digests)}


def require_same(found: StageState, wanted: StageState) -> None:
    """Compare what a folder of another program holds of a stage."""
    stays = ("lr_scale", "grad_norm", "clipped_norm", "generators", "outer", "scales")
    assert_same_state(found, wanted, but=stays)
    for name in wanted.weights:
        assert found.scales.get(name, found.lr_scale) == wanted.scales.get(name, wanted.lr_scale)
