"""Foreign folders of every format: their plain files, their tensors as parameters of a model, and optimizer steps.

What no other program's folder has a place for is in a file beside it, ``planaria.json`` (:class:`Note`).
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
from planaria.runtime.checkpoint.foreign.names import Shapes, Whole
from planaria.runtime.checkpoint.loading import Atom

WEIGHTS = "weights"
KINDS = (WEIGHTS, *adamw.KEYS)
NOTE = "planaria.json"
_FREE = ("init_std", *CUT)
"""what a model may say otherwise than the note: no trained number depends on it"""
Sizes = Sequence[int]


@dataclass(frozen=True)
class Marks:
    """What a folder says of a tensor beside its numbers."""

    pieces: int | tuple[int, ...] | None = None
    """it is this many equal pieces, or pieces of these sizes, one after another along dimension 0"""
    vocabulary: bool = False
    """its rows are the vocabulary's, maybe with filling"""
    rows: int | None = None
    """of them, how many are tokens'"""


PLAIN = Marks()


Fit = Callable[[Sizes, Marks, str], None]
"""(shape, marks, file) of a tensor, before its numbers are read; UserError when it is not the one that is wanted"""


class Foreign(Protocol):
    """A folder of another program, of which only names, sizes and steps have been read."""

    kinds: Mapping[str, frozenset[str]]
    """parameter → those of :data:`KINDS` that are there"""
    clocks: Mapping[str, int]
    """parameter → updates that its moments have seen"""
    step: int | None
    """of the run, where the folder says it"""
    samples: int | None
    """that trained it, likewise"""
    left: tuple[str, ...]
    """what is in the folder, but not in a checkpoint of planaria"""

    def read(self, name: str, kind: str, fit: Fit) -> Tensor:
        """A whole tensor, on the CPU; UserError when it is missing or damaged."""


def require_moments(place: Path, kinds: Mapping[str, frozenset[str]], clocks: Mapping[str, int]) -> bool:
    """Are there moments? Of all parameters or of none, both and with a step, or they would begin anew unasked.

    :raises UserError: naming the first parameter that lacks something.
    """
    some = any(held & set(adamw.KEYS) for held in kinds.values())
    for name, held in sorted(kinds.items()):
        if WEIGHTS not in held:
            raise UserError(f"{place}: the weights of {name} are missing, though it has {min(held)}; bring them back")
        if some and (lacking := [kind for kind in adamw.KEYS if kind not in held]):
            raise UserError(f"{place}: {lacking[0]} of {name} is missing, though others have theirs; bring it back")
        if some and name not in clocks:
            raise UserError(
                f"{place}: no step of {name}, neither in its state nor in a group of parameters; bring it back"
            )
    return some


def clock(value: Any, place: str) -> int:
    """A number of updates, which optimizers keep as a number or as a tensor of one; UserError when it is neither."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
    if type(number) not in (int, float) or not math.isfinite(number) or number < 0 or number != int(number):
        raise UserError(f"{place}: a step that is no number of updates; bring it back")
    return int(number)


def step_tensor(updates: int) -> Tensor:
    """A step as torch's AdamW keeps it, a number in fp32; in fp64 where it would not be exact."""
    single = torch.tensor(float(updates), dtype=torch.float32)
    return single if single.item() == updates else torch.tensor(float(updates), dtype=torch.float64)


def uncovered(error: BaseException) -> BaseException:
    """The error of the disk that torch's writer of archives covers with one of its own; else the error itself."""
    return error.__context__ if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError) else error


def clocks_by_group(groups: Iterable[tuple[Any, int]], names: Iterable[str], place: str) -> dict[str, int]:
    """Steps that optimizers keep for groups of parameters: (the group's parameters, its step) → parameter → step.

    :raises UserError: when steps differ and groups do not name their parameters.
    """
    given, known = list(groups), set(names)
    if len({step for _, step in given}) == 1:
        return dict.fromkeys(known, given[0][1])
    found: dict[str, int] = {}
    for parameters, step in given:
        if not isinstance(parameters, list | tuple) or not known.issuperset(map(str, parameters)):
            raise UserError(f"{place}: groups with unequal steps do not say whose they are; give steps by parameter")
        found |= dict.fromkeys(map(str, parameters), step)
    return found


