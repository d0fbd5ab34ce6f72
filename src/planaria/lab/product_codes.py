"""The hypergraph product: a quantum code from two classical ones, whose two kinds of checks commute by construction.

planaria uses it only to verify that its search for sparse parity checks is that of arXiv 2502.14372: a check of the
product weighs as much as a check and a shard of its factors together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.recovery.codes import gf2
from planaria.recovery.codes.sparse import MAX_DATA


@dataclass(frozen=True)
class ClassicalCode:
    """A classical code: m checks of n shards, each an integer whose bits are shards."""

    rows: tuple[int, ...]
    shards: int

    @property
    def transposed(self) -> ClassicalCode:
        """The code whose checks are this one's shards."""
        return ClassicalCode(tuple(gf2.transpose(self.rows, self.shards)), len(self.rows))

    @property
    def dimension(self) -> int:
        """k, by rank."""
        return self.shards - gf2.rank(self.rows)

    @property
    def distance(self) -> int:
        """d, over all words; 0 if zero is the only one.

        :raises UserError: if there are too many words to count.
        """
        words = gf2.kernel(self.rows, self.shards)
        if len(words) > MAX_DATA or self.shards > gf2.MAX_COLUMNS:
            raise UserError(
                f"a code of {self.shards} shards and 2^{len(words)} words: at most {gf2.MAX_COLUMNS} and 2^{MAX_DATA} "
                "are counted; use a smaller one"
            )
        return gf2.distance(words, self.shards)


class ProductFile(documents.Record):
    """A product code's file: N, K, D, and each check as the numbers of its qubits."""

    qubits: int
    logical: int
    distance: int
    x: tuple[tuple[int, ...], ...]
    z: tuple[tuple[int, ...], ...]


def hypergraph_product(first: ClassicalCode, second: ClassicalCode) -> tuple[list[int], list[int]]:
    """Return H_X = [H₁ ⊗ I | I ⊗ H₂ᵀ] and H_Z = [I ⊗ H₂ | H₁ᵀ ⊗ I], each row as bits of its N = n₁n₂ + m₁m₂ qubits.

    Shapes [m₁n₂, N] and [n₁m₂, N]. H_X H_Zᵀ = H₁ ⊗ H₂ᵀ + H₁ ⊗ H₂ᵀ = 0 for any factors. Source: J.-P. Tillich, G. Zémor,
    arXiv 0903.0566.
    """
    n1, n2, m1, m2 = first.shards, second.shards, len(first.rows), len(second.rows)
    left = [[a * n2 + b for b in range(n2)] for a in range(n1)]
    right = [[n1 * n2 + i * m2 + j for j in range(m2)] for i in range(m1)]
    of_first = [[a for a in range(n1) if row >> a & 1] for row in first.rows]
    of_second = [[b for b in range(n2) if row >> b & 1] for row in second.rows]
    x = [
        _row([left[a][b] for a in of_first[i]] + [right[i][j] for j in range(m2) if b in of_second[j]])
        for i in range(m1)
        for b in range(n2)
    ]
    z = [
        _row([left[a][b] for b in of_second[j]] + [right[i][j] for i in range(m1) if a in of_first[i]])
        for a in range(n1)
        for j in range(m2)
    ]
    return x, z


def parameters(first: ClassicalCode, second: ClassicalCode) -> tuple[int, int, int]:
    """Return (N, K, D) of the product, by formula; D is 0 if K is.

    N = n₁n₂ + m₁m₂. K = k₁k₂ + k₁ᵀk₂ᵀ, where ᵀ is of the transposed code. D is the minimum of d₁ and d₂ if the first
    part of K is not 0, and of d₁ᵀ and d₂ᵀ if the second is not. With independent checks the second part is 0, so D =
    min(d₁, d₂). Source: J.-P. Tillich, G. Zémor, arXiv 0903.0566.

    :raises UserError: if a factor has too many words to count.
    """
    first_transposed, second_transposed = first.transposed, second.transposed
    pairs = [(first, second), (first_transposed, second_transposed)]
    terms = [a.dimension * b.dimension for a, b in pairs]
    distances = [d for term, pair in zip(terms, pairs, strict=True) if term for d in (c.distance for c in pair)]
    qubits = first.shards * second.shards + len(first.rows) * len(second.rows)
    return qubits, sum(terms), min(distances, default=0)


def product_file(first: ClassicalCode, second: ClassicalCode) -> ProductFile:
    """Return the product as a file.

    :raises UserError: as :func:`parameters`.
    """
    qubits, logical, distance = parameters(first, second)
    x, z = hypergraph_product(first, second)
    return ProductFile(qubits=qubits, logical=logical, distance=distance, x=_sets(x, qubits), z=_sets(z, qubits))


def _row(qubits: Sequence[int]) -> int:
    return sum(1 << qubit for qubit in qubits)


def _sets(rows: Sequence[int], qubits: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(n for n in range(qubits) if row >> n & 1) for row in rows)
