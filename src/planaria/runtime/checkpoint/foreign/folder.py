"""Foreign folders of every format: plain files, tensors as parameters of a model, and optimizer steps.

Properties without a place in other programs' folders are in ``planaria.json`` (:class:`ExportNote`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.bounds import Natural
from planaria.config.schema import ModelConfig
from planaria.models.optimizers import adamw
from planaria.models.packing import digest
from planaria.runtime.checkpoint.cut import CUT
from planaria.runtime.checkpoint.foreign.names import ModelShapes, NamedTensor
from planaria.runtime.checkpoint.loading import ParameterState
from planaria.runtime.checkpoint.stage_file import refuse_link

WEIGHTS = "weights"
KINDS = (WEIGHTS, *adamw.KEYS)
NOTE = "planaria.json"
_FREE = ("init_std", "embedding_std", *CUT)
"""model settings that may differ from the note, since no trained number depends on them"""
Sizes = Sequence[int]


@dataclass(frozen=True)
class TensorMetadata:
    pieces: int | tuple[int, ...] | None = None
    """number of equal pieces, or sizes of pieces, along dimension 0"""
    vocabulary: bool = False
    """whether its rows are the vocabulary's, possibly padded"""
    rows: int | None = None
    """number of rows that are tokens"""


DEFAULT_METADATA = TensorMetadata()


Check = Callable[[Sizes, TensorMetadata, str], None]
"""(shape, marks, file) of a tensor before it is read; raises UserError if it does not match"""


class ForeignFolder(Protocol):
    """A folder of another program, of which only names, sizes and steps have been read."""

    kinds: Mapping[str, frozenset[str]]
    """parameter → its :data:`KINDS`"""
    clocks: Mapping[str, int]
    """parameter → updates of its moments"""
    step: int | None
    """step of the run, if known"""
    samples: int | None
    """used for training, if known"""
    left: tuple[str, ...]
    """contents of the folder that a checkpoint of planaria cannot hold"""

    def read(self, name: str, kind: str, check: Check) -> Tensor:
        """Read a whole tensor to the CPU; UserError if it is missing or damaged."""


def require_moments(path: Path, kinds: Mapping[str, frozenset[str]], clocks: Mapping[str, int]) -> bool:
    """Return whether there are moments. All parameters or none must have both moments and a step.

    :raises UserError: for the first parameter that lacks something.
    """
    some = any(present & set(adamw.KEYS) for present in kinds.values())
    for name, present in sorted(kinds.items()):
        if WEIGHTS not in present:
            raise UserError(f"{path}: the weights of {name} are missing, though it has {min(present)}; restore them")
        if some and (lacking := [kind for kind in adamw.KEYS if kind not in present]):
            raise UserError(f"{path}: {lacking[0]} of {name} is missing, though others have theirs; restore it")
        if some and name not in clocks:
            raise UserError(f"{path}: no step of {name}, neither in its state nor in a group of parameters; restore it")
    return some


def update_count(value: Any, location: str) -> int:
    """Return a number of updates from a number or a tensor of one; UserError if it is neither."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
    if type(number) not in (int, float) or not math.isfinite(number) or number < 0 or number != int(number):
        raise UserError(f"{location}: the step is not a number of updates; restore it")
    return int(number)


def step_tensor(updates: int) -> Tensor:
    """Return a step as torch's AdamW stores it, in fp32, or in fp64 if fp32 is not exact."""
    single = torch.tensor(float(updates), dtype=torch.float32)
    return single if single.item() == updates else torch.tensor(float(updates), dtype=torch.float64)


def underlying_error(error: BaseException) -> BaseException:
    """Return the disk's error inside an error of torch's archive writer; else the error itself."""
    return error.__context__ if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError) else error


def clocks_by_group(groups: Iterable[tuple[Any, int]], names: Iterable[str], location: str) -> dict[str, int]:
    """Convert steps of parameter groups to steps by parameter.

    :param groups: (the group's parameters, its step)
    :raises UserError: if steps differ and groups do not name their parameters.
    """
    listed, expected = list(groups), set(names)
    if len({step for _, step in listed}) == 1:
        return dict.fromkeys(expected, listed[0][1])
    clocks: dict[str, int] = {}
    for parameters, step in listed:
        if not isinstance(parameters, list | tuple) or not expected.issuperset(map(str, parameters)):
            raise UserError(
                f"{location}: groups with unequal steps do not name their parameters; save steps by parameter"
            )
        clocks |= dict.fromkeys(map(str, parameters), step)
    return clocks