def split(whole: Tensor, sizes: Sizes, slices: int) -> list[Tensor]:
    """Parts of a fused tensor, which is ``slices`` equal slices, each with an equal share of every part.

    [Σ sizes, …] → [size, …] for each. Slices are cut into pieces first, which then are joined part by part (Universal
    Checkpointing, arXiv 2406.18820, section 3.3: fragments with sub-parameters). One slice: the parts lie one after
    another. As many as there are key-value heads: queries, key and value of one after those of another. As many as
    ranks: what a concatenation of tensor-parallel slices left.
    """
    shares = [size // slices for size in sizes]
    each = whole.reshape(slices, sum(shares), *whole.shape[1:])
    return [part.reshape(-1, *whole.shape[1:]) for part in torch.split(each, shares, dim=1)]


def require_fit(whole: Whole, shape: Sizes, marks: Marks, model: Shapes, place: str) -> None:
    """Can a tensor of this ``shape``, with these ``marks``, be the ``whole``'s parts?

    :raises UserError: naming it, both shapes and its file.
    """
    wanted = [model[part] for part in whole.parts]
    rows, rest = sum(one[0] for one in wanted), wanted[0][1:]
    filled = _cut_off(whole, marks, rows)
    if not shape or tuple(shape[1:]) != rest or (shape[0] < rows if filled else shape[0] != rows):
        what = "" if whole.parts == (whole.name,) else f" for {', '.join(whole.parts)}"
        more = f" ({shape[0]} rows for {rows} tokens)" if marks.vocabulary or whole.padded else ""
        raise UserError(f"{place}: {whole.name} has shape {list(shape)}, not {[rows, *rest]}{what}{more}")
    _require_declared(whole, [one[0] for one in wanted], marks, place)


def _cut_off(whole: Whole, marks: Marks, rows: int) -> bool:
    """May rows beyond the model's be dropped? The map says so, or the folder counts as many tokens as the model."""
    return len(whole.parts) == 1 and (whole.padded or (marks.vocabulary and marks.rows == rows))


def _require_declared(whole: Whole, sizes: Sizes, marks: Marks, place: str) -> None:
    """:raises UserError: when folder and map do not agree on the pieces of a tensor, or neither tells their order."""
    if marks.pieces is not None:
        told = marks.pieces if isinstance(marks.pieces, tuple) else (sum(sizes) // marks.pieces,) * marks.pieces
        if tuple(sizes) != told or whole.slices not in (None, 1):
            raise UserError(
                f"{place}: {whole.name} is declared as pieces of {list(told)} rows, one after another, and taken for "
                f"{list(sizes)} of {', '.join(whole.parts)} in {whole.slices or 1} slices; correct --names"
            )
    elif len(whole.parts) > 1 and whole.slices is None:
        raise UserError(
            f"{place}: {whole.name} does not say in which order its parts lie; give slices with --names: 1 where they "
            "lie one after another, more where each of so many slices has a share of all"
        )
    if uneven := [size for size in sizes if size % (whole.slices or 1)]:
        raise UserError(f"{place}: {whole.name}: {uneven[0]} rows do not divide into slices = {whole.slices}")


def apart(tensor: Tensor, whole: Whole, model: Shapes) -> dict[str, Tensor]:
    """The parameters that a fitting tensor holds (:func:`require_fit`), in fp32, with memory of their own."""
    sizes = [model[part][0] for part in whole.parts]
    found = split(tensor[: sum(sizes)], sizes, whole.slices or 1)
    return {part: one.to(torch.float32).contiguous() for part, one in zip(whole.parts, found, strict=True)}


def require_equal(first: Tensor, other: Tensor, what: str) -> None:
    """:raises UserError: when two copies that must be equal are not; the largest difference is told."""
    if first.shape != other.shape:
        raise UserError(f"{what} differ: {list(first.shape)} and {list(other.shape)}")
    if not torch.equal(first, other):
        apart = float((first.double() - other.double()).abs().nan_to_num(math.inf).max())
        raise UserError(f"{what} differ, by {apart:g} at most, and must be equal")


class Note(documents.Record):
    """Step, data order and learning-rate scales of the run that a folder came out of."""

    version: Literal[1] = 1
    step: Natural
    samples: Natural
    """that trained it"""
    model: ModelConfig
    scales: dict[str, float] = Field(default_factory=dict)
    """of parameters whose learning rate has another scale than 1"""
    sums: dict[str, str] = Field(default_factory=dict)
    """what is known of each tensor: kind and parameter → SHA-256 with the clock"""


@dataclass(frozen=True)
class Summed(Atom):
    """A parameter that notes what is read of it."""

    sums: dict[str, str] = field(default_factory=dict)

    def read(self, kind: str) -> Tensor:
        tensor = super().read(kind)
        self.sums[f"{kind} of {self.name}"] = summed(tensor, kind, self.name, self.clock)
        return tensor


def summed(tensor: Tensor, kind: str, name: str, clock: int | None) -> str:
    """SHA-256 (hex) of a tensor with its name and clock."""
    return digest(f"{kind} of {name} after {clock}", tensor.contiguous()).hex()


def leave_note(folder: Path, note: Note) -> None:
    """Write the note beside what was written."""
    (folder / NOTE).write_text(documents.sealed(note), encoding="utf-8")


def find_note(folder: Path, model: ModelConfig) -> Note | None:
    """The note in a folder, if planaria wrote it.

    :raises UserError: when it was edited, or is of a model that computes something else than ``model``.
    """
    if not (folder / NOTE).exists():
        return None
    mend = "remove it if another program has written the folder since"
    note = documents.unsealed(inside(folder, NOTE), Note, mend=mend)
    for name in ModelConfig.model_fields:
        if name not in _FREE and getattr(note.model, name) != getattr(model, name):
            raise UserError(
                f"{folder / NOTE}: of a model with {name} = {getattr(note.model, name)}, the recipe has "
                f"{getattr(model, name)}; set model.{name} to the same"
            )
    return note


def refuse_link(path: Path) -> None:
    """:raises UserError: when ``path`` is a symbolic link, which may lead out of its folder."""
    if path.is_symlink():
        raise UserError(f"{path}: is a symbolic link; put what it points to in its place")


def inside(folder: Path, name: str) -> Path:
    """A plain file of a folder, by a name that a stranger gave it.

    :raises UserError: when the name leads out of the folder, or there is no such file but a link or something else.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise UserError(f"{folder}: names a file {name!r} that does not lie in it; nothing else is read")
    path = folder
    for part in parts:
        path /= part
        refuse_link(path)
    if not path.is_file():
        raise UserError(f"{path}: missing, or not a file; bring it back")
    return path
