"""Runs that start from given weights, which are streamed to a checkpoint of step 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from planaria.common import digests
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.checkpoint_decisions import folder_name
from planaria.data.shards import Data
from planaria.data.tokenizer import Tokenizer
from planaria.models.families import make_family
from planaria.models.foreign_weights import WeightsFile
from planaria.models.start_settings import FIXED, require_same
from planaria.pipeline.routing import ROUTINGS
from planaria.runtime.checkpoint.cut import atom_name, declared_tensors
from planaria.runtime.checkpoint.loading import cut_for
from planaria.runtime.checkpoint.stage_file import stream_weights
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore, stage_name
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.run_start import START, Origin
from planaria.runtime.preparation.weight_sources import open_weights, require_dense
from planaria.runtime.resolved_run import ResolvedRun


def starting_weights(config: RunConfig) -> WeightsFile | None:
    """Return the weights that ``train.start`` names, or None if the run starts from the seed's.

    :raises UserError: if they are missing, belong to another model, or their tokenizer has more ids than they have
        rows.
    """
    if config.train.start is None:
        return None
    if factored := config.model.factored:
        raise UserError(
            f"train.start = {config.train.start!r}: whole matrices cannot be converted to those of {factored}; leave "
            "that out"
        )
    weights = open_weights(config.train.start, config.model.family)
    require_dense(config.train.start, weights)
    require_same(
        f"train.start = {config.train.start!r}", weights.config, {name: getattr(config.model, name) for name in FIXED}
    )
    if weights.tokenizer is not None and _inherits(config, weights.tokenizer):
        ids, rows = Tokenizer.open(weights.tokenizer).vocab, weights.config.vocab
        if ids > rows:
            raise UserError(
                f"{weights.tokenizer} has {ids} ids, and its model rows for {rows}: tokenizer and model do not match"
            )
    return weights


def require_tokenizer(weights: WeightsFile, config: RunConfig, dataset: Data) -> None:
    """Require the tokenizer that the weights were trained with; UserError otherwise."""
    start, chosen = config.train.start, config.data.tokenizer
    fix = "so ids would change their meaning; set"
    if weights.tokenizer is None:
        if chosen in ("bpe", "bytes"):
            raise UserError(
                f"train.start = {start!r}: it has no tokenizer, and was not trained with data.tokenizer = {chosen!r}, "
                f"{fix} data.tokenizer to its tokenizer.json"
            )
    elif not _inherits(config, weights.tokenizer) and _digest(weights.tokenizer) != dataset.meta.tokenizer:
        raise UserError(
            f"train.start = {start!r}: its tokenizer is not data.tokenizer = {chosen!r}, {fix} data.tokenizer to "
            f"{weights.tokenizer}"
        )


def _inherits(config: RunConfig, tokenizer: Path) -> bool:
    return config.data.tokenizer == str(tokenizer.absolute())


def _digest(tokenizer: Path) -> str:
    """Return the digest that ``data.dataset.CorpusMetadata.tokenizer`` stores."""
    return digests.of(Tokenizer.open(tokenizer).to_json().encode())


def weight_warnings(run: ResolvedRun, weights: WeightsFile | None) -> Iterator[str]:
    """Yield a warning for each setting that does not suit the model or its starting weights."""
    config = run.config
    for clause in make_family(config.model).warnings(config.model):
        yield f"warning: model.family = {config.model.family!r}: {clause}"
    if weights is None:
        if config.train.pretrained:
            yield (
                "warning: this recipe is for pretrained weights, but the run starts from random ones; use "
                "weights with --train.start, a file, a folder or hf:OWNER/NAME"
            )
        return
    trained_context, context = weights.config.context, config.model.context
    if context > trained_context:
        trained = f"the weights were trained on {trained_context} positions"
        yield f"warning: model.context = {context}: {trained}; the others are new"
    for name, strategy in run.recovery.strategies.items():
        if strategy.pretrained_warning:
            yield _unsuitable(f"recovery {name!r}", strategy.pretrained_warning)
    if config.routing.schedule is None:
        routing = ROUTINGS.make(config.routing.kind, config.routing.options)
        if routing.pretrained_warning:
            kind = config.routing.kind
            yield _unsuitable(f"routing {kind!r}", routing.pretrained_warning)


def branch_off(weights: WeightsFile, folder: Path, config: RunConfig) -> Origin:
    """Write the weights as the run's checkpoint of step 0, tensor by tensor, and the settings next to them.

    The base of adapters is not written, since stages load it themselves.

    :raises UserError: if a tensor cannot be read, or is not finite.
    """
    if weights.usage is not None:
        digests.write_files(folder, {run_folders.MODEL_METADATA: weights.usage.model_dump_json(indent=1).encode()})
    if config.model.lora.rank and not weights.config.lora.rank:
        return START
    store, cut = CheckpointStore(folder / "checkpoints"), cut_for(config)
    stages, sums = list(range(cut.stages + 1)), dict[str, str]()
    for stage in stages:
        shapes = {name: entry.shape for name, entry in declared_tensors(cut, stage).items()}

        def read(local: str, stage: int = stage) -> Tensor:
            return weights.tensor(atom_name(cut, stage, local))

        sums[stage_name(stage, 0, 1)] = stream_weights(store.unfinished(0), stage, 0, shapes, read).sha256
    manifest = CheckpointManifest(
        step=0, stages=stages, pipeline_stages=cut.stages, samples=0, digests=sums, model=config.model
    )
    name = folder_name(0, partial=False)
    store.seal(name, manifest, config.checkpoint.keep)
    return Origin(load=dict.fromkeys(stages, name))


def _unsuitable(choice: str, reason: str) -> str:
    return f"warning: {choice} is unsuitable for pretrained weights: {reason}; see docs/models.md"
