"""The file of a stage: its packed state (:mod:`planaria.models.packing`), with a label in the header."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from planaria.common import atomic, digests, documents
from planaria.common.documents import former_names
from planaria.common.errors import UserError
from planaria.models.packing import (
    DIGEST_BYTES,
    TYPES,
    PackedTensor,
    PackingError,
    Spec,
    digest,
    digest_table,
    entries,
    start_digest,
    state_of,
    summary,
    weights_digest,
)
from planaria.models.state import StageState
from planaria.runtime.checkpoint import tensor_file

_HASH_THREADS = 2
"""threads that compute digests while the writer writes"""
Digests = tuple[str, str]
"""digests of a whole file (:func:`_file_digest`) and of the weights in it"""
Seen = Callable[[memoryview], object]
Read = TypeVar("Read", Tensor, int)
READ_THREADS = 4
"""threads that read tensors and check their digests"""


class StageLabel(BaseModel):
    """Identity of a stage's file, in its header."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    _former = former_names(index="place")
    version: Literal[2] = 2
    stage: int
    step: int
    index: int | None = None
    """index of the node in its stage, or None in older versions"""
    part: str = ""
    """part of the run that retained a snapshot in memory; "" in checkpoints"""
    generation: int = -1
    """generation that retained a snapshot in memory; -1 in checkpoints"""

    def require(self, expected: StageLabel, path: Path) -> None:
        """Raise UserError for the first field that differs from the expected label."""
        for name in ("stage", "step", "index", "part", "generation"):
            actual, wanted = getattr(self, name), getattr(expected, name)
            if actual != wanted and actual is not None:
                raise UserError(f"{path} holds {name} {actual}, not {wanted}; choose another checkpoint")


_KINDS = ("weights", "generators", "outer")
"""kinds of entries besides the optimizer's tensors, each named ``KIND.NAME``"""


class _FirstLabel(StageLabel):
    """The label of version 1, which also holds numbers, and one clock for all parameters."""

    version: Literal[1]  # type: ignore[assignment]
    updates: Annotated[int, Field(ge=0)]
    lr_scale: float
    grad_norm: float | None
    clipped_norm: float | None

    def state(self, tensors: dict[str, Tensor]) -> StageState:
        """Return the state in such a file."""
        kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("weights", "outer")}
        moments: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            if kind in kinds:
                kinds[kind][name] = tensor
            elif name:
                moments.setdefault(name, {})[kind] = tensor
        weights, outer = kinds.values()
        generators = {"cpu": tensors["rng"]} if "rng" in tensors else {}
        clocks = dict.fromkeys(moments, self.updates)
        return StageState(weights, moments, clocks, self.lr_scale, self.grad_norm, self.clipped_norm, generators, outer)


_LABEL: TypeAdapter[StageLabel | _FirstLabel] = TypeAdapter(
    Annotated[StageLabel | _FirstLabel, Field(discriminator="version")]
)


def stage_file(folder: Path, stage: int, index: int = 0) -> Path:
    """Return the path of ``stage`` in a checkpoint folder, or of the outer state of another of its nodes."""
    return folder / (f"stage-{stage:04d}-at-{index}.safetensors" if index else f"stage-{stage:04d}.safetensors")


class Written(NamedTuple):
    bytes: int
    sha256: str
    """see :func:`_file_digest`"""
    weights: str = ""
    """digest of the weights alone (``packing.weights_digest``)"""


def write_stage(folder: Path, stage: int, step: int, state: StageState, index: int = 0) -> Written:
    """Write a stage durably into ``folder``, which is created if missing; ``index`` is the node's index in the stage.

    :raises OSError: as :func:`write_labelled`.
    """
    return write_labelled(folder, StageLabel(stage=stage, step=step, index=index), state)


def write_labelled(folder: Path, label: StageLabel, state: StageState) -> Written:
    """Write a state durably into ``folder`` under its ``label``.

    :raises OSError: if the disk is full or the folder not writable; its text is a complete message, and no file
        appears.
    """
    path = stage_file(folder, label.stage, label.index or 0)
    return _write_durably(path, lambda file: _write(file, state, _header_entry(label)))


