"""Prepared data: memory-mapped token ids of one source, or a mixture of such sources.

A source's folder has ``train.bin`` and ``validation.bin`` (little-endian ids; then ``train.1.bin`` and so on),
``tokenizer.json`` and ``meta.json``. Text is one stream of ids, of which samples are windows. Dialogues are rows of
equal length, with a byte of marks for each id (``train.marks.bin`` …). A mixture's folder has ``mixture.json`` only,
which names the folders of its sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.data.mixture import Quotas

Split = Literal["train", "validation"]
Count = Annotated[int, Field(ge=0)]
Ids = npt.NDArray[np.unsignedinteger[Any]]
LEARNED, START = 1, 2
"""marks of an id: it is a target; it is the first of a document"""


class CorpusMetadata(documents.Record, strict=True):
    """``meta.json``: the shards and their origin."""

    format: Literal[1]
    dtype: Literal["uint16", "uint32"]
    shard: Annotated[int, Field(gt=0)]
    """tokens in a full shard"""
    documents: Count
    train: Count
    """tokens of the split, separators included"""
    validation: Count
    tokenizer: str
    """SHA-256 of tokenizer.json"""
    fingerprint: str
    """fingerprint of the corpus"""
    ids: str = ""
    """SHA-256 of the two splits' SHA-256; empty if made by an older planaria"""
    row: Count = 0
    """ids in a row of dialogues, model.context + 1; 0: a stream of text"""
    notes: tuple[str, ...] = ()
    """a line on each kind of file or dialogue that was skipped or cut"""

    def tokens(self, split: Split) -> int:
        return self.train if split == "train" else self.validation

    @property
    def content(self) -> object:
        """Settings on which every sample depends; excludes the corpus's location."""
        return self.tokenizer, self.train, self.validation, self.row

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of the ids of each source."""
        return (self.ids,)


class MixtureSource(documents.Record, strict=True):
    """One source of a mixture."""

    folder: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    """its prepared folder, beside the mixture's"""
    quota: Annotated[int, Field(gt=0)]
    """samples per block; see :mod:`planaria.data.mixture`"""
    meta: CorpusMetadata


class MixtureMeta(documents.Record, strict=True):
    """``mixture.json``: the sources by name."""

    format: Literal[1]
    parts: Annotated[dict[str, MixtureSource], Field(min_length=1)]

    @property
    def tokenizer(self) -> str:
        """SHA-256 of the common tokenizer.json."""
        return next(iter(self.parts.values())).meta.tokenizer

    @property
    def content(self) -> object:
        return {name: (source.quota, source.meta.content) for name, source in self.parts.items()}

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(source.meta.ids for source in self.parts.values())


class CorruptDataset(UserError):
    """A prepared folder contradicts its ``meta.json``."""


