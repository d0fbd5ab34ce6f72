"""Folders of ``transformers`` models: open one to start from, and write the weights of a trained one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import WeightsFile, validate_config
from planaria.models.huggingface import INDEX, METADATA, WEIGHTS, read_tensor, tensor_shapes, tokenizer_of
from planaria.models.model_metadata import ModelMetadata, metadata_of_folder, write_json
from planaria.models.transformers.adapters import ADAPTERS, global_name_of, settings_of, write_adapters
from planaria.models.transformers.loading import load_weights
from planaria.models.transformers.recipe_section import decoder_of, model_section
from planaria.models.transformers.skeleton import skeleton

SHARD = 1 << 30
"""largest file of an export in bytes, unless one layer is larger"""


def open_decoder(folder: Path) -> WeightsFile:
    """Open a folder of any causal decoder that the library has.

    Tensors are read one by one where the files have the library's names in memory, else all together.

    :raises UserError: if files are missing or damaged, or the model cannot be cut into stages.
    """
    if sums := digests.read(folder):  # it was exported here
        digests.require(folder, sums, sums)
    path = folder / "config.json"
    config_json = documents.read_json_object(path)
    config = validate_config(path, model_section(config_json, str(path)))
    usage = metadata_of_folder(folder, config_json, config.context)
    if (folder / ADAPTERS).is_file():
        return _open_adapters(folder, config, usage, exported=bool(sums))
    shapes, files = tensor_shapes(folder, str, exported=bool(sums))
    decoder = decoder_of(config)
    expected = decoder.shapes(config)
    table = decoder.facts.table
    head = decoder.facts.tied_head
    read: Callable[[str], Tensor] = partial(read_tensor, files)
    if head in files and table in files and not torch.equal(read(head), read(table)):
        raise UserError(
            f"{folder}: weights: {head} differs from {table}, but {path} ties them; set tie_word_embeddings = false"
        )
    if files.keys() - {head} != expected.keys():  # the library knows which to rename, and which have no use
        fix = "use a folder of its text model alone" if "text_config" in config_json else "download it again"
        named = load_weights(folder, decoder.text, fix)
        shapes, read = {name: tuple(tensor.shape) for name, tensor in named.items()}, named.__getitem__
    kept = {name: shape for name, shape in shapes.items() if name in expected}  # without tied heads and buffers
    return WeightsFile(folder, config, kept, read, tokenizer_of(folder), usage=usage, expected=decoder.shapes)


def _open_adapters(folder: Path, config: ModelConfig, usage: ModelMetadata, exported: bool) -> WeightsFile:
    """Open adapters over a base model, whose own weights are not among the tensors."""
    if not exported:
        raise UserError(f"{folder}: these adapters were not exported here; merge them into their model with `peft`")
    config = config.model_copy(update={"lora": settings_of(folder)})
    shapes, files = tensor_shapes(folder, global_name_of, exported, ADAPTERS)
    read, expected = partial(read_tensor, files), decoder_of(config).shapes
    return WeightsFile(folder, config, shapes, read, tokenizer_of(folder), usage=usage, expected=expected)


def write_weights(
    config: ModelConfig, read: Callable[[str], Tensor], folder: Path, dtype: torch.dtype, largest: int = SHARD
) -> None:
    """Write weights with the names and tensors of the library's ``save_pretrained``, or adapters for ``peft``.

    Decoder layers are written to files of at most ``largest`` bytes; a larger layer has its own. One file is in memory
    at a time. ``read`` returns a weight by its global name.

    :raises OSError: if the disk is full.
    """
    decoder = decoder_of(config)
    shapes = decoder.shapes(config)
    if decoder.lora is not None:
        with torch.device("meta"):
            layers = decoder.base.build(config.model_copy(update={"ends_layers": 0, "block_layers": None}), 1, 1).layers
        write_adapters(decoder.lora, layers, {name: read(name).to(dtype) for name in shapes}, folder)
        return
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = skeleton(decoder.config, decoder.facts.attention, str(folder))
    buffers = _saved_buffers(model)
    shapes |= {name: tuple(tensor.shape) for name, tensor in buffers.items()}
    shards = _shards(shapes, decoder.facts.path, dtype.itemsize, min(largest, SHARD))
    files, size = dict[str, str](), 0
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _cast(buffers[name] if name in buffers else read(name), dtype) for name in names}
        tensors = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, tensors).items()}
        save_file(tensors, folder / file, metadata=METADATA)
        files |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": files})


def _saved_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that the library saves beside a model's parameters."""
    saved = model.state_dict().keys() - set(model._keys_to_ignore_on_save or ())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _shards(shapes: Mapping[str, tuple[int, ...]], path: str, itemsize: int, largest: int) -> list[list[str]]:
    """Return the names of each file: whole layers, since the library joins or splits tensors of a layer.

    ``path``: of the list of layers.
    """
    layers: dict[str, list[str]] = {}
    for name in shapes:
        number = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
        layers.setdefault(number, []).append(name)
    shards, room = list[list[str]](), 0
    for names in layers.values():
        size = sum(prod(shapes[name]) for name in names) * itemsize
        if size > room:
            shards.append([])
            room = largest
        shards[-1] += names
        room -= size
    return shards
