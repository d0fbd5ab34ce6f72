"""Folders of ``transformers`` models: open one to start from, and write the weights of a trained one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import Weights, checked_config
from planaria.models.huggingface import listed, read_tensor, tokenizer_of
from planaria.models.model_metadata import ModelMetadata, of_folder
from planaria.models.transformers.adapters import ADAPTERS, options_of, trained_name, write_adapters
from planaria.models.transformers.family import decoder_of, model_section
from planaria.models.transformers.loading import loaded, quiet
from planaria.models.transformers.whole import assembled


def open_decoder(folder: Path) -> Weights:
    """Open a folder of any causal decoder that the library has.

    Tensors are read one by one where the files have the library's names in memory, else all at once.

    :raises UserError: if files are missing or damaged, or the model cannot be cut into stages.
    """
    if sums := digests.read(folder):  # it was exported here
        digests.require(folder, sums, sums)
    place = folder / "config.json"
    found = read_json(place)
    config = checked_config(place, model_section(found, str(place)))
    if (folder / ADAPTERS).is_file():
        return _open_adapters(folder, config, of_folder(folder, found, config.context), exported=bool(sums))
    shapes, files = listed(folder, str, exported=bool(sums))
    decoder = decoder_of(config)
    expected, table, head = decoder.shapes(config), decoder.facts.table, decoder.facts.tied_head
    read: Callable[[str], Tensor] = partial(read_tensor, files)
    if head in files and table in files and not _equal(read(head), read(table)):
        raise UserError(
            f"{folder}: weights: {head} differs from {table}, but {place} ties them; set tie_word_embeddings = false"
        )
    if files.keys() - {head} != expected.keys():  # the library knows which to rename, and which have no use
        fix = "give a folder of its text model alone" if "text_config" in found else "download it again"
        named = loaded(folder, decoder.text, fix)
        shapes, read = {name: tuple(one.shape) for name, one in named.items()}, named.__getitem__
    kept = {name: shape for name, shape in shapes.items() if name in expected}  # without tied heads and buffers
    return Weights(folder, config, kept, read, tokenizer_of(folder), usage=of_folder(folder, found, config.context))


def _open_adapters(folder: Path, config: ModelConfig, usage: ModelMetadata, exported: bool) -> Weights:
    """Open adapters over a base model, whose own weights are not among the tensors."""
    if not exported:
        raise UserError(f"{folder}: these adapters were not exported here; merge them into their model with `peft`")
    config = config.model_copy(update={"options": {**config.options, **options_of(folder)}})
    shapes, files = listed(folder, trained_name, exported, ADAPTERS)
    return Weights(folder, config, shapes, partial(read_tensor, files), tokenizer_of(folder), usage=usage)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


def read_json(place: Path) -> dict[str, object]:
    """Return a config.json; UserError if it is none."""
    found = documents.parse_json(documents.data(place, fix="is the path right?"), place)
    if not isinstance(found, dict):
        raise UserError(f"{place}: not a JSON object")
    return found


def write_weights(config: ModelConfig, read: Callable[[str], Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Write weights as the library's ``save_pretrained`` does, or adapters for ``peft``.

    ``read`` gives a tensor by its global name. The whole model is in memory once, unless there are adapters.

    :raises OSError: if the disk is full.
    """
    decoder = decoder_of(config)
    if decoder.lora is not None:
        with torch.device("meta"):
            layers = decoder.base.build(config.model_copy(update={"ends_layers": 0, "block_layers": None}), 1, 1).layers
        named = {name: read(name).to(dtype) for name in decoder.shapes(config)}
        write_adapters(decoder.lora, layers, named, folder)
        return
    model = assembled(decoder, read).to(dtype)
    with tempfile.TemporaryDirectory(dir=folder) as temporary, quiet():
        model.save_pretrained(temporary)
        for file in Path(temporary).glob("*.safetensors*"):
            file.rename(folder / file.name)