def stream_weights(
    folder: Path, stage: int, step: int, shapes: Mapping[str, Sequence[int]], read: Callable[[str], Tensor]
) -> Written:
    """Write fp32 weights as :func:`write_stage`, with one tensor from ``read`` in memory at a time."""
    tables = entries(StageState({}))
    specs: dict[str, Spec] = {f"weights.{name}": (torch.float32, shape) for name, shape in shapes.items()}
    specs |= {name: (tensor.dtype, tensor.shape) for name, tensor in tables.items()}
    entry_digests: dict[str, bytes] = {}

    def give(name: str) -> Tensor:
        if name == "sha256":  # the narrowest type is last
            return digest_table(entry_digests[key] for key in sorted(entry_digests))
        tensor = tables[name] if name in tables else read(name.removeprefix("weights."))
        entry_digests[name] = digest(name, tensor)
        return tensor

    def write(file: BinaryIO) -> Digests:
        table = {"sha256": (torch.uint8, (len(specs), DIGEST_BYTES))}
        label = StageLabel(stage=stage, step=step, index=0)
        head = tensor_file.write(file, specs | table, give, _header_entry(label))
        return _file_digest(head, give("sha256")), weights_digest(entry_digests)

    return _write_durably(stage_file(folder, stage), write)


def _header_entry(label: StageLabel) -> dict[str, str]:
    """Return the header's entry; only snapshots in memory have a part and a generation."""
    return {"planaria": label.model_dump_json(exclude=None if label.part else {"part", "generation"})}


def _write_durably(path: Path, write: Callable[[BinaryIO], Digests]) -> Written:
    """Create a file with ``write``, which returns its digests; it appears after it is on disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replace_atomically(path) as unfinished, unfinished.open("wb") as file:
            file_digests = write(file)
            file.flush()
            os.fsync(file.fileno())
            return Written(os.fstat(file.fileno()).st_size, *file_digests)
    except OSError as error:
        raise OSError(atomic.write_error(path, error)) from None


def _write(file: BinaryIO, state: StageState, metadata: Mapping[str, str]) -> Digests:
    """Write a state and return its digests, which are computed while the disk is busy and written last."""
    named = entries(state)
    specs: dict[str, Spec] = {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}
    specs["sha256"] = (torch.uint8, (len(named), DIGEST_BYTES))
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        rows = {name: threads.submit(digest, name, named[name]) for name in sorted(named)}

        def read(name: str) -> Tensor:
            if name != "sha256":
                return named[name]
            file.flush()
            os.fsync(file.fileno())  # overlaps with the last digests
            return digest_table(row.result() for row in rows.values())

        head = tensor_file.write(file, specs, read, metadata)
    row_digests = {name: row.result() for name, row in rows.items()}
    return _file_digest(head, digest_table(row_digests.values())), weights_digest(row_digests)


def _file_digest(head: bytes, table: Tensor) -> str:
    """Return the digest of a whole file: SHA-256 (hex) of its start and of its tensors' digests.

    Each byte is hashed once, by several threads. An older planaria stored the digest of all bytes.
    """
    return hashlib.sha256(head + table.numpy().tobytes()).hexdigest()


def refuse_link(path: Path) -> None:
    """Raise UserError if a file of a checkpoint is a symbolic link."""
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link; put the file itself there, or choose another checkpoint")


def _require_plain(path: Path) -> None:
    """Raise UserError if the file is missing or a symbolic link."""
    refuse_link(path)
    if not path.is_file():
        raise UserError(f"{path}: missing; choose another checkpoint of this run")


def require_stage(folder: Path, stage: int, step: int, sha256: str, index: int = 0) -> None:
    """Read a whole file; UserError if it does not match this digest, or its own ones."""
    path = stage_file(folder, stage, index)
    if sha256:
        _require_root(path, sha256)
    held = read_contents(folder, stage, step, index)
    with _open_labelled(folder, held.label) as (file, _), ThreadPoolExecutor(READ_THREADS) as threads:
        deque(threads.map(lambda key: _read_checked(held, file, key, file.scan), held.entries), maxlen=0)


def _require_root(path: Path, sha256: str) -> None:
    """Raise UserError if this is neither the file's :func:`_file_digest`, which covers its tensors' digests, nor the
    digest of all its bytes.
    """
    _require_plain(path)
    with suppress(PackingError, OSError), tensor_file.open_file(path) as file:
        if "sha256" in file.header.specs and _file_digest(file.head, file.tensor("sha256")) == sha256:
            return
    digests.require_file(path, [sha256], "choose another checkpoint of this run")


def read_stage(folder: Path, stage: int, step: int, sha256: str = "", index: int = 0) -> StageState:
    """Return the stage of :func:`write_stage`, checked against the digest if given.

    :raises UserError: if the file is missing, damaged, changed, of another version, or has another label.
    """
    return read_labelled(folder, StageLabel(stage=stage, step=step, index=index), sha256)


def read_labelled(folder: Path, expected: StageLabel, sha256: str = "") -> StageState:
    """Return the state of :func:`write_labelled`; UserError as in :func:`read_stage`."""
    if sha256:
        _require_root(stage_file(folder, expected.stage, expected.index or 0), sha256)
    with _open_labelled(folder, expected) as (file, label):
        tensors = {key: file.tensor(key) for key in file.header.specs}
        return label.state(tensors) if isinstance(label, _FirstLabel) else state_of(tensors)


@dataclass(frozen=True)
class StageContents:
    """Entries of a stage's file without its tensors: type, shape and digest of each, and the numbers."""

    path: Path
    label: StageLabel
    """the file's label, as expected"""
    digested: bool
    """whether it has digests of its entries; version 1 has none"""
    entries: Mapping[str, PackedTensor]
    clocks: Mapping[str, int]
    lr_scale: float
    scales: Mapping[str, float]
    norms: tuple[float | None, float | None]

    @property
    def stage(self) -> int:
        return self.label.stage

    @property
    def index(self) -> int:
        return self.label.index or 0

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of a kind of entries: weights, generators, outer, or one of :attr:`state`."""
        return sorted(key.partition(".")[2] for key in self.entries if key.partition(".")[0] == kind)

    @property
    def state(self) -> list[str]:
        """Sorted names of the optimizer's tensors of a parameter."""
        return sorted({key.partition(".")[0] for key in self.entries if "." in key} - {*_KINDS})

    @property
    def generators(self) -> dict[str, str]:
        """Device type → the entry of its generator."""
        first = {"cpu": "rng"} if "rng" in self.entries else {}
        return first | {kind: f"generators.{kind}" for kind in self.names("generators")}


