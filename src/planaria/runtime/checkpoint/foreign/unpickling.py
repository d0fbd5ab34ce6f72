"""Safe reading of untrusted pickles: torch's tensors, and the metadata of a DCP folder.

A pickle names functions to call. Torch's loader with ``weights_only`` calls only those that make tensors. For DCP's
metadata, which torch reads with a plain unpickler, :func:`read_metadata` uses stand-ins that keep their arguments.
Other names are rejected. Call it only in a child process with bounded memory.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from planaria.common import documents
from planaria.common.errors import UserError

METADATA_BYTES = 256 << 20
_NAMED = re.compile(r"GLOBAL ([\w.]+)")
_NO_ROOM = ("allocate memory", "Cannot allocate", "not enough memory")
FIX = "use an undamaged folder"
_PIECE = 1 << 20


class Kept:
    """Stand-in for a class of torch: the arguments or state in its pickle."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return a field of a dataclass, or None if it is missing."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Metadata(Kept):
    """Metadata of a DCP folder."""


class TensorEntry(Kept):
    """Type, size and chunks of a tensor."""


class SubparamShape(Kept):
    """DeepSpeed's sizes of the pieces of a fused parameter."""


def _first(value: object = None, *more: object) -> object:
    del more
    return value


_DCP = "torch.distributed.checkpoint"
ADMITTED: dict[tuple[str, str], Callable[..., object]] = {
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorEntry,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): Kept,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): Kept,  # offsets and sizes of a part of a tensor
    (f"{_DCP}.metadata", "TensorProperties"): Kept,  # a tuple that begins with the type
    (f"{_DCP}.metadata", "MetadataIndex"): Kept,  # name and offset of a chunk
    (f"{_DCP}.metadata", "StorageMeta"): Kept,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _first,
    (f"{_DCP}.filesystem", "_StorageInfo"): Kept,  # file, offset and length of a chunk
    ("torch", "Size"): _first,
    ("torch.serialization", "_get_layout"): _first,
    ("pathlib", "PosixPath"): _first,
    ("pathlib", "WindowsPath"): _first,
    ("pathlib._local", "PosixPath"): _first,  # Python 3.13
    ("pathlib._local", "WindowsPath"): _first,
}
DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


class _Unpickler(pickle.Unpickler):
    """Accepts the names in :data:`ADMITTED`, and torch's number types."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return ADMITTED[module, name]


def read_metadata(path: Path) -> Metadata:
    """Read the ``.metadata`` of a DCP folder with stand-ins.

    :raises UserError: if it has a class that no tensor needs (it names the class), is damaged, or too large.
    """
    loaded = _call_guarded(lambda: _Unpickler(io.BytesIO(documents.read_bytes(path, METADATA_BYTES))).load(), str(path))
    if not isinstance(loaded, Metadata):
        raise UserError(f"{path}: damaged (no metadata of a DCP folder); {FIX}")
    return loaded


def read_torch_file(file: BinaryIO, location: str, shapes_only: bool = False) -> Any:
    """Read a file of ``torch.save``: tensors, on the CPU, in plain containers.

    ``shapes_only``: do not read the tensors' data.
    :raises UserError: naming ``location``, if it has a class that no tensor needs (it names the class), is damaged, or
        claims more bytes than it has.
    """
    _require_plain(file, location, shapes_only)
    file.seek(0)
    allowed: list[Any] = [(SubparamShape, "deepspeed.checkpoint.universal_checkpoint.SubparamShape")]
    with torch.serialization.safe_globals(allowed):
        where = "meta" if shapes_only else "cpu"
        return _call_guarded(lambda: torch.load(file, map_location=where, weights_only=True), location)


def _require_plain(file: BinaryIO, location: str, shapes_only: bool) -> None:
    """Check an archive's sizes and sums, which torch does not.

    :raises UserError: if it is not from ``torch.save``, claims more bytes than it has, or a needed entry does not
        match its CRC-32.
    """
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not plain or size < sum(entry.file_size for entry in entries):
                raise UserError(f"{location}: claims more than its {size} bytes; {FIX}")
            for entry in entries:
                if not shapes_only or entry.filename.endswith(".pkl"):
                    with archive.open(entry) as content:
                        while content.read(_PIECE):  # BadZipFile at the end unless the CRC-32 matches
                            pass
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError) as error:
        raise UserError(f"{location}: not a complete file of torch.save ({error}); {FIX}") from None


def _call_guarded(load: Callable[[], Any], location: str) -> Any:
    """Convert the errors of unpickling into a one-line UserError."""
    try:
        return load()
    except MemoryError:
        reason = "needs more memory than its model has"
    except (pickle.UnpicklingError, ImportError) as error:
        named = _NAMED.search(str(error))
        reason = f"holds {named[1]}, which no tensor needs, so it is not read" if named else _brief_error(error)
    except RuntimeError as error:
        short = any(word in str(error) for word in _NO_ROOM)
        reason = "needs more memory than its model has" if short else _brief_error(error)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OSError, AssertionError) as error:
        reason = _brief_error(error)
    raise UserError(f"{location}: {reason}; {FIX}")


def _brief_error(error: Exception) -> str:
    return f"damaged ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]})"
