"""Models and checkpoints of other programs: export a run or model to them, or start a run from their checkpoint."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from planaria.common.atomic import new_folder, write_error
from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.checkpoint_decisions import folder_name
from planaria.data.tokenizer import Tokenizer
from planaria.models.families import make_family
from planaria.models.huggingface import export_folder, export_model
from planaria.models.llama_stages import Llama
from planaria.models.transformers.adapters import ADAPTERS
from planaria.models.transformers.files import merged_weights
from planaria.runtime.checkpoint.foreign import ReadReply, ReadRequest, dcp, huggingface, read_apart, universal
from planaria.runtime.checkpoint.foreign.folder import DigestedParameter, ExportNote, leave_note
from planaria.runtime.checkpoint.foreign.huggingface import Precision
from planaria.runtime.checkpoint.loading import ParameterState, atoms_of_model, check_stages, replicas_in, weights_of
from planaria.runtime.checkpoint.stage_file import stage_file
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore, SealedCheckpoint
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.config_checks import check, read_faults
from planaria.runtime.preparation.weight_sources import open_weights
from planaria.runtime.resolved_run import ResolvedRun

CheckpointFormat = Literal["dcp", "universal"]


def export_run(
    folder: Path,
    to: Path,
    saved: SealedCheckpoint | None = None,
    precision: Precision = "fp32",
    largest: int | None = None,
    merge: bool = False,
) -> Path:
    """Export a checkpoint of the run in ``folder`` as a Hugging Face model to ``to``, one tensor at a time.

    Default: the newest whole checkpoint. More than ``largest`` bytes of tensors are split into several files with an
    index. With ``merge``, adapters are added to the weights of their base model.

    :raises UserError: if there are no adapters to merge, or the export cannot be written.
    """
    bare = run_folders.config_of(folder, run_folders.TOKENIZER).data.tokenization == "legacy"
    tokenizer = Tokenizer.open(folder / run_folders.TOKENIZER, bare=bare)
    saved = saved or run_folders.newest_whole(folder)
    atoms, dtype = weights_of(saved), str(huggingface.DTYPES[precision]).removeprefix("torch.")
    model, named = saved.manifest.model.dense, {atom.name: atom for atom in atoms}
    if merge and not model.lora.rank:
        raise UserError(f"{folder}: it trained no adapters to merge; remove --merge")

    def stored(name: str) -> Tensor:
        return named[name].read("weights")

    model, read = merged_weights(model, stored) if merge else (model, stored)

    def write(made: Path) -> None:
        most = largest or sys.maxsize
        if model.family == "transformers":
            huggingface.write_decoder(model, read, made, precision, most)
        else:
            huggingface.write_llama(atoms, made, precision, most)

    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save(file := Path(temporary) / run_folders.TOKENIZER)
        export_folder(
            model,
            to,
            write,
            file,
            tokenizer.end,
            dtype,
            used=run_folders.model_metadata_of(folder),
        )
    return to


def export_state(folder: Path, to: Path, kind: CheckpointFormat, saved: SealedCheckpoint | None = None) -> list[str]:
    """Export a checkpoint of the run in ``folder`` for another program, with moments and clocks; return notes.

    The folder ``to`` appears atomically. One tensor is in memory at a time.
    :raises UserError: if the folder is not empty or cannot be written, or the format does not support the state.
    """
    config, saved = run_folders.config_of(folder), saved or run_folders.newest_whole(folder)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} exists and is not an empty folder; remove it or export elsewhere")
    if config.optim.kind != "adamw":
        raise UserError(
            f"{folder}: optim.kind = {config.optim.kind!r}: --format {kind} supports only AdamW; export the weights "
            "(--format hf)"
        )
    if factored := saved.manifest.model.factored:
        raise UserError(
            f"{folder}: {factored}: weights that are not stored whole are not supported by --format {kind}; export "
            "the weights (--format hf)"
        )
    manifest, sums = saved.manifest, dict[str, str]()
    atoms = [
        DigestedParameter(atom.name, atom.shape, atom.clock, atom.scale, atom.how, sums)
        for atom in atoms_of_model(saved)
    ]
    step, samples = saved.step, manifest.samples
    samples = step * config.samples if samples is None else samples
    scales = {atom.name: atom.scale for atom in atoms if atom.scale != 1.0}
    try:
        with new_folder(to) as made:
            if kind == "dcp":
                dcp.write(atoms, made)
            else:
                universal.write(atoms, made, step, samples, manifest.model.vocab, config.optim)
            leave_note(made, ExportNote(step=step, samples=samples, model=manifest.model, scales=scales, sums=sums))
    except OSError as error:
        raise UserError(f"{write_error(to, error)}; free space, or export elsewhere") from error
    return _notes(saved, atoms)


def _notes(saved: SealedCheckpoint, atoms: Sequence[ParameterState]) -> list[str]:
    """Return a line for each difference between a checkpoint and its export."""
    replicas, lines = replicas_in(saved.manifest), []
    if replicas > 1:
        lines.append(f"{saved.folder.name}: the mean model of {replicas} replicas, without outer state")
    if saved.manifest.blocks_ahead:
        lines.append(
            f"{saved.folder.name}: some replicas were ahead of others: only their number of samples is exported"
        )
    if all(atom.clock is None for atom in atoms):
        lines.append(f"{saved.folder.name} has no moments yet; only weights are exported")
    return lines


def export_again(source: Path, to: Path) -> Path:
    """Export a model of another program, or one that was exported, as a Llama or a Mixtral.

    :raises UserError: if there is none, it is no Llama, or its routers have biases that Mixtral does not support.
    """
    if (source / ADAPTERS).is_file():
        raise UserError(f"{source} holds adapters without their model; use `planaria export RUN --merge`")
    weights = open_weights(source)
    model = _as_mixtral(source, weights.model())
    if weights.tokenizer is None:
        export_model(model, to, used=weights.usage)
        return to
    tokenizer = Tokenizer.open(weights.tokenizer)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save(file := Path(temporary) / run_folders.TOKENIZER)
        export_model(model, to, file, tokenizer.end, weights.usage)
    return to


def _as_mixtral(folder: Path, model: Llama) -> Llama:
    """Return the model without biases if each router's are equal, since softmax and top-k ignore them."""
    if model.routing is None or not model.routing.bias:
        return model
    state = model.global_state()
    for name, bias in state.items():
        if name.endswith(".router.bias") and (low := float(bias.min())) != (high := float(bias.max())):
            raise UserError(
                f"{folder}: {name} is {low:.3g} to {high:.3g}: Mixtral's routers have no bias, and their input "
                "no constant channel; merge again with --no-bias"
            )
    plain = Llama(model.config, routing=model.routing._replace(bias=False), initialise=False)
    plain.load_global_state({name: tensor for name, tensor in state.items() if not name.endswith(".router.bias")})
    return plain


