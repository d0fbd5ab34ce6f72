"""Members' vectors in chunks, and their inner products in one pass, without temporaries of their size.

Distances between near vectors stay larger than their rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from planaria.common.tensors import all_finite
from planaria.exchange.robust.base import squared_distances

Vector = Tensor | Sequence[Tensor]
"""[d], or consecutive pieces of it anywhere in memory"""

CHUNK = 24 * 1024
"""numbers of each vector processed together; below 32,768, where torch splits sums among threads, so that results do
not depend on their number"""
BLOCK = 1024
"""numbers per small matrix product; those of a chunk are not split among threads either"""
_NEAR = 0.01
"""minimum squared distance of two vectors, as a share of that from the reference; below it, everything is computed in
fp64"""
BOUND = 10.0
"""median lengths; longer vectors are shortened to this length [chosen here]"""


def iter_chunks(vectors: Sequence[Vector], size: int = CHUNK) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (first coordinate, that part of each vector) in order; all vectors have equal pieces. Memory is shared."""
    first = 0
    for together in zip(*map(split_pieces, vectors), strict=True):
        for parts in zip(*(piece.split(size) for piece in together), strict=True):
            if len(parts[0]):
                yield first, list(parts)
                first += len(parts[0])


def split_pieces(vector: Vector) -> Sequence[Tensor]:
    """Return a vector's pieces."""
    return [vector] if isinstance(vector, Tensor) else vector


def zeros_like_vector(like: Vector) -> list[Tensor]:
    """Return a vector of zeros with the pieces of ``like``."""
    return [torch.zeros_like(piece) for piece in split_pieces(like)]


def as_blocks(buffer: Tensor, width: int) -> Tensor:
    """Return [k, n, 1,024]: the first ``width`` columns of ``buffer`` [n, whole blocks], zero-padded; shares memory."""
    padded = -(-width // BLOCK) * BLOCK
    buffer[:, width:padded] = 0.0
    return buffer[:, :padded].view(len(buffer), -1, BLOCK).transpose(0, 1)


def multiply_rows(matrix: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of MX, for M [m, n] and the ``rows`` [d] of n members."""
    buffer = torch.empty(len(rows), CHUNK, dtype=rows[0].dtype)
    torch.stack(list(rows), out=buffer[:, : len(rows[0])])
    cut = as_blocks(buffer, len(rows[0]))
    product = torch.bmm(matrix.to(cut.dtype).expand(len(cut), -1, -1), cut)
    return list(product.transpose(0, 1).reshape(len(matrix), -1)[:, : len(rows[0])])


class NotFinite(ValueError):
    """Raised if a vector has an infinite number or NaN."""


def products(vectors: Sequence[Vector], about: Vector | None = None, origin: bool = False) -> Tensor:
    """Return G [n + 1, n + 1], fp64: the inner products of x_j − r [n] and, last, of r.

    r is the first vector, about as far from honest ones as they are from each other; or ``about``, and then row r is
    zero; or zero with ``origin``. Within a block of 1,024 coordinates products have the vectors' precision ε (2⁻²⁴ for
    fp32), beyond it fp64: |ΔG_ij| ≤ 1,024 ε ‖x_i − r‖ ‖x_j − r‖ at worst, and a long vector affects only its own
    entries. If that does not separate vectors, for example if the first is Byzantine and far away, or on overflow, all
    is recomputed in fp64 with r = 0. Independent of the number of threads.

    :raises NotFinite: if a number is not finite.
    """
    count, first = len(vectors), about is None and not origin
    gram = _products_at(vectors, about, None, first)
    if not (_distinguishes(gram[1:, 1:], vectors[1:]) if first else _distinguishes(gram, vectors)):
        gram, first = _products_at(vectors, about, torch.float64, False), False
        if not all_finite(gram):
            raise NotFinite("a number is not finite")
    placed = torch.zeros(count + 1, count, dtype=gram.dtype)
    placed.diagonal().fill_(1.0)
    if first:  # x_0 − r is zero; its place holds r
        placed[0, 0], placed[count, 0] = 0.0, 1.0
    return placed @ gram @ placed.T


def _distinguishes(gram: Tensor, vectors: Sequence[Vector]) -> bool:
    """Return whether these inner products separate vectors by more than rounding, unless they are equal."""
    sizes, distances = gram.diagonal(), squared_distances(gram)
    near = distances < _NEAR * (sizes.unsqueeze(0) + sizes.unsqueeze(1))
    pairs = [(int(i), int(j)) for i, j in near.nonzero() if i < j]
    first_of = {j: i for i, j in reversed(pairs)}
    return all_finite(gram) and all(
        float(distances[i, j]) == 0.0 and (first_of[j] != i or _are_equal(vectors[i], vectors[j])) for i, j in pairs
    )


def _are_equal(vector: Vector, other: Vector) -> bool:
    return all(torch.equal(*parts) for _, parts in iter_chunks([vector, other]))


def _products_at(vectors: Sequence[Vector], about: Vector | None, precision: torch.dtype | None, first: bool) -> Tensor:
    """Return the inner products [n, n] of x_j − r; with r the ``first`` vector, that one stays unchanged."""
    count = len(vectors)
    total = torch.zeros(count, count, dtype=torch.float64)
    buffer: Tensor | None = None
    for _, parts in iter_chunks(vectors if about is None else [*vectors, about]):
        width, dtype = len(parts[0]), precision or parts[0].dtype
        if buffer is None:
            buffer = torch.empty(count, CHUNK, dtype=dtype)
        r = parts[0] if first else None if about is None else parts[count]
        for index, row in enumerate(buffer):
            if r is None or (first and index == 0):
                row[:width] = parts[index]
            else:
                torch.sub(parts[index].to(dtype), r.to(dtype), out=row[:width])
        cut = as_blocks(buffer, width)
        total += torch.bmm(cut, cut.transpose(1, 2)).double().sum(dim=0)
    return total


def shortening_factors(gram: Tensor) -> Tensor:
    """Return the factor of each vector [n] that shortens those above ``BOUND`` median lengths to that length, from G.

    Otherwise differences of inner products would be dominated by the longest vector's rounding error.
    """
    norms = (
        inner_products(gram, torch.ones(len(gram) - 1, dtype=gram.dtype), origin=True).diagonal().clamp(min=0.0).sqrt()
    )
    limit = BOUND * float(norms.median())
    return torch.where(norms > limit, limit / norms, torch.ones_like(norms))


def inner_products(gram: Tensor, shorter: Tensor, origin: bool) -> Tensor:
    """Return K [n, n], the inner products of s_j x_j about the ``origin``, or else about r; from G and s."""
    factors = torch.cat([torch.diag(shorter), (shorter if origin else shorter - 1.0).unsqueeze(1)], dim=1)
    return factors @ gram @ factors.T
