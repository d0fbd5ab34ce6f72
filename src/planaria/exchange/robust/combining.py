"""Combine several vectors by a robust rule, chunk by chunk.

Mixing may first replace each vector by a mean of some, by a matrix M [m, n]. The same inner products also determine
the coefficients of other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from planaria.common.compiled import COMPILED
from planaria.exchange.robust.base import CoordinateRule, GramRule, RobustRule, nearest_members
from planaria.exchange.robust.products import (
    CHUNK,
    Vector,
    inner_products,
    iter_chunks,
    multiply_rows,
    products,
    shortening_factors,
    split_pieces,
    zeros_like_vector,
)

Mix = Literal["none", "nnm", "bucketing"]
BUCKET = 2
"""s: vectors in a bucket; f Byzantine members affect at most f buckets, of s times fewer"""


COMPILED_CHUNK = 128 * 1024
"""numbers of each vector per call of compiled code, so that the result is still cached when it is stored"""
_SUSPECT_SHARE = 0.5
"""a member is a suspect below this share of its weight in a mean"""


class RobustValue(NamedTuple):
    """The value of several vectors under a rule."""

    value: Tensor
    """[d]"""
    coefficients: Tensor | None = None
    """[n], fp64: value = Σ c_j x_j, plus (1 − Σ c_j) v if the rule continues from v, or None for coordinate rules"""
    gram: Tensor | None = None
    """G as in :func:`~planaria.exchange.robust.products.products`, if computed"""


def combine(
    rule: RobustRule, vectors: Sequence[Vector], mix: Mix = "none", draw: int = 0, last: Vector | None = None
) -> RobustValue:
    """Return one value of ``vectors``, all of one dtype and on the CPU, in the same order at all members.

    :param last: the previous round's value of an iterative rule; zero if None.
    :raises NotFinite: if a number is not finite.
    :raises ValueError: if there are too few vectors for the rule.
    """
    if isinstance(rule, CoordinateRule) and mix == "none":
        _require_members(rule, len(vectors))
        return RobustValue(_combine_chunks(vectors, rule.combine, COMPILED_CHUNK if COMPILED else CHUNK))
    iterative = isinstance(rule, GramRule) and rule.is_iterative
    if iterative and last is None:
        last = zeros_like_vector(vectors[0])
    gram = products(vectors, last if iterative else None, isinstance(rule, GramRule) and rule.origin)
    if isinstance(rule, CoordinateRule):
        combined, matrix = rule.combine, _mixing_matrix(rule, gram, mix, draw)
        return RobustValue(_combine_chunks(vectors, lambda rows: combined(multiply_rows(matrix, rows))))
    assert isinstance(rule, GramRule)
    c = coefficients(rule, gram, mix, draw, iterative)
    return RobustValue(weighted_sum(vectors, c, last if iterative else None), c, gram)


def weighted_sum(vectors: Sequence[Vector], c: Tensor, last: Vector | None) -> Tensor:
    """Return Σ c_j x_j [d] for c [n], plus (1 − Σ c_j) v with a ``last`` value v."""
    factors = [*c.tolist(), *([1.0 - float(c.sum())] if last is not None else [])]
    return _combine_chunks([*vectors, *([] if last is None else [last])], lambda rows: sum_rows(rows, factors))


def coefficients(rule: GramRule, gram: Tensor, mix: Mix, draw: int, about_last: bool) -> Tensor:
    """Return c [n] of vectors with known G, ``about_last``: relative to the last value of an iterative rule.

    :raises ValueError: if there are too few vectors for the rule.
    """
    matrix = _mixing_matrix(rule, gram, mix, draw)
    shorter = torch.ones(len(gram) - 1, dtype=gram.dtype) if about_last else shortening_factors(gram)
    seen = matrix @ inner_products(gram, shorter, rule.origin) @ matrix.T
    return matrix.T @ rule.coefficients(seen) * shorter


def _mixing_matrix(rule: RobustRule, gram: Tensor, mix: Mix, draw: int) -> Tensor:
    """Return the mixing matrix by true lengths, since a shortened vector may be as near as an honest long one."""
    lengths = torch.ones(len(gram) - 1, dtype=gram.dtype)
    matrix = mixing_matrix(mix, inner_products(gram, lengths, origin=False), rule.byzantine, draw)
    _require_members(rule, len(matrix))
    return matrix


def mixing_matrix(mix: Mix, gram: Tensor, byzantine: int, draw: int) -> Tensor:
    """Return M for inner products K [n, n]: row i averages the members whose mean replaces the i-th vector.

    nnm: its n − f nearest (arXiv 2302.01772). bucketing: random buckets of two (arXiv 2006.09365), derived from
    ``draw``; the last may be smaller.
    """
    n = len(gram)
    if mix == "none":
        return torch.eye(n, dtype=gram.dtype)
    if mix == "nnm":
        near = nearest_members(gram, n - byzantine)
        return torch.zeros(n, n, dtype=gram.dtype).scatter_(1, near, 1.0 / near.shape[1])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(draw))
    matrix = torch.zeros(-(-n // BUCKET), n, dtype=gram.dtype)
    for row, members in enumerate(torch.split(order, BUCKET)):
        matrix[row, members] = 1.0 / len(members)
    return matrix


def sum_rows(rows: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return Σ c_j x_j, a new tensor, summed in order; zero coefficients are skipped."""
    total: Tensor | None = None
    for row, factor in zip(rows, factors, strict=True):
        if factor and total is None:
            total = row * factor
        elif factor and total is not None:
            total.add_(row, alpha=factor)
    return torch.zeros_like(rows[0]) if total is None else total


def _combine_chunks(vectors: Sequence[Vector], combined: Callable[[list[Tensor]], Tensor], size: int = CHUNK) -> Tensor:
    like = split_pieces(vectors[0])
    out = torch.empty(sum(map(len, like)), dtype=like[0].dtype)
    for start, rows in iter_chunks(vectors, size):
        out[start : start + len(rows[0])] = combined(rows)
    return out


def _require_members(rule: RobustRule, count: int) -> None:
    if count < rule.min_members():
        raise ValueError(
            f"{count} vectors are too few for {rule.byzantine} Byzantine ones; at least {rule.min_members()} are needed"
        )


def low_weight_members(coefficients: Sequence[float], byzantine: int) -> list[int]:
    """Return the members, by index, with less than half of their weight in a mean: at most ``byzantine``, in order."""
    little = [index for index, weight in enumerate(coefficients) if weight < _SUSPECT_SHARE / len(coefficients)]
    return sorted(sorted(little, key=lambda index: (coefficients[index], index))[:byzantine])


def rival_coefficients(
    rules: Mapping[str, RobustRule], own: GramRule, gram: Tensor, mix: Mix, draw: int
) -> dict[str, Tensor]:
    """Return c [n] of each of ``rules`` except the run's ``own``, from G of a round with ``mix`` and ``draw``.

    Excludes rules without coefficients from G: coordinate rules; iterative rules, if the run's is not, and rules
    about the origin, if the run's is iterative, as G is about its last value; rules for which there are too few
    members.
    """
    rivals = {}
    for name, rule in rules.items():
        if not isinstance(rule, GramRule) or type(rule) is type(own):
            continue
        if rule.is_iterative > own.is_iterative or (rule.origin and own.is_iterative):
            continue
        try:
            rivals[name] = coefficients(rule, gram, mix, draw, own.is_iterative)
        except ValueError:  # too few members
            continue
    return rivals
