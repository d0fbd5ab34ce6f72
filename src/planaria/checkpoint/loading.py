"""A model, or a replica of it, from a checkpoint. Of several replicas, the model is the mean."""

from __future__ import annotations

from pathlib import Path

from planaria.checkpoint.stage_file import check_stage, read_stage, require_stage, stage_file
from planaria.checkpoint.store import Manifest, Saved, read_manifest, replica_folder
from planaria.errors import UserError
from planaria.exchange.consensus import consensus
from planaria.model.families import family
from planaria.model.stages import Llama, global_name
from planaria.model.state import StageState


def load_model(saved: Saved, stages: int = 1) -> Llama:
    """The model that a whole checkpoint holds, cut into so many block stages.

    :raises UserError: when stages are missing or damaged.
    """
    manifest = saved.manifest
    if not saved.whole:
        missing = sorted(set(range(manifest.pipeline_stages + 1)) - set(manifest.stages))
        raise UserError(f"{saved.folder}: stages {missing} are missing; resume the run, or choose a whole checkpoint")
    if not family(manifest.model).whole:
        raise UserError(
            f"{saved.folder}: its model.family = {manifest.model.family!r} cannot be made one model; read the "
            "stages' files, which are safetensors"
        )
    weights = {}
    for stage in manifest.stages:
        for name, tensor in _of_all(saved.folder, manifest, stage).weights.items():
            weights[global_name(manifest.model, manifest.pipeline_stages, stage, name)] = tensor
    model = Llama(manifest.model, stages, initialise=False)
    model.load_global_state(weights)
    return model


def stage_for(folder: Path, stage: int, replica: int = 0, replicas: int = 1) -> StageState:
    """A stage for one of so many replicas: its own if the checkpoint is of as many, otherwise the one model's.

    :raises UserError: when it is missing or damaged.
    """
    manifest = read_manifest(folder)
    own = replica_folder(folder, replica)
    if replicas == manifest.replicas > 1 and stage_file(own, stage).exists():
        return read_stage(own, stage, _digest(folder, manifest, own, stage))
    state = _of_all(folder, manifest, stage)
    if manifest.replicas > 1 or replicas != replicas_in(manifest):  # an outer state is of no use to more, or fewer
        state.outer = {}
    elif replica:
        state.outer = read_stage(folder, stage, _digest(folder, manifest, folder, stage, replica), replica).outer
    return state


def replicas_in(manifest: Manifest) -> int:
    """Replicas whose outer state is there. Those that exchange gradients have it beside the one model of all."""
    return manifest.replicas if manifest.replicas > 1 else len(_places(manifest, manifest.stages[0]))


def _places(manifest: Manifest, stage: int) -> range:
    """The nodes of a stage that have a file in a folder of the checkpoint."""
    count = 1
    while stage_file(Path(), stage, count).name in manifest.digests:
        count += 1
    return range(count)


def check_stages(folder: Path, manifest: Manifest, stage: int) -> None:
    """Hold a stage's files against their digests, none of it kept in memory; UserError as in :func:`stage_for`."""
    for held in _holding(folder, manifest, stage):
        for place in _places(manifest, stage):
            check_stage(held, stage, place)
            if sha256 := _digest(folder, manifest, held, stage, place):
                require_stage(held, stage, sha256, place)


def _of_all(folder: Path, manifest: Manifest, stage: int) -> StageState:
    states = [
        read_stage(held, stage, _digest(folder, manifest, held, stage)) for held in _holding(folder, manifest, stage)
    ]
    if len(states) == 1 and manifest.replicas == 1:
        return states[0]
    mean = consensus([state.weights for state in states])
    return StageState(mean, lr_scale=states[0].lr_scale)


def _holding(folder: Path, manifest: Manifest, stage: int) -> list[Path]:
    """The folders that hold a stage; one at least, or reading it says what is missing."""
    if manifest.replicas == 1:
        return [folder]
    own = [replica_folder(folder, replica) for replica in sorted(manifest.standings)]
    there = [
        held
        for held in own
        if stage_file(held, stage).exists()
        or stage_file(held, stage).relative_to(folder).as_posix() in manifest.digests
    ]
    return there or [folder]


def _digest(folder: Path, manifest: Manifest, held: Path, stage: int, place: int = 0) -> str:
    """What the manifest says of a stage's file; empty where an older planaria wrote it.

    :raises UserError: when the manifest knows of others, but not of this.
    """
    name = stage_file(held, stage, place).relative_to(folder).as_posix()
    if manifest.digests and name not in manifest.digests:
        raise UserError(f"{folder / name}: missing from its manifest.json; choose another checkpoint of this run")
    return manifest.digests.get(name, "")
