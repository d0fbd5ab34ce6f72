"""Safetensors files, written tensor by tensor.

The library's own writer holds the interpreter's lock from the first byte to the last: while a disk is slow, or hangs,
no other thread could even say that the process lives. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import torch
from torch import Tensor

from planaria.transport.buffers import as_bytes

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED = 8


def write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a whole file; its SHA-256 (hex). Other threads run while bytes go to the disk.

    :raises KeyError: for a tensor of a type that such files do not have.
    :raises OSError: when the disk is full.
    """
    # The widest first, as the library does it: each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:
        start = memoryview(struct.pack("<Q", len(text)) + text)
        for piece in (start, *(as_bytes(tensor.contiguous()) for _, tensor in ordered)):
            counted = beside.submit(digest.update, piece)
            file.write(piece)
            counted.result()
    return digest.hexdigest()
