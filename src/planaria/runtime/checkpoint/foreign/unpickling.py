"""Pickles of strangers, read without running any of them: torch's tensors, and the metadata of a DCP folder.

A pickle names functions to be called. Torch's own loader, told ``weights_only``, calls those that make tensors; for
DCP's metadata, which torch reads with a plain unpickler, :func:`metadata` has stand-ins that keep what they are given.
Any other name is refused. To be called in a process of its own only, whose memory is bounded.
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
MEND = "give an undamaged folder"
_PIECE = 1 << 20


class Kept:
    """What stands in for a class of torch's: the arguments or the state that its pickle has."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of a dataclass; None where it has no such field."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Metadata(Kept):
    """All of a DCP folder."""


class TensorEntry(Kept):
    """A tensor, by type, size and chunks."""


class BytesEntry(Kept):
    """Anything else."""


class Chunk(Kept):
    """A box of a tensor."""


class Properties(Kept):
    """A tensor's type, first in a tuple."""


class Index(Kept):
    """Name and place of a chunk."""


class Stored(Kept):
    """File, offset and length of a chunk."""


class Origin(Kept):
    """Where the folder was written."""


class SubparamShape(Kept):
    """DeepSpeed's: the sizes of the pieces of a fused parameter."""


def _first(value: object = None, *more: object) -> object:
    del more
    return value


_DCP = "torch.distributed.checkpoint"
ADMITTED: dict[tuple[str, str], Callable[..., object]] = {
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorEntry,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): BytesEntry,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): Chunk,
    (f"{_DCP}.metadata", "TensorProperties"): Properties,
    (f"{_DCP}.metadata", "MetadataIndex"): Index,
    (f"{_DCP}.metadata", "StorageMeta"): Origin,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _first,
    (f"{_DCP}.filesystem", "_StorageInfo"): Stored,
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
    """Knows the names in :data:`ADMITTED`, and torch's number types."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return ADMITTED[module, name]


def metadata(path: Path) -> Metadata:
    """The ``.metadata`` of a DCP folder, by stand-ins.

    :raises UserError: naming the class, when it has one that no tensor needs; when it is damaged or too large.
    """
    found = _guarded(lambda: _Unpickler(io.BytesIO(documents.data(path, METADATA_BYTES))).load(), str(path))
    if not isinstance(found, Metadata):
        raise UserError(f"{path}: damaged (it holds no metadata of a DCP folder); {MEND}")
    return found


def saved(file: BinaryIO, place: str, shapes_only: bool = False) -> Any:
    """What ``torch.save`` wrote into a file: tensors, on the CPU, in plain containers.

    ``shapes_only``: tensors without numbers, which are not read.

    :raises UserError: naming ``place``: when it has a class that no tensor needs (its name), is damaged, or claims more
        than is there.
    """
    _require_plain(file, place, shapes_only)
    file.seek(0)
    known: list[Any] = [(SubparamShape, "deepspeed.checkpoint.universal_checkpoint.SubparamShape")]
    with torch.serialization.safe_globals(known):
        where = "meta" if shapes_only else "cpu"
        return _guarded(lambda: torch.load(file, map_location=where, weights_only=True), place)


def _require_plain(file: BinaryIO, place: str, shapes_only: bool) -> None:
    """Torch looks neither at sizes nor at sums.

    :raises UserError: when it is no archive of ``torch.save``, claims more bytes than it has, or what is wanted of it
        does not have its CRC-32.
    """
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not plain or size < sum(entry.file_size for entry in entries):
                raise UserError(f"{place}: claims more than its {size} bytes hold; {MEND}")
            for entry in entries:
                if not shapes_only or entry.filename.endswith(".pkl"):
                    _require_sum(archive, entry)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError) as error:
        raise UserError(f"{place}: not a whole file of torch.save ({error}); {MEND}") from None


def _require_sum(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """:raises zipfile.BadZipFile: when an entry's bytes do not have its CRC-32."""
    with archive.open(entry) as content:
        while content.read(_PIECE):
            pass


def _guarded(load: Callable[[], Any], place: str) -> Any:
    """Whatever a pickle may do to its reader, in one line."""
    try:
        return load()
    except MemoryError:
        reason = "needs more memory than its model has"
    except (pickle.UnpicklingError, ImportError) as error:
        named = _NAMED.search(str(error))
        reason = f"holds {named[1]}, which no tensor needs: not read" if named else _brief(error)
    except RuntimeError as error:
        short = any(word in str(error) for word in _NO_ROOM)
        reason = "needs more memory than its model has" if short else _brief(error)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OSError, AssertionError) as error:
        reason = _brief(error)
    raise UserError(f"{place}: {reason}; {MEND}")


def _brief(error: Exception) -> str:
    return f"damaged ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]})"
