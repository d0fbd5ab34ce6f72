"""Safetensors files, written tensor by tensor.

The library's own writer holds the interpreter's lock from the first byte to the last: while a disk is slow, or hangs,
no other thread could even say that the process lives. Reading is the library's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from torch import Tensor

from planaria.model.packing import Spec, layout
from planaria.transport.buffers import as_bytes


def write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a whole file; its SHA-256 (hex). Other threads run while bytes go to the disk.

    :raises KeyError: for a tensor of a type that such files do not have.
    :raises OSError: when the disk is full.
    """
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return stream(file, specs, tensors.__getitem__, metadata)


def stream(
    file: BinaryIO, specs: Mapping[str, Spec], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> str:
    """:func:`write` for tensors that are had one by one, from ``read``, each when its turn has come."""
    head, spans = layout(specs, metadata)
    _require_room(file, len(head) + max((end for _, end in spans.values()), default=0))
    pieces = (memoryview(head) if name is None else as_bytes(read(name).contiguous()) for name in (None, *spans))
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:
        for piece in pieces:
            counted = beside.submit(digest.update, piece)
            file.write(piece)
            counted.result()
    return digest.hexdigest()


def _require_room(file: BinaryIO, size: int) -> None:
    """A file that cannot fit is not begun: it would take the room that the run's log needs meanwhile.

    :raises OSError: when the disk has fewer bytes left.
    """
    disk = os.fstatvfs(file.fileno())
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and disk.f_bavail * disk.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
