"""One value of several vectors by a robust rule, chunk by chunk.

Before a rule sees vectors, mixing may make them more alike: each becomes a mean of some, by a matrix M [m, n].
Afterwards the same inner products give the coefficients that other rules would have found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from planaria.common.compiled import COMPILED
from planaria.exchange.robust.base import CoordinateRule, GramRule, Rule, nearest
from planaria.exchange.robust.products import CHUNK, Vector, blank, bounded, chunks, framed, mixed, pieces, products

Mix = Literal["none", "nnm", "bucketing"]
BUCKET = 2
"""s: vectors in a bucket; so many liars are in at most as many buckets, of s times fewer"""


LONG = 128 * 1024
"""numbers of each vector that compiled code is given at once: what it makes of them is still at hand when that is put
in its place"""
_LITTLE = 0.5
"""of what a member counts in a mean"""


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


def mixing(mix: Mix, gram: Tensor, liars: int, draw: int) -> Tensor:
    """M for the inner products K [n, n]: row i says of which members the i-th vector becomes the mean.

    nnm: of its n − f nearest (arXiv 2302.01772). bucketing: of random buckets of two (arXiv 2006.09365), the same at
    all who know ``draw``; the last may be smaller.
    """
    n = len(gram)
    if mix == "none":
        return torch.eye(n, dtype=gram.dtype)
    if mix == "nnm":
        near = nearest(gram, n - liars)
        return torch.zeros(n, n, dtype=gram.dtype).scatter_(1, near, 1.0 / near.shape[1])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(draw))
    made = torch.zeros(-(-n // BUCKET), n, dtype=gram.dtype)
    for row, members in enumerate(torch.split(order, BUCKET)):
        made[row, members] = 1.0 / len(members)
    return made


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


def suspects(counted: Sequence[float], liars: int) -> list[int]:
    """Places, in order, of those that count less than half of their share in a mean: of as many as may lie at most."""
    little = [place for place, value in enumerate(counted) if value < _LITTLE / len(counted)]
    return sorted(sorted(little, key=lambda place: (counted[place], place))[:liars])


def rivals(rules: Mapping[str, Rule], own: GramRule, gram: Tensor, mix: Mix, draw: int) -> dict[str, Tensor]:
    """c [n] by each of the ``rules`` in place of the run's ``own``, from G of a round with ``mix`` and ``draw``.

    Without those of which inner products tell nothing: that look at each coordinate by itself; that go on from a last
    value, if the run's does not, or by directions from the origin, if the run's does, as its G is about that value; for
    which members are too few; and its own.
    """
    found = {}
    for name, rule in rules.items():
        told = isinstance(rule, GramRule) and rule.continues <= own.continues and not (rule.origin and own.continues)
        if not told or type(rule) is type(own):
            continue
        assert isinstance(rule, GramRule)
        try:
            found[name] = coefficients(rule, gram, mix, draw, own.continues)
        except ValueError:  # too few
            continue
    return found
