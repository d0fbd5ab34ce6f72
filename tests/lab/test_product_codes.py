"""The hypergraph product: commuting checks, and N, K and D against an enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.lab.product_codes import ClassicalCode, hypergraph_product, parameters, product_file
from planaria.recovery.codes import gf2
from planaria.recovery.codes.search import SearchTarget, anneal

SMALL = [(1, 2), (2, 2), (2, 3), (1, 3), (3, 3)]
"""checks and shards of a factor"""
REPEATED = ClassicalCode((0b011, 0b110), 3)
HAMMING = ClassicalCode((0b1010101, 0b1100110, 0b1111000), 7)


def commute(x: Sequence[int], z: Sequence[int]) -> bool:
    """Whether H_X H_Zᵀ = 0 over GF(2): checks of different kinds share an even number of qubits."""
    return all((one & other).bit_count() % 2 == 0 for one in x for other in z)


def factors() -> st.SearchStrategy[ClassicalCode]:
    """Factors, including dependent checks."""
    return st.sampled_from(SMALL).flatmap(
        lambda size: st.builds(
            ClassicalCode, st.tuples(*[st.integers(0, 2 ** size[1] - 1) for _ in range(size[0])]), st.just(size[1])
        )
    )


def tried(x: list[int], z: list[int], qubits: int) -> tuple[int, int]:
    """Return (K, D) by enumeration: logicals commute with one kind of checks and are no sum of the other's."""

    def sums(rows: list[int]) -> set[int]:
        found = {0}
        for row in rows:
            found |= {row ^ each for each in found}
        return found

    logicals = []
    for checks, free in ((x, sums(z)), (z, sums(x))):
        held = [w for w in range(1 << qubits) if all((w & check).bit_count() % 2 == 0 for check in checks)]
        logicals.append(len(held) // len(free))
        logicals.append(min((w.bit_count() for w in held if w not in free), default=0))
    k, dz, other, dx = logicals
    assert k == other
    return k.bit_length() - 1, min(dz, dx)


@settings(max_examples=40, deadline=None)
@given(factors(), factors())
def test_parameters_match_an_enumeration(first: ClassicalCode, second: ClassicalCode) -> None:
    x, z = hypergraph_product(first, second)
    n, k, d = parameters(first, second)
    assert commute(x, z) and (len(x), len(z)) == (len(first.rows) * second.shards, first.shards * len(second.rows))
    assert k == n - gf2.rank(x) - gf2.rank(z)
    if n <= 13:
        assert (k, d) == tried(x, z, n)


@settings(max_examples=50, deadline=None)
@given(factors(), factors())
def test_the_checks_match_the_formula(first: ClassicalCode, second: ClassicalCode) -> None:
    """H_X = [H₁ ⊗ I | I ⊗ H₂ᵀ], H_Z = [I ⊗ H₂ | H₁ᵀ ⊗ I], as lists of lists."""

    def kron(a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
        return [[s * t for s, t in product(row, other)] for row, other in product(a, b)]

    def eye(n: int) -> list[list[int]]:
        return [[int(i == j) for j in range(n)] for i in range(n)]

    h1, h2, t1, t2 = (dense(c).tolist() for c in (first, second, first.transposed, second.transposed))
    expected = [
        [left + right for left, right in zip(a, b, strict=True)]
        for a, b in (
            (kron(h1, eye(second.shards)), kron(eye(len(first.rows)), t2)),
            (kron(eye(first.shards), h2), kron(t1, eye(len(second.rows)))),
        )
    ]
    qubits = parameters(first, second)[0]
    found = [[[row >> n & 1 for n in range(qubits)] for row in rows] for rows in hypergraph_product(first, second)]
    assert found == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(REPEATED, REPEATED, (13, 1, 3)), (HAMMING, HAMMING, (58, 16, 3)), (HAMMING, REPEATED, (27, 4, 3))],
)
def test_known_products_have_known_parameters(
    first: ClassicalCode, second: ClassicalCode, expected: tuple[int, int, int]
) -> None:
    assert parameters(first, second) == expected


def test_a_check_weighs_as_much_as_its_factors_together() -> None:
    found = anneal(SearchTarget(12, 6, 3, 4, 2), seed=1, tries=3000).code
    factor = ClassicalCode(tuple(sum(1 << shard for shard in check) for check in found.checks), 12)
    made = product_file(factor, factor)
    assert (made.qubits, made.logical, made.distance) == (180, 36, 4)
    assert max(map(len, (*made.x, *made.z))) <= 4 + 2
    assert commute(*([sum(1 << q for q in row) for row in rows] for rows in (made.x, made.z)))


def test_too_many_words_are_refused() -> None:
    with pytest.raises(UserError, match=r"2\^19 words: at most 64 and 2\^16"):
        _ = ClassicalCode((1,), 20).distance


def test_other_libraries_agree() -> None:
    """bposd's product, and ldpc's ranks and distances, if installed (the extra ``css``)."""
    hgp = pytest.importorskip("bposd.hgp")
    mod2 = pytest.importorskip("ldpc.mod2")
    found = anneal(SearchTarget(12, 6, 3, 4, 2), seed=1, tries=3000).code
    rows = tuple(sum(1 << shard for shard in check) for check in found.checks)
    for first, second in ((ClassicalCode(rows, 12), HAMMING), (HAMMING, HAMMING), (REPEATED, HAMMING)):
        h1, h2 = dense(first), dense(second)
        theirs, made = hgp.hgp(h1, h2, compute_distance=True), product_file(first, second)
        assert (made.qubits, made.logical, made.distance) == (theirs.N, theirs.K, theirs.D)
        assert (mod2.rank(h1), mod2.compute_exact_code_distance(h1)) == (gf2.rank(first.rows), first.distance)
        for kind, other in ((made.x, theirs.hx), (made.z, theirs.hz)):
            assert [[int(q) for q in row.nonzero()[1]] for row in other] == [list(row) for row in kind]
            assert mod2.rank(other) == gf2.rank(sum(1 << q for q in row) for row in kind)


def dense(checks: ClassicalCode) -> np.ndarray:
    return np.array([[row >> n & 1 for n in range(checks.shards)] for row in checks.rows], np.uint8)
