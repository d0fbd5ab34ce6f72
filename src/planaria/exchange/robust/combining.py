"""One value of several vectors by a robust rule, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.exchange.robust.base import CoordinateRule, GramRule, Rule
from planaria.exchange.robust.mixing import Mix, mixing

_CHUNK = 1 << 15
"""numbers of each vector that are looked at together: with those of some dozen members they stay in a core's cache"""

BOUND = 10.0
"""median lengths; a longer vector counts as one of that length. [chosen here]"""


class Combined(NamedTuple):
    """What a rule has made of several vectors."""

    value: Tensor
    """[d]"""
    coefficients: Tensor | None
    """[n], fp64: value = Σ c_j x_j; of rules that look at each coordinate by itself none can be told"""


def combine(rule: Rule, vectors: Sequence[Tensor], mix: Mix = "none", draw: int = 0) -> Combined:
    """One value of ``vectors`` [d], all of one dtype, finite, in an order that all who combine them share.

    :raises ValueError: when they are too few for the rule.
    """
    value = torch.empty_like(vectors[0])
    identity = isinstance(rule, CoordinateRule) and mix == "none"
    gram, shorter = bounded(torch.zeros(0, 0) if identity else products(vectors))
    matrix = None if mix == "none" else mixing(mix, gram, rule.liars, draw)
    if (count := len(vectors) if matrix is None else len(matrix)) < rule.least():
        raise ValueError(f"{count} vectors are too few for {rule.liars} liars: give {rule.least()} or more")
    if isinstance(rule, GramRule):
        seen_as = torch.eye(len(vectors), dtype=gram.dtype) if matrix is None else matrix
        c = seen_as.T @ rule.coefficients(seen_as @ gram @ seen_as.T) * shorter
        for start, chunk in _chunks(vectors):
            value[start : start + chunk.shape[1]] = c.to(chunk.dtype) @ chunk
        return Combined(value, c)
    assert isinstance(rule, CoordinateRule)
    for start, chunk in _chunks(vectors):
        seen = chunk if matrix is None else matrix.to(chunk.dtype) @ chunk
        value[start : start + chunk.shape[1]] = rule.combine(seen)
    return Combined(value, None)


def products(vectors: Sequence[Tensor]) -> Tensor:
    """K = XXᵀ [n, n] in fp64, so that one long vector neither overflows nor blurs the others' entries."""
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for _, chunk in _chunks(vectors):
        wide = chunk.double()
        gram += wide @ wide.T
    return gram


def bounded(gram: Tensor) -> tuple[Tensor, Tensor]:
    """K as if vectors of more than ``BOUND`` times the median length had that length, and by how much each is shorter
    [n]. What follows from differences of K's entries would otherwise be the rounding of the longest."""
    norms = gram.diagonal().sqrt()
    most = BOUND * float(norms.median()) if len(norms) else 0.0
    shorter = torch.where(norms > most, most / norms, torch.ones_like(norms))
    return gram * shorter.unsqueeze(0) * shorter.unsqueeze(1), shorter


def _chunks(vectors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """(first coordinate, [n, up to so many]), one after the other."""
    for start in range(0, len(vectors[0]), _CHUNK):
        yield start, torch.stack([vector[start : start + _CHUNK] for vector in vectors])
