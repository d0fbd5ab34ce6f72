"""Start a run from given weights: they become its checkpoint of step 0."""

from __future__ import annotations

from pathlib import Path

from planaria.checkpoint.cut import CUT
from planaria.checkpoint.stage_file import write_stage
from planaria.checkpoint.store import CheckpointStore, Manifest, stage_name
from planaria.config import ModelConfig, RunConfig
from planaria.control.saving import folder_name
from planaria.data.shards import Dataset
from planaria.data.tokenizer import Tokenizer
from planaria.engine.origin import Origin
from planaria.engine.runs import open_model
from planaria.errors import UserError
from planaria.model.stages import Llama
from planaria.model.state import StageState

FREE = ("init_std", "context", *CUT, "norm_eps", "rope_theta")
"""what a model may say otherwise than the one it starts from: no tensor's shape depends on it"""


def starting_weights(config: RunConfig, dataset: Dataset) -> Llama | None:
    """The model that ``train.start`` names, cut as the run is; None when the run starts from the seed's own weights.

    :raises UserError: when there is none, it has another shape, or other tokens than the run's data.
    """
    if config.train.start is None:
        return None
    folder = Path(config.train.start).expanduser()
    model, tokenizer = open_model(folder)
    differing = [
        name
        for name in ModelConfig.model_fields
        if name not in FREE and _shape(model.config, name) != _shape(config.model, name)
    ]
    if differing:
        name = differing[0]
        raise UserError(
            f"train.start = {config.train.start!r}: its model has {name} = {getattr(model.config, name)}, the recipe "
            f"{getattr(config.model, name)}; set model.{name} to the same"
        )
    if tokenizer.to_json() != Tokenizer.open(dataset.tokenizer_file).to_json():
        raise UserError(
            f"train.start = {config.train.start!r}: its tokenizer is not data.tokenizer = {config.data.tokenizer!r}, "
            f"so every id would mean something else; set data.tokenizer to {folder / 'tokenizer.json'}"
        )
    cut = Llama(config.model, config.pipeline.stages, initialise=False)
    cut.load_global_state(model.global_state())
    return cut


def branch_off(parent: Llama, folder: Path, config: RunConfig) -> Origin:
    """Write the parent's weights as the run's checkpoint of step 0, for all engines to begin with."""
    store, stages = CheckpointStore(folder / "checkpoints"), range(config.pipeline.stages + 1)
    digests: dict[str, str] = {}
    for stage, part in zip(stages, (parent.ends, *parent.stages), strict=True):
        weights = {name: tensor.detach() for name, tensor in part.named_parameters()}
        digests[stage_name(stage, 0, 1)] = write_stage(store.unfinished(0), stage, 0, StageState(weights)).sha256
    manifest = Manifest(
        step=0, stages=list(stages), pipeline_stages=stages[-1], samples=0, digests=digests, model=config.model
    )
    name = folder_name(0, partial=False)
    store.seal(name, manifest, config.checkpoint.keep)
    return Origin(load=dict.fromkeys(stages, name))


def _shape(config: ModelConfig, name: str) -> object:
    return config.kv if name == "kv_heads" else getattr(config, name)
