"""Vectors of several members, visited together piece by piece, so that nothing of their size is made but the value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Vector = Tensor | Sequence[Tensor]
"""[d], or the same in pieces that follow each other, which may lie anywhere in memory"""

CHUNK = 24 * 1024
"""numbers of each vector that are looked at together. Fewer than 32,768, which torch shares out among threads: so that
what comes of them does not depend on how many there are."""
BLOCK = 1024
"""numbers that one small product of matrices is about; those of a chunk are not cut up among threads either"""


def chunks(vectors: Sequence[Vector], size: int = CHUNK) -> Iterator[tuple[int, list[Tensor]]]:
    """(first coordinate, that part of each vector), one after the other; all are in pieces alike. Shares memory."""
    first = 0
    for together in zip(*map(pieces, vectors), strict=True):
        for parts in zip(*(piece.split(size) for piece in together), strict=True):
            if len(parts[0]):
                yield first, list(parts)
                first += len(parts[0])


def pieces(vector: Vector) -> Sequence[Tensor]:
    """A vector's pieces."""
    return [vector] if isinstance(vector, Tensor) else vector


def blank(like: Vector) -> list[Tensor]:
    """A vector of zeros in pieces alike."""
    return [torch.zeros_like(piece) for piece in pieces(like)]


def blocks(held: Tensor, width: int) -> Tensor:
    """[k, n, 1,024]: the first ``width`` columns of ``held`` [n, whole blocks], filled up with zeros; shares memory."""
    padded = -(-width // BLOCK) * BLOCK
    held[:, width:padded] = 0.0
    return held[:, :padded].view(len(held), -1, BLOCK).transpose(0, 1)


def mixed(matrix: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """MX, row by row: for M [m, n] and the ``rows`` [d] of n members."""
    held = torch.empty(len(rows), CHUNK, dtype=rows[0].dtype)
    torch.stack(list(rows), out=held[:, : len(rows[0])])
    cut = blocks(held, len(rows[0]))
    found = torch.bmm(matrix.to(cut.dtype).expand(len(cut), -1, -1), cut)
    return list(found.transpose(0, 1).reshape(len(matrix), -1)[:, : len(rows[0])])
