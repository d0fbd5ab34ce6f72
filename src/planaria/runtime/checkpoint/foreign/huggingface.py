"""Export of a Hugging Face checkpoint folder, one tensor at a time, in one or more files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from planaria.models import huggingface
from planaria.runtime.checkpoint import tensor_file
from planaria.runtime.checkpoint.foreign.folder import WEIGHTS
from planaria.runtime.checkpoint.loading import ParameterState

Precision = Literal["fp32", "bf16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write(atoms: Sequence[ParameterState], folder: Path, precision: Precision, largest: int) -> None:
    """Write the weights: one file, or several of at most ``largest`` bytes of tensors with an index.

    :raises OSError: if the disk is full.
    """
    dtype = DTYPES[precision]
    shards = pack_groups([math.prod(atom.shape) * dtype.itemsize for atom in atoms], largest)
    count, names = len(shards), dict[str, str]()
    for number, members in enumerate(shards, 1):
        shard = {atoms[position].name: atoms[position] for position in members}
        name = huggingface.WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        names |= dict.fromkeys(shard, name)
        specs = {key: (dtype, atom.shape) for key, atom in shard.items()}

        def read(key: str, shard: Mapping[str, ParameterState] = shard) -> Tensor:
            return shard[key].read(WEIGHTS).to(dtype)

        with (folder / name).open("wb") as file:
            tensor_file.write(file, specs, read, huggingface.METADATA)
    if count > 1:
        total = sum(math.prod(atom.shape) for atom in atoms) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / huggingface.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


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