def read_contents(folder: Path, stage: int, step: int, index: int = 0) -> StageContents:
    """Read the contents of a stage's file; UserError as in :func:`read_stage`."""
    expected = StageLabel(stage=stage, step=step, index=index)
    with _open_labelled(folder, expected) as (file, label):
        path = stage_file(folder, stage, index)
        specs = {key: (TYPES[dtype], tuple(shape)) for key, (dtype, shape) in file.header.specs.items()}
        if not isinstance(label, _FirstLabel):
            return StageContents(path, expected, True, *summary(specs, file.tensor))
        packed = {key: PackedTensor(*spec) for key, spec in specs.items()}
        named = (key.partition(".") for key in specs)
        clocks = {name: label.updates for kind, _, name in named if name and kind not in _KINDS}
        norms = (label.grad_norm, label.clipped_norm)
        return StageContents(path, expected, False, packed, clocks, label.lr_scale, {}, norms)


@contextmanager
def checked_reader(held: StageContents) -> Iterator[Callable[[str], Tensor]]:
    """Yield a thread-safe reader of entries, checked against their digests; UserError as in :func:`read_stage`."""
    with _open_labelled(held.path.parent, held.label) as (file, _):
        yield lambda key: _read_checked(held, file, key, file.tensor)


def _read_checked(
    held: StageContents, file: tensor_file.TensorFile, key: str, read: Callable[[str, Seen], Read]
) -> Read:
    """Return an entry from ``read`` after checking its digest; UserError as in :func:`read_stage`."""
    hasher = start_digest(key, *file.header.specs[key])
    with _user_errors(held.path):  # names this file, since others may be open
        content = read(key, hasher.update if held.digested else lambda piece: None)
    if held.digested and hasher.digest() != held.entries[key].sha256:
        raise UserError(
            f"{held.path}: {key} has changed since it was written (SHA-256 mismatch); "
            "choose another checkpoint of this run"
        )
    return content


@contextmanager
def _open_labelled(folder: Path, expected: StageLabel) -> Iterator[tuple[tensor_file.TensorFile, StageLabel]]:
    """Open the file of this label; UserError if its header differs. All readers of stages use it."""
    path = stage_file(folder, expected.stage, expected.index or 0)
    _require_plain(path)
    with _user_errors(path), tensor_file.open_file(path) as file:
        label = _LABEL.validate_json(file.header.metadata.get("planaria", "{}"))
        label.require(expected, path)
        yield file, label


@contextmanager
def _user_errors(path: Path) -> Iterator[None]:
    """Convert errors of a file to a one-line UserError that names it."""
    try:
        yield
    except (ValidationError, PackingError, OSError) as error:
        reason = documents.first_error(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
        raise UserError(f"{path}: damaged or of another version ({reason}); choose another checkpoint") from None
