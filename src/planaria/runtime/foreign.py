"""Models and checkpoints of other programs: export a run to them, or start a run from their checkpoint."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from planaria.common.atomic import new_folder, refused
from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.saving import folder_name
from planaria.data.tokenizer import Tokenizer
from planaria.models.families import family
from planaria.models.huggingface import export_folder, export_model
from planaria.models.stages import Llama
from planaria.runtime.checkpoint.foreign import Job, Reply, dcp, huggingface, read_apart, universal
from planaria.runtime.checkpoint.foreign.folder import Note, Summed, leave_note
from planaria.runtime.checkpoint.foreign.huggingface import Precision
from planaria.runtime.checkpoint.loading import Atom, atoms_of, check_stages, replicas_in, weights_of
from planaria.runtime.checkpoint.stage_file import stage_file
from planaria.runtime.checkpoint.store import CheckpointStore, Manifest, Saved
from planaria.runtime.engine import runs
from planaria.runtime.engine.check import check, read_faults
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.weights import open_weights

Kind = Literal["dcp", "universal"]


def export_run(
    folder: Path, to: Path, saved: Saved | None = None, precision: Precision = "fp32", largest: int | None = None
) -> Path:
    """Write a checkpoint of the run in ``folder`` as a Hugging Face model into ``to``, a tensor at a time.

    The newest whole one unless ``saved`` is given; in one file, or in several with an index where there are more than
    ``largest`` bytes of tensors.
    """
    bare = runs.config_of(folder, runs.TOKENIZER).data.tokenization == "legacy"
    tokenizer, saved = Tokenizer.open(folder / runs.TOKENIZER, bare=bare), saved or runs.newest_whole(folder)
    atoms, dtype = weights_of(saved), str(huggingface.DTYPES[precision]).removeprefix("torch.")

    def write(made: Path) -> None:
        huggingface.write(atoms, made, precision, largest or sys.maxsize)

    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save(file := Path(temporary) / runs.TOKENIZER)
        export_folder(saved.manifest.model.dense, to, write, file, tokenizer.end, dtype, used=runs.usage_of(folder))
    return to


def export_state(folder: Path, to: Path, kind: Kind, saved: Saved | None = None) -> list[str]:
    """Write a checkpoint of the run in ``folder`` for another program, with moments and clocks; what to tell of it.

    The folder ``to`` appears whole or not at all. A tensor is in memory at a time.

    :raises UserError: when it exists and is not empty or cannot be written, or the format does not have the state.
    """
    config, saved = runs.config_of(folder), saved or runs.newest_whole(folder)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: exists and is not an empty folder; remove it or export elsewhere")
    if config.optim.kind != "adamw":
        raise UserError(
            f"{folder}: optim.kind = {config.optim.kind!r}: --format {kind} has AdamW's moments; export the weights "
            "(--format hf)"
        )
    if saved.manifest.model.share > 1:
        raise UserError(
            f"{folder}: model.share = {saved.manifest.model.share}: weights share numbers and their moments, which "
            f"--format {kind} does not have; export the weights (--format hf)"
        )
    manifest, sums = saved.manifest, dict[str, str]()
    atoms = [Summed(atom.name, atom.shape, atom.clock, atom.scale, atom.how, sums) for atom in atoms_of(saved)]
    step, samples = saved.step, manifest.samples
    samples = step * config.samples if samples is None else samples
    scales = {atom.name: atom.scale for atom in atoms if atom.scale != 1.0}
    try:
        with new_folder(to) as made:
            if kind == "dcp":
                dcp.write(atoms, made)
            else:
                universal.write(atoms, made, step, samples, manifest.model.vocab, config.optim)
            leave_note(made, Note(step=step, samples=samples, model=manifest.model, scales=scales, sums=sums))
    except OSError as error:
        raise UserError(f"{refused(to, error)}; make room, or export elsewhere") from error
    return _told(saved, atoms)


def _told(saved: Saved, atoms: Sequence[Atom]) -> list[str]:
    """What of a checkpoint goes out otherwise than it is, or stays."""
    replicas, lines = replicas_in(saved.manifest), []
    if replicas > 1:
        lines.append(f"{saved.folder.name}: of {replicas} replicas: their one model, without outer state")
    if saved.manifest.blocks_ahead:
        lines.append(f"{saved.folder.name}: some replicas were ahead of others: their samples are counted, not listed")
    if all(atom.clock is None for atom in atoms):
        lines.append(f"{saved.folder.name}: has no moments yet: weights alone")
    return lines


def export_again(folder: Path, to: Path) -> Path:
    """Write the model in ``folder``, without what lies beside it, as a Llama or a Mixtral.

    :raises UserError: when its routers have a term that Mixtral's have not, naming it.
    """
    weights = open_weights(folder)
    model = _as_mixtral(folder, weights.model())
    end = None if weights.tokenizer is None else Tokenizer.open(weights.tokenizer).end
    export_model(model, to, weights.tokenizer, end, weights.usage)
    return to


def _as_mixtral(folder: Path, model: Llama) -> Llama:
    """The same model without biases, where those of each router are one number: softmax and top-k do not see it."""
    if model.routing is None or not model.routing.bias:
        return model
    state = model.global_state()
    for name, bias in state.items():
        if name.endswith(".router.bias") and (low := float(bias.min())) != (high := float(bias.max())):
            raise UserError(
                f"{folder}: {name} is {low:.3g} to {high:.3g}: a router of Mixtral has no bias, and its input no "
                "constant channel that could hold one; merge again with --no-bias"
            )
    plain = Llama(model.config, routing=model.routing._replace(bias=False), initialise=False)
    plain.load_global_state({name: tensor for name, tensor in state.items() if not name.endswith(".router.bias")})
    return plain


def import_run(folder: Path, config: RunConfig, kind: Kind, names: Path | None = None) -> tuple[Path, list[str]]:
    """Make a run of ``config`` whose first checkpoint is what ``folder`` holds: its folder, and what to tell.

    ``names``: a file that says which tensor is which parameter, where they have not Hugging Face's names. The run's
    folder appears whole or not at all; ``planaria.train(folder, resume=True)`` goes on from there.

    :raises UserError: when the folder is damaged or does not hold the model of ``config``; nothing is made then.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; give the checkpoint of another program")
    if config.engine == "simulate" or not family(config.model).whole:
        what = "engine = 'simulate'" if config.engine == "simulate" else f"model.family = {config.model.family!r}"
        raise UserError(f"{what}: has no weights of one model to begin from")
    if config.train.start is not None:
        raise UserError(f"train.start = {config.train.start!r}: the weights are those of {folder}; leave it out")
    resolved = check(config)
    replies: list[Reply] = []
    made = runs.create_filled(config, lambda run: replies.append(_fill(run, folder, resolved, kind, names)))
    (reply,) = replies
    counted = [] if reply.samples is not None else ["samples used are not said: counted as the recipe's of each step"]
    return made, [f"{folder}: {line}" for line in (f"step {reply.step}", *reply.said, *counted)]


def _fill(run: Path, folder: Path, resolved: ResolvedRun, kind: Kind, names: Path | None) -> Reply:
    """Put the folder's state into a run's folder, as its first checkpoint."""
    config, store = resolved.config, CheckpointStore(run / "checkpoints")
    stages = config.pipeline.stages
    parts = store.folder / "foreign.unfinished"
    job = Job(
        folder=str(folder),
        format=kind,
        names=None if names is None else str(names),
        model=config.model,
        stages=stages,
        to=str(parts),
    )
    reply = read_apart(job)
    runs.keep_plans(run, config, read_faults(resolved))
    parts.rename(store.unfinished(reply.step))
    digests = {stage_file(Path(), stage).name: sha256 for stage, sha256 in enumerate(reply.digests)}
    manifest = Manifest(
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
    check_stages(store.folder, {0: saved.folder.name}, config)  # all stages have moments of one optimizer, or none
    return reply
