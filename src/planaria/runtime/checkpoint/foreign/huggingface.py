"""Export of a Hugging Face checkpoint folder, one tensor at a time, in one or more files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from planaria.config.schema import ModelConfig
from planaria.models import huggingface
from planaria.models.model_metadata import write_json
from planaria.models.packing import Spec
from planaria.models.transformers.files import export_adapters, exported_tensors
from planaria.runtime.checkpoint import tensor_file
from planaria.runtime.checkpoint.foreign.folder import WEIGHTS
from planaria.runtime.checkpoint.loading import ParameterState

Precision = Literal["fp32", "bf16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write(groups: Sequence[Mapping[str, Spec]], read: Callable[[str], Tensor], folder: Path, largest: int) -> None:
    """Write weights: one file, or several of at most ``largest`` bytes of tensors with an index.

    :param groups: types and shapes by name; a group is in one file, and a group over ``largest`` has its own
    :param read: returns a tensor by name
    :raises OSError: if the disk is full.
    """
    sizes = [sum(math.prod(shape) * dtype.itemsize for dtype, shape in group.values()) for group in groups]
    shards = pack_groups(sizes, largest)
    count, names = len(shards), dict[str, str]()
    for number, members in enumerate(shards, 1):
        specs = {name: spec for member in members for name, spec in groups[member].items()}
        name = huggingface.WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        names |= dict.fromkeys(specs, name)
        with (folder / name).open("wb") as file:
            tensor_file.write(file, specs, read, huggingface.METADATA)
    if count > 1:
        write_json(folder / huggingface.INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": names})


def write_llama(atoms: Sequence[ParameterState], folder: Path, precision: Precision, largest: int) -> None:
    """Write a checkpoint's weights by their global names, which are Hugging Face's; see :func:`write`."""
    dtype, named = DTYPES[precision], {atom.name: atom for atom in atoms}
    groups = [{atom.name: (dtype, atom.shape)} for atom in atoms]
    write(groups, lambda name: named[name].read(WEIGHTS).to(dtype), folder, largest)


def write_decoder(
    config: ModelConfig, read: Callable[[str], Tensor], folder: Path, precision: Precision, largest: int
) -> None:
    """Write weights as the library's ``save_pretrained`` does, or adapters for ``peft``; see :func:`write`.

    ``read`` returns a weight by its global name. One decoder layer and its converted copy, or one other tensor, is in
    memory at a time.
    """
    if config.lora.rank:
        export_adapters(config, read, folder, DTYPES[precision])
    else:
        exported = exported_tensors(config, read, DTYPES[precision])
        write(exported.groups, exported.read, folder, largest)


def pack_groups(sizes: Sequence[int], largest: int) -> list[list[int]]:
    """Return the indices of ``sizes`` in consecutive groups of at most ``largest`` in total; a larger one is alone."""
    groups: list[list[int]] = [[]]
    room = largest
    for index, size in enumerate(sizes):
        if size > room and groups[-1]:
            groups.append([])
            room = largest
        groups[-1].append(index)
        room -= size
    return groups
