"""A whole model from a checkpoint's stages, for generation and export."""

from __future__ import annotations

from planaria.checkpoint.stage_file import read_stage
from planaria.checkpoint.store import Saved
from planaria.errors import UserError
from planaria.model.stages import Llama, global_name


def load_model(saved: Saved, stages: int = 1) -> Llama:
    """The model that a whole checkpoint holds, cut into so many block stages.

    :raises UserError: when stages are missing or damaged.
    """
    manifest = saved.manifest
    if not saved.whole:
        missing = sorted(set(range(manifest.pipeline_stages + 1)) - set(manifest.stages))
        raise UserError(f"{saved.folder}: stages {missing} are missing; resume the run, or choose a whole checkpoint")
    weights = {}
    for stage in manifest.stages:
        for name, tensor in read_stage(saved.folder, stage).weights.items():
            weights[global_name(manifest.model, manifest.pipeline_stages, stage, name)] = tensor
    model = Llama(manifest.model, stages, initialise=False)
    model.load_global_state(weights)
    return model
