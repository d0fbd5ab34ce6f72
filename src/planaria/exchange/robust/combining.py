"""One value of several vectors by a robust rule, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.exchange.robust.base import CoordinateRule, GramRule, Rule
from planaria.exchange.robust.chunks import Vector, blank, chunks, mixed, pieces
from planaria.exchange.robust.mixing import Mix, mixing
from planaria.exchange.robust.products import NotFinite, bounded, framed, products


class Combined(NamedTuple):
    """What a rule has made of several vectors."""

    value: Tensor
    """[d]"""
    coefficients: Tensor | None
    """[n], fp64: value = Σ c_j x_j, plus (1 − Σ c_j) v of a rule that continues from v; of rules that look at each
    coordinate by itself none can be told"""


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
        return Combined(_visited(vectors, lambda rows: rule.combine(_finite(rows))), None)
    onward = isinstance(rule, GramRule) and rule.continues
    if onward and last is None:
        last = blank(vectors[0])
    origin = isinstance(rule, GramRule) and rule.origin
    gram = products(vectors, last if onward else None, origin)
    shorter = torch.ones(len(vectors), dtype=gram.dtype) if onward else bounded(gram)
    # Who is whose neighbour goes by true lengths: a bounded liar may be as near as an honest vector that is long.
    matrix = mixing(mix, framed(gram, torch.ones_like(shorter), origin=False), rule.liars, draw)
    _enough(rule, len(matrix))
    if isinstance(rule, CoordinateRule):
        made = rule.combine
        return Combined(_visited(vectors, lambda rows: made(mixed(matrix, rows))), None)
    assert isinstance(rule, GramRule)
    seen = matrix @ framed(gram, shorter, origin) @ matrix.T
    c = matrix.T @ rule.coefficients(seen) * shorter
    factors = [*c.tolist(), *([1.0 - float(c.sum())] if onward else [])]
    summed = [*vectors, last] if onward and last is not None else vectors
    return Combined(_visited(summed, lambda rows: weighted(rows, factors)), c)


def weighted(rows: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Σ c_j x_j, a new tensor, added up in order; what counts nothing is not looked at."""
    total: Tensor | None = None
    for row, factor in zip(rows, factors, strict=True):
        if factor and total is None:
            total = row * factor
        elif factor and total is not None:
            total.add_(row, alpha=factor)
    return torch.zeros_like(rows[0]) if total is None else total


def _visited(vectors: Sequence[Vector], made: Callable[[list[Tensor]], Tensor]) -> Tensor:
    like = pieces(vectors[0])
    value = torch.empty(sum(map(len, like)), dtype=like[0].dtype)
    for start, rows in chunks(vectors):
        value[start : start + len(rows[0])] = made(rows)
    return value


def _finite(rows: list[Tensor]) -> list[Tensor]:
    """The same. A number that is infinite, or none, makes a sum with zeros that is none, while the rows are at hand."""
    zeros = torch.zeros_like(rows[0])
    if not math.isfinite(sum(float(torch.dot(row, zeros)) for row in rows)):
        raise NotFinite("a number is not finite")
    return rows


def _enough(rule: Rule, count: int) -> None:
    if count < rule.least():
        raise ValueError(f"{count} vectors are too few for {rule.liars} liars: give {rule.least()} or more")