def import_run(
    folder: Path, config: RunConfig, kind: CheckpointFormat, names: Path | None = None
) -> tuple[Path, list[str]]:
    """Create a run of ``config`` with the checkpoint in ``folder``; return the run's folder and notes.

    ``names``: a file that maps tensors to parameters, unless they have Hugging Face's names. The run's folder appears
    atomically; ``planaria.train(folder, resume=True)`` continues from there.

    :raises UserError: if the folder is damaged or does not hold the model of ``config``; then nothing is created.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; use the checkpoint of another program")
    if config.engine == "simulate" or not make_family(config.model).has_global_names:
        label = "engine = 'simulate'" if config.engine == "simulate" else f"model.family = {config.model.family!r}"
        raise UserError(f"{label} has no single model to start")
    if config.model.lora.rank:
        raise UserError("model.lora.rank: adapters cannot be imported; remove it")
    if config.train.start is not None:
        raise UserError(f"train.start = {config.train.start!r}: the weights come from {folder}; remove it")
    resolved = check(config)
    replies: list[ReadReply] = []
    made = run_folders.create_filled(config, lambda run: replies.append(_fill(run, folder, resolved, kind, names)))
    (reply,) = replies
    counted = [] if reply.samples is not None else ["samples used are unknown; the recipe's number per step is assumed"]
    return made, [f"{folder}: {line}" for line in (f"step {reply.step}", *reply.notes, *counted)]


def _fill(run: Path, folder: Path, resolved: ResolvedRun, kind: CheckpointFormat, names: Path | None) -> ReadReply:
    """Write the foreign folder's state into a run's folder, as its first checkpoint."""
    config, store = resolved.config, CheckpointStore(run / "checkpoints")
    stages = config.pipeline.stages
    parts = store.folder / "foreign.unfinished"
    job = ReadRequest(
        folder=str(folder),
        format=kind,
        names=None if names is None else str(names),
        model=config.model,
        stages=stages,
        to=str(parts),
    )
    reply = read_apart(job)
    run_folders.write_plans(run, config, read_faults(resolved))
    parts.rename(store.unfinished(reply.step))
    digests = {stage_file(Path(), stage).name: sha256 for stage, sha256 in enumerate(reply.digests)}
    manifest = CheckpointManifest(
        step=reply.step,
        stages=list(range(stages + 1)),
        pipeline_stages=stages,
        samples=reply.samples,
        digests=digests,
        model=config.model,
        exchange=ExchangeConfig(),
        block=config.pipeline.samples,
    )
    saved = store.seal(folder_name(reply.step), manifest, config.checkpoint.keep)
    check_stages(store.folder, {0: saved.folder.name}, config)  # checks one stage, since all have moments or none do
    return reply
