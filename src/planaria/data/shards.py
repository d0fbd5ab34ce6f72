"""Tokenised once, mapped ever after: the corpus as files of ids, made by one process and opened by all.

A prepared folder holds ``train.bin`` and ``validation.bin`` (little-endian ids; ``train.1.bin`` and so on where one
shard is full), ``tokenizer.json`` and ``meta.json``.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planaria.config import DataConfig
from planaria.data.cache import cache_folder, locked
from planaria.data.corpus import documents, fingerprint
from planaria.data.tokenizer import Tokenizer, load_tokenizer
from planaria.errors import UserError
from planaria.memory_pool import trim

FORMAT: Final = 1
SHARD = 2**28
"""tokens in a full shard"""

Split = Literal["train", "validation"]
Progress = Callable[[str], None]
Count = Annotated[int, Field(ge=0)]
Ids = npt.NDArray[np.unsignedinteger[Any]]


class Meta(BaseModel):
    """``meta.json``: what the shards are, and what they were made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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
    """the corpus's"""

    def tokens(self, split: Split) -> int:
        return self.train if split == "train" else self.validation


class CorruptDataset(UserError):
    """A prepared folder that is not what its ``meta.json`` says."""


class Dataset:
    """A prepared corpus. Opening maps files and reads none of the ids, so every worker opens its own."""

    def __init__(self, folder: Path, meta: Meta) -> None:
        self.folder = folder
        self.meta = meta
        self._shards: dict[Split, list[Ids]] = {"train": [], "validation": []}
        for split, shards in self._shards.items():
            for start in range(0, meta.tokens(split), meta.shard):
                count = min(meta.shard, meta.tokens(split) - start)
                shards.append(_map(_shard_file(folder, split, len(shards)), _dtype(meta), count))

    @classmethod
    def open(cls, folder: Path | str) -> Dataset:
        """Open a prepared folder. Raises CorruptDataset, a UserError, if something in it is missing or damaged."""
        folder = Path(folder)
        try:
            meta = Meta.model_validate_json((folder / "meta.json").read_bytes())
            dataset = cls(folder, meta)
            found = hashlib.sha256(dataset.tokenizer_file.read_bytes()).hexdigest()
        except OSError as error:
            raise _corrupt(folder, f"{error.filename} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise _corrupt(folder, f"meta.json: {place} {first['msg'].lower()}") from error
        if found != meta.tokenizer:
            raise _corrupt(folder, "tokenizer.json is not the one the ids were made with")
        return dataset

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"

    def tokens(self, split: Split) -> int:
        """Ids in a split, separators included."""
        return self.meta.tokens(split)

    def windows(self, split: Split, context: int) -> int:
        """How many stretches of ``context`` tokens, each with one more token after it, a split holds."""
        return max(0, self.tokens(split) - 1) // context

    def read(self, split: Split, start: int, count: int) -> npt.NDArray[np.int64]:
        """Ids ``start`` .. ``start + count - 1`` of a split: int64 [count]. Raises IndexError beyond its ends."""
        if start < 0 or start + count > self.tokens(split):
            raise IndexError(f"{split} has {self.tokens(split)} tokens, not {start}..{start + count}")
        ids, done = np.empty(count, dtype=np.int64), 0
        while done < count:
            shard, offset = divmod(start + done, self.meta.shard)
            part = self._shards[split][shard][offset : offset + count - done]
            ids[done : done + len(part)] = part
            done += len(part)
        return ids


def prepare(data: DataConfig, vocab: int, on_progress: Progress | None = None) -> Dataset:
    """The corpus of ``data`` as ids below ``vocab``: taken from the cache, or tokenised into it.

    The last ``data.validation`` of every document's tokens is kept for validation; in both splits each document's part
    is followed by the separator. Processes that prepare the same data at once wait for the first. A damaged folder is
    made anew. Raises UserError for whatever is wrong with the source, the tokenizer or the cache folder.
    """
    say = on_progress or _silent
    cache = cache_folder(data)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(data, vocab, cache, say)
        made_from = fingerprint(data)
        key = hashlib.sha256(f"{FORMAT} {made_from} {data.validation!r} {tokenizer.to_json()}".encode()).hexdigest()
        folder = cache / key[:24]
        with locked(cache / f".{folder.name}.lock", lambda: say("waiting for another process that prepares this data")):
            return _kept(folder, say) or _build(folder, data, tokenizer, made_from, say)
    except OSError as error:
        raise UserError(
            f"cannot use the data cache {cache} ({error}); "
            "make room and permission there, or set data.cache to another folder"
        ) from error


def _kept(folder: Path, say: Progress) -> Dataset | None:
    """What an earlier run prepared, if it is there and whole."""
    if not folder.exists():
        return None
    try:
        return Dataset.open(folder)
    except CorruptDataset:
        say(f"{folder} is damaged; preparing it anew")
        return None


def _build(folder: Path, data: DataConfig, tokenizer: Tokenizer, made_from: str, say: Progress) -> Dataset:
    """Fill an unfinished folder, then give it its name. To be called under the folder's lock."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that died while it built
    unfinished.mkdir()
    try:
        say(f"tokenising {data.source}")
        meta = _write(unfinished, documents(data, say), tokenizer, data.validation, made_from, say)
        say(f"{meta.documents:,} documents: {meta.train:,} tokens to train on, {meta.validation:,} for validation")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        trim()  # tokenising took 50 MB and more
    return Dataset.open(folder)


def _write(
    folder: Path, texts: Iterable[str], tokenizer: Tokenizer, validation: float, made_from: str, say: Progress
) -> Meta:
    """Write all files of a prepared folder, holding no more than a batch of documents in memory."""
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab <= 65535 else "uint32"
    end, count, total, owed, told = np.array([tokenizer.end], dtype), 0, 0, 0, 0
    with _Writer(folder, "train") as train, _Writer(folder, "validation") as held_out:
        for count, ids in enumerate(tokenizer.encode_all(texts), start=1):
            # The share of all documents so far, so that documents too short to give a token alone count as well.
            total, before = total + len(ids), owed
            owed = int(total * validation)
            cut = len(ids) - (owed - before)
            for writer, part in ((train, ids[:cut]), (held_out, ids[cut:])):
                if len(part):
                    writer.append(np.append(part.astype(dtype), end))
            if train.tokens >> 23 > told:
                told = train.tokens >> 23
                say(f"tokenised {count:,} documents, {train.tokens / 1e6:.0f} million tokens")
    text = tokenizer.to_json().encode()
    (folder / "tokenizer.json").write_bytes(text)
    meta = Meta(
        format=FORMAT,
        dtype=dtype,
        shard=SHARD,
        documents=count,
        train=train.tokens,
        validation=held_out.tokens,
        tokenizer=hashlib.sha256(text).hexdigest(),
        fingerprint=made_from,
    )
    (folder / "meta.json").write_text(meta.model_dump_json(indent=1), encoding="utf-8")
    return meta


class _Writer:
    """Appends ids to the shards of one split."""

    def __init__(self, folder: Path, split: Split) -> None:
        self.tokens = 0
        self._folder, self._split = folder, split
        self._file: BinaryIO | None = None

    def append(self, ids: Ids) -> None:
        while len(ids):
            shard, offset = divmod(self.tokens, SHARD)
            if self._file is None or not offset:
                self._close()
                self._file = _shard_file(self._folder, self._split, shard).open("wb")
            part, ids = ids[: SHARD - offset], ids[SHARD - offset :]
            self._file.write(part.astype(part.dtype.newbyteorder("<")).tobytes())
            self.tokens += len(part)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _shard_file(folder: Path, split: Split, number: int) -> Path:
    return folder / (f"{split}.{number}.bin" if number else f"{split}.bin")


def _dtype(meta: Meta) -> np.dtype[Any]:
    return np.dtype(meta.dtype).newbyteorder("<")


def _map(file: Path, dtype: np.dtype[Any], count: int) -> Ids:
    size = file.stat().st_size
    if size != count * dtype.itemsize:
        raise _corrupt(file.parent, f"{file.name} has {size} bytes, not {count * dtype.itemsize}")
    return np.memmap(file, dtype, mode="r", shape=(count,))


def _corrupt(folder: Path, what: str) -> CorruptDataset:
    return CorruptDataset(f"prepared data in {folder} is damaged: {what}; delete that folder and start again")


def _silent(message: str) -> None:
    del message
