"""Folders of ``transformers`` models: open one to start from, and write the weights of a trained one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import Weights, checked_config
from planaria.models.huggingface import listed, read_tensor, tokenizer_of
from planaria.models.transformers.adapters import write_adapters
from planaria.models.transformers.family import decoder_of, model_section
from planaria.models.transformers.skeleton import in_one_line
from planaria.models.usage import of_folder


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
    shapes, files = listed(folder, str, exported=bool(sums))
    expected = decoder_of(config).shapes(config)
    read: Callable[[str], Tensor] = partial(read_tensor, files)
    if any(name not in files for name in expected):
        named = _loaded(folder)
        shapes, read = {name: tuple(one.shape) for name, one in named.items()}, named.__getitem__
    kept = {name: shape for name, shape in shapes.items() if name in expected}  # without tied heads and buffers
    return Weights(folder, config, kept, read, tokenizer_of(folder), usage=of_folder(folder, found, config.context))


def read_json(place: Path) -> dict[str, object]:
    """Return a config.json; UserError if it is none."""
    found = documents.parse_json(documents.data(place, fix="is the path right?"), place)
    if not isinstance(found, dict):
        raise UserError(f"{place}: not a JSON object")
    return found


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> dict[str, Tensor]:
    """Load a folder's weights as the library does, by its names in memory."""
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, local_files_only=True
            )
    except Exception as error:  # the library may raise anything
        raise UserError(f"{folder}: transformers cannot load it: {in_one_line(error)}") from None
    return {name: one.detach() for name, one in model.named_parameters()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's progress bars."""
    from transformers.utils import logging

    shown: Any = logging
    before = shown.is_progress_bar_enabled()
    shown.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            shown.enable_progress_bar()


def write_weights(config: ModelConfig, named: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Write weights, by global name, as the library's ``save_pretrained`` does, or adapters for ``peft``.

    The whole model is in memory, unless there are adapters.

    :raises OSError: if the disk is full.
    """
    decoder = decoder_of(config)
    if decoder.lora is not None:
        with torch.device("meta"):
            layers = decoder.base.build(config.model_copy(update={"ends_layers": 0, "block_layers": None}), 1, 1).layers
        write_adapters(decoder.lora, layers, {name: one.to(dtype) for name, one in named.items()}, folder)
        return
    model = decoder.whole(named).to(dtype)
    with tempfile.TemporaryDirectory(dir=folder) as temporary, _quiet():
        model.save_pretrained(temporary)
        for file in Path(temporary).glob("*.safetensors*"):
            file.rename(folder / file.name)