class Dataset:
    """A prepared corpus. Opening maps files without reading ids, so every worker opens its own."""

    def __init__(self, folder: Path, meta: CorpusMetadata) -> None:
        self.folder = folder
        self.meta = meta
        splits: tuple[Split, Split] = ("train", "validation")
        self._ids = {split: self._map_files(split, split, _dtype(meta)) for split in splits}
        self._marks = {
            split: self._map_files(split, marks_of(split), np.dtype(np.uint8)) for split in splits if meta.row
        }

    @property
    def parts(self) -> Mapping[str, Dataset]:
        """Itself, as the only source."""
        return {"": self}

    @property
    def quotas(self) -> Quotas:
        return (1,)

    @property
    def folders(self) -> list[Path]:
        """Every folder that :func:`open_data` needs."""
        return [self.folder]

    @classmethod
    def open(cls, folder: Path | str) -> Dataset:
        """Open a prepared folder.

        :raises CorruptDataset: if a file is missing or damaged.
        """
        folder = Path(folder)
        with _damage_errors(folder, "meta.json"):
            meta = CorpusMetadata.model_validate_json(_read_description(folder / "meta.json"))
            dataset = cls(folder, meta)
            digest = hashlib.sha256(dataset.tokenizer_file.read_bytes()).hexdigest()
        if digest != meta.tokenizer:
            raise _corrupt(folder, "tokenizer.json is not the one the ids were made with")
        return dataset

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"

    def tokens(self, split: Split) -> int:
        """Return the number of ids in a split, separators included."""
        return self.meta.tokens(split)

    def separator(self, split: Split) -> int:
        """Return the id between documents, which also ends every split; IndexError if the split is empty."""
        return int(self.read(split, self.tokens(split) - 1, 1)[0])

    def windows(self, split: Split, context: int) -> int:
        """Return how many samples of ``context`` tokens, plus one more token, a split holds."""
        if self.meta.row:
            return self.tokens(split) // self.meta.row
        return max(0, self.tokens(split) - 1) // context

    def window(self, split: Split, number: int, context: int) -> npt.NDArray[np.int64]:
        """Return the ids of a sample: int64 [context + 1]. IndexError if there is none."""
        return self.read(split, number * (self.meta.row or context), context + 1)

    def marks(self, split: Split, number: int) -> npt.NDArray[np.uint8]:
        """Return the marks (:data:`LEARNED`, :data:`START`) of a row's ids: uint8 [row]."""
        marks = np.empty(self.meta.row, np.uint8)
        self._copy(self._marks[split], number * self.meta.row, marks)
        return marks

    def read(self, split: Split, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return ids ``start`` .. ``start + count - 1`` of a split: int64 [count]. Raises IndexError beyond its
        ends."""
        if start < 0 or start + count > self.tokens(split):
            raise IndexError(f"{split} has {self.tokens(split)} tokens, not {start}..{start + count}")
        ids = np.empty(count, dtype=np.int64)
        self._copy(self._ids[split], start, ids)
        return ids

    def _copy(self, shards: list[Ids], start: int, to: npt.NDArray[Any]) -> None:
        """Copy what the shards hold from ``start`` on."""
        done = 0
        while done < len(to):
            shard, offset = divmod(start + done, self.meta.shard)
            piece = shards[shard][offset : offset + len(to) - done]
            to[done : done + len(piece)] = piece
            done += len(piece)

    def _map_files(self, split: Split, name: str, dtype: np.dtype[Any]) -> list[Ids]:
        total, shard = self.meta.tokens(split), self.meta.shard
        return [
            _map(shard_file(self.folder, name, number), dtype, min(shard, total - start))
            for number, start in enumerate(range(0, total, shard))
        ]


class Mixture:
    """Several sources with one tokenizer, each with its own prepared folder."""

    def __init__(self, folder: Path, meta: MixtureMeta, parts: Mapping[str, Dataset]) -> None:
        self.folder = folder
        self.meta = meta
        self.parts = parts

    @classmethod
    def open(cls, folder: Path) -> Mixture:
        """Open a mixture's folder and those of its sources.

        :raises CorruptDataset: as :meth:`Dataset.open`.
        """
        meta = _mixture_meta(folder)
        datasets = {name: Dataset.open(folder.parent / source.folder) for name, source in meta.parts.items()}
        for name, source in meta.parts.items():
            if datasets[name].meta.content != source.meta.content:
                raise _corrupt(folder, f"{datasets[name].folder} is not what {name!r} was")
        return cls(folder, meta, datasets)

    @property
    def quotas(self) -> Quotas:
        """Quota of each of the ``parts``."""
        return tuple(source.quota for source in self.meta.parts.values())

    @property
    def folders(self) -> list[Path]:
        """Every folder that :func:`open_data` needs."""
        return [self.folder, *(source.folder for source in self.parts.values())]

    @property
    def tokenizer_file(self) -> Path:
        return next(iter(self.parts.values())).tokenizer_file

    def windows(self, split: Split, context: int) -> int:
        """Return the windows of all sources; 0 if a source has none."""
        counts = [source.windows(split, context) for source in self.parts.values()]
        return sum(counts) if all(counts) else 0


Data = Dataset | Mixture
"""prepared data of either kind"""
MIXTURE = "mixture.json"


def open_data(folder: Path | str) -> Data:
    """Open a prepared folder of either kind.

    :raises CorruptDataset: if a file is missing or damaged.
    """
    folder = Path(folder)
    return Mixture.open(folder) if (folder / MIXTURE).exists() else Dataset.open(folder)


def parts_of(folder: Path) -> list[str]:
    """Return the names of the folders beside ``folder`` that a mixture needs; none for a source."""
    return [source.folder for source in _mixture_meta(folder).parts.values()] if (folder / MIXTURE).exists() else []


def _read_description(path: Path) -> bytes:
    """Read a description, truncated at the maximum size of a document."""
    with path.open("rb") as file:
        return documents.read_bounded(file, documents.MAX_BYTES)


def _mixture_meta(folder: Path) -> MixtureMeta:
    with _damage_errors(folder, MIXTURE):
        return MixtureMeta.model_validate_json(_read_description(folder / MIXTURE))


@contextmanager
def _damage_errors(folder: Path, description: str) -> Iterator[None]:
    """Raise CorruptDataset if a file cannot be read or the ``description`` is invalid."""
    try:
        yield
    except OSError as error:
        raise _corrupt(folder, f"{error.filename} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise _corrupt(folder, f"{description}: {documents.first_error(error)}") from error


def shard_file(folder: Path, name: str, number: int) -> Path:
    """Return the file of a shard of a split's ids, or of its marks (:func:`marks_of`)."""
    return folder / (f"{name}.{number}.bin" if number else f"{name}.bin")


def marks_of(split: Split) -> str:
    """Return the name of a split's marks."""
    return f"{split}.marks"


def _dtype(meta: CorpusMetadata) -> np.dtype[Any]:
    return np.dtype(meta.dtype).newbyteorder("<")


def _map(file: Path, dtype: np.dtype[Any], count: int) -> Ids:
    size = file.stat().st_size
    if size != count * dtype.itemsize:
        raise _corrupt(file.parent, f"{file.name} has {size} bytes, not {count * dtype.itemsize}")
    return np.memmap(file, dtype, mode="r", shape=(count,))


def _corrupt(folder: Path, label: str) -> CorruptDataset:
    return CorruptDataset(f"prepared data in {folder} is damaged: {label}; delete that folder and start again")
