"""Folders of ``transformers`` models: open one to start from, and write the weights of a trained one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.config.model_config import AdapterConfig
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import WeightsFile, validate_config
from planaria.models.huggingface import read_tensor, tensor_shapes, tokenizer_of
from planaria.models.model_metadata import ModelMetadata, config_file, metadata_of_folder
from planaria.models.packing import Spec
from planaria.models.transformers.adapters import ADAPTERS, base_reader, global_name_of, settings_of, write_adapters
from planaria.models.transformers.loading import load_weights
from planaria.models.transformers.recipe_section import decoder_of, model_section
from planaria.models.transformers.skeleton import skeleton


def open_decoder(folder: Path) -> WeightsFile:
    """Open a folder of any causal decoder that the library has.

    Tensors are read one by one where the files have the library's names in memory, else all together.

    :raises UserError: if files are missing or damaged, or the model cannot be cut into stages.
    """
    if sums := digests.read(folder):  # it was exported here
        digests.require(folder, sums, sums)
    path = config_file(folder)
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


class ExportedTensors(NamedTuple):
    """Tensors of an export: types and shapes by name, in groups that the library converts together: layers."""

    groups: list[dict[str, Spec]]
    read: Callable[[str], Tensor]
    """returns a tensor by name, and keeps its group in memory until the next group"""


def exported_tensors(config: ModelConfig, read: Callable[[str], Tensor], dtype: torch.dtype) -> ExportedTensors:
    """Return weights with the names and tensors of the library's ``save_pretrained``, grouped by decoder layer.

    ``read`` returns a weight by its global name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    decoder = decoder_of(config)
    model: Any = skeleton(decoder.config, decoder.facts.attention, "export")
    buffers = _saved_buffers(model)
    shapes = decoder.shapes(config) | {name: tuple(tensor.shape) for name, tensor in buffers.items()}
    members = _names_by_layer(shapes, decoder.facts.path)

    def convert(group: int, value: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(model, {name: _cast(value(name), dtype) for name in members[group]}))

    def on_meta(name: str) -> Tensor:
        return torch.empty(shapes[name], dtype=buffers[name].dtype if name in buffers else dtype, device="meta")

    groups = list[dict[str, Spec]]()
    for number in range(len(members)):
        groups.append({name: (one.dtype, tuple(one.shape)) for name, one in convert(number, on_meta).items()})
    number_of = {name: number for number, group in enumerate(groups) for name in group}
    held = dict[int, dict[str, Tensor]]()

    def converted(name: str) -> Tensor:
        if (number := number_of[name]) not in held:
            held.clear()
            held[number] = convert(number, lambda one: buffers[one] if one in buffers else read(one))
        return held[number][name]

    return ExportedTensors(groups, converted)


def export_adapters(config: ModelConfig, read: Callable[[str], Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Write a model's adapters for ``peft``; ``read`` returns a weight by its global name.

    :raises OSError: if the disk is full.
    """
    decoder = decoder_of(config)
    assert decoder.lora is not None, "a model with adapters"
    with torch.device("meta"):
        layers = decoder.base.build(config.model_copy(update={"ends_layers": 0, "block_layers": None}), 1, 1).layers
    write_adapters(decoder.lora, layers, {name: read(name).to(dtype) for name in decoder.shapes(config)}, folder)


def merged_weights(config: ModelConfig, read: Callable[[str], Tensor]) -> tuple[ModelConfig, Callable[[str], Tensor]]:
    """Return a model without adapters and a reader of its weights, to which the adapters are added as in ``peft``.

    ``read`` returns an adapter by its global name. One weight is in memory at a time.

    :raises UserError: if the base model is missing or has changed; the reader, if its files are damaged.
    """
    decoder, flat = decoder_of(config), config.model_copy(update={"ends_layers": 0, "block_layers": None})
    assert decoder.lora is not None, "a model with adapters"
    with torch.device("meta"):
        modules: dict[str, Any] = dict(decoder.build(flat, 1, 1).named_modules())
    adapted = {  # to whether the matrix is stored transposed
        decoder.global_name(flat, 1, 1, name): bool(module.fan_in_fan_out)
        for name, module in modules.items()
        if hasattr(module, "lora_A")
    }
    base, scale = base_reader(decoder.lora, decoder.text), decoder.lora.alpha / decoder.lora.rank

    def merged(name: str) -> Tensor:
        matrix = name.removesuffix(".weight")
        if name == matrix or matrix not in adapted:
            return base(name)
        first, second = (read(f"{matrix}.lora_{side}.default.weight") for side in "AB")
        change = second @ first
        return base(name).float() + (change.T if adapted[matrix] else change) * scale

    return config.model_copy(update={"lora": AdapterConfig()}), merged


def _saved_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that the library saves beside a model's parameters."""
    saved = model.state_dict().keys() - set(model._keys_to_ignore_on_save or ())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _names_by_layer(names: Iterable[str], path: str) -> list[list[str]]:
    """Return the names of each decoder layer, and each name outside alone; ``path``: of the list of layers.

    The library joins and splits tensors of a layer.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        inside = name.startswith(f"{path}.")
        layers.setdefault(name.removeprefix(f"{path}.").partition(".")[0] if inside else name, []).append(name)
    return [*layers.values()]
