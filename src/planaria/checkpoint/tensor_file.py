"""Safetensors files, written tensor by tensor.

The library's own writer holds the interpreter's lock from the first byte to the last: while a disk is slow, or hangs,
no other thread could even say that the process lives. Reading is the library's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from torch import Tensor

from planaria.model.packing import layout
from planaria.transport.buffers import as_bytes


def write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a whole file; its SHA-256 (hex). Other threads run while bytes go to the disk.

    :raises KeyError: for a tensor of a type that such files do not have.
    :raises OSError: when the disk is full.
    """
    head, spans = layout({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:
        for piece in (memoryview(head), *(as_bytes(tensors[name].contiguous()) for name in spans)):
            counted = beside.submit(digest.update, piece)
            file.write(piece)
            counted.result()
    return digest.hexdigest()
