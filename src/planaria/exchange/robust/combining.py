"""One value of several vectors by a robust rule, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.common.compiled import COMPILED
from planaria.exchange.robust.base import CoordinateRule, GramRule, Rule
from planaria.exchange.robust.chunks import CHUNK, Vector, blank, chunks, mixed, pieces
from planaria.exchange.robust.mixing import Mix, mixing
from planaria.exchange.robust.products import bounded, framed, products

LONG = 128 * 1024
"""numbers of each vector that compiled code is given at once: what it makes of them is still at hand when that is put
in its place"""


class Combined(NamedTuple):
    """What a rule has made of several vectors."""

    value: Tensor
    """[d]"""
    coefficients: Tensor | None = None
    """[n], fp64: value = Σ c_j x_j, plus (1 − Σ c_j) v of a rule that continues from v; of rules that look at each
    coordinate by itself none can be told"""
    gram: Tensor | None = None
    """G as of :func:`~planaria.exchange.robust.products.products`, where there are such"""


def combine(
    rule: Rule, vectors: Sequence[Vector], mix: Mix = "none", draw: int = 0, last: Vector | None = None
) -> Combined:
    """One value of ``vectors``, all of one dtype and on the CPU, in an order that all who combine them share.

    ``last``: what a rule that continues made of the round before; if not given, zero.

    :raises NotFinite: when a vector has a number that is not.
    :raises ValueError: when they are too few for the rule.
    """
    if isinstance(rule, CoordinateRule) and mix == "none":
        _enough(rule, len(vectors))
        return Combined(_visited(vectors, rule.combine, LONG if COMPILED else CHUNK))
    onward = isinstance(rule, GramRule) and rule.continues
    if onward and last is None:
        last = blank(vectors[0])
    gram = products(vectors, last if onward else None, isinstance(rule, GramRule) and rule.origin)
    if isinstance(rule, CoordinateRule):
        made, matrix = rule.combine, _mixed_by(rule, gram, mix, draw)
        return Combined(_visited(vectors, lambda rows: made(mixed(matrix, rows))))
    assert isinstance(rule, GramRule)
    c = coefficients(rule, gram, mix, draw, onward)
    return Combined(by_coefficients(vectors, c, last if onward else None), c, gram)


def by_coefficients(vectors: Sequence[Vector], c: Tensor, last: Vector | None) -> Tensor:
    """Σ c_j x_j [d], plus (1 − Σ c_j) v of a ``last`` value v, if there is one, for c [n]."""
    factors = [*c.tolist(), *([1.0 - float(c.sum())] if last is not None else [])]
    return _visited([*vectors, *([] if last is None else [last])], lambda rows: weighted(rows, factors))


def coefficients(rule: GramRule, gram: Tensor, mix: Mix, draw: int, about_last: bool) -> Tensor:
    """c [n] of vectors of which G is known, ``about_last``: relative to the last value of a rule that continues.

    :raises ValueError: when they are too few for the rule.
    """
    matrix = _mixed_by(rule, gram, mix, draw)
    shorter = torch.ones(len(gram) - 1, dtype=gram.dtype) if about_last else bounded(gram)
    seen = matrix @ framed(gram, shorter, rule.origin) @ matrix.T
    return matrix.T @ rule.coefficients(seen) * shorter


def _mixed_by(rule: Rule, gram: Tensor, mix: Mix, draw: int) -> Tensor:
    """Who is whose neighbour goes by true lengths: a bounded liar may be as near as an honest vector that is long."""
    lengths = torch.ones(len(gram) - 1, dtype=gram.dtype)
    matrix = mixing(mix, framed(gram, lengths, origin=False), rule.liars, draw)
    _enough(rule, len(matrix))
    return matrix


def weighted(rows: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Σ c_j x_j, a new tensor, added up in order; what counts nothing is not looked at."""
    total: Tensor | None = None
    for row, factor in zip(rows, factors, strict=True):
        if factor and total is None:
            total = row * factor
        elif factor and total is not None:
            total.add_(row, alpha=factor)
    return torch.zeros_like(rows[0]) if total is None else total


def _visited(vectors: Sequence[Vector], made: Callable[[list[Tensor]], Tensor], size: int = CHUNK) -> Tensor:
    like = pieces(vectors[0])
    value = torch.empty(sum(map(len, like)), dtype=like[0].dtype)
    for start, rows in chunks(vectors, size):
        value[start : start + len(rows[0])] = made(rows)
    return value


def _enough(rule: Rule, count: int) -> None:
    if count < rule.least():
        raise ValueError(f"{count} vectors are too few for {rule.liars} liars: give {rule.least()} or more")