def split(whole: Tensor, sizes: Sizes, slices: int) -> list[Tensor]:
    """Split a fused tensor, made of ``slices`` equal slices, each with an equal share of every part.

    [Σ sizes, …] → [size, …] for each. Slices are first cut into pieces, which are then joined by part (Universal
    Checkpointing, arXiv 2406.18820, section 3.3: fragments with sub-parameters). With one slice, the parts are
    consecutive. With as many slices as key-value heads, queries, keys and values are interleaved. With as many as
    ranks, tensor-parallel slices are concatenated.
    """
    shares = [size // slices for size in sizes]
    each = whole.reshape(slices, sum(shares), *whole.shape[1:])
    return [part.reshape(-1, *whole.shape[1:]) for part in torch.split(each, shares, dim=1)]


def require_match(whole: NamedTensor, shape: Sizes, marks: TensorMetadata, model: ModelShapes, location: str) -> None:
    """Raise UserError if a tensor of this ``shape`` with these ``marks`` cannot be the ``whole``'s parts.

    The message names the tensor, both shapes and the file.
    """
    wanted = [model[part] for part in whole.parts]
    rows, rest = sum(part_shape[0] for part_shape in wanted), wanted[0][1:]
    filled = _cut_off(whole, marks, rows)
    if not shape or tuple(shape[1:]) != rest or (shape[0] < rows if filled else shape[0] != rows):
        label = "" if whole.parts == (whole.name,) else f" for {', '.join(whole.parts)}"
        more = f" ({shape[0]} rows for {rows} tokens)" if marks.vocabulary or whole.padded else ""
        raise UserError(f"{location}: {whole.name} has shape {list(shape)}, not {[rows, *rest]}{label}{more}")
    _require_declared(whole, [part_shape[0] for part_shape in wanted], marks, location)


def _cut_off(whole: NamedTensor, marks: TensorMetadata, rows: int) -> bool:
    """Return whether to drop rows beyond the model's: by the map, or if the folder counts the model's tokens."""
    return len(whole.parts) == 1 and (whole.padded or (marks.vocabulary and marks.rows == rows))


def _require_declared(whole: NamedTensor, sizes: Sizes, marks: TensorMetadata, location: str) -> None:
    """Raise UserError if the folder and the map disagree on a tensor's pieces, or neither gives their order."""
    if marks.pieces is not None:
        declared = marks.pieces if isinstance(marks.pieces, tuple) else (sum(sizes) // marks.pieces,) * marks.pieces
        if tuple(sizes) != declared or whole.slices not in (None, 1):
            raise UserError(
                f"{location}: {whole.name} is declared as consecutive pieces of {list(declared)} rows, and mapped to "
                f"{list(sizes)} of {', '.join(whole.parts)} in {whole.slices or 1} slices; correct --names"
            )
    elif len(whole.parts) > 1 and whole.slices is None:
        raise UserError(
            f"{location}: {whole.name} has an unknown order of parts; use slices with --names: 1 for consecutive "
            "parts, or the number of slices with a share of each part"
        )
    if uneven := [size for size in sizes if size % (whole.slices or 1)]:
        raise UserError(f"{location}: {whole.name}: {uneven[0]} rows do not divide into slices = {whole.slices}")


def detached_parameters(tensor: Tensor, whole: NamedTensor, model: ModelShapes) -> dict[str, Tensor]:
    """Return the parameters in a matching tensor (:func:`require_match`), in fp32, with their own memory."""
    sizes = [model[part][0] for part in whole.parts]
    tensors = split(tensor[: sum(sizes)], sizes, whole.slices or 1)
    return {part: piece.to(torch.float32).contiguous() for part, piece in zip(whole.parts, tensors, strict=True)}


def require_equal(first: Tensor, second: Tensor, label: str) -> None:
    """Raise UserError, with the largest difference, if two copies differ."""
    if first.shape != second.shape:
        raise UserError(f"{label} differ: {list(first.shape)} and {list(second.shape)}")
    if not torch.equal(first, second):
        difference = float((first.double() - second.double()).abs().nan_to_num(math.inf).max())
        raise UserError(f"{label} differ by up to {difference:g}, and must be equal")


class ExportNote(documents.Record):
    """Step, data order and learning-rate scales of the exported run."""

    version: Literal[1] = 1
    step: Natural
    samples: Natural
    """used for training"""
    model: ModelConfig
    scales: dict[str, float] = Field(default_factory=dict)
    """scales of the parameters whose learning-rate scale is not 1"""
    sums: dict[str, str] = Field(default_factory=dict)
    """kind and parameter → SHA-256 of the tensor with its clock"""


@dataclass(frozen=True)
class DigestedParameter(ParameterState):
    """A parameter that records digests of its tensors when they are read."""

    sums: dict[str, str] = field(default_factory=dict)

    def read(self, kind: str) -> Tensor:
        tensor = super().read(kind)
        self.sums[f"{kind} of {self.name}"] = tensor_digest(tensor, kind, self.name, self.clock)
        return tensor


def tensor_digest(tensor: Tensor, kind: str, name: str, clock: int | None) -> str:
    """Return the SHA-256 (hex) of a tensor with its name and clock."""
    return digest(f"{kind} of {name} after {clock}", tensor.contiguous()).hex()


def leave_note(folder: Path, note: ExportNote) -> None:
    (folder / NOTE).write_text(documents.seal(note), encoding="utf-8")


def find_note(folder: Path, model: ModelConfig) -> ExportNote | None:
    """Return planaria's note in a folder, or None if there is none.

    :raises UserError: if it was edited, or describes another model than ``model``.
    """
    if not (folder / NOTE).exists():
        return None
    fix = "remove it if another program has written the folder since"
    note = documents.read_sealed(file_inside(folder, NOTE), ExportNote, fix=fix)
    for name in ModelConfig.model_fields:
        if name not in _FREE and getattr(note.model, name) != getattr(model, name):
            raise UserError(
                f"{folder / NOTE}: its model has {name} = {getattr(note.model, name)}, the recipe has "
                f"{getattr(model, name)}; set model.{name} to the same"
            )
    return note


def file_inside(folder: Path, name: str) -> Path:
    """Return a regular file of a folder, from an untrusted name.

    :raises UserError: if the name leads out of the folder, or is not a regular file.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise UserError(f"{folder}: names a file {name!r} outside of it, which is not read")
    path = folder
    for part in parts:
        path /= part
        refuse_link(path)
    if not path.is_file():
        raise UserError(f"{path}: missing, or not a file; restore it")
    return path
