"""A whole tensor of a foreign folder taken apart into the parameters of a model. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.runtime.checkpoint.foreign.names import Shapes, Whole

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
