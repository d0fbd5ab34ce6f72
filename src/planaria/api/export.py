"""A run's model, or a checkpoint of it with moments and clocks, taken elsewhere."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from planaria.common.atomic import new_folder, refused
from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models.huggingface import export_folder
from planaria.runtime.checkpoint.foreign import dcp, huggingface, universal
from planaria.runtime.checkpoint.foreign.folder import Note, Summed, leave
from planaria.runtime.checkpoint.foreign.huggingface import Precision
from planaria.runtime.checkpoint.loading import Atom, atoms_of, replicas_in, weights_of
from planaria.runtime.checkpoint.store import Saved
from planaria.runtime.engine import runs

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
            leave(made, Note(step=step, samples=samples, model=manifest.model, scales=scales, sums=sums))
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
