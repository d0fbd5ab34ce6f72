"""Rank, words, distance, weights and score of codes, against an independent enumeration."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.recovery.codes import gf2
from planaria.recovery.codes.search import SearchTarget, anneal, certificate, excess_weight, survival_score
from planaria.recovery.codes.sparse import weights
from support import plain_codes as plain

HAMMING = [[1, 0, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
EXTENDED = [[*row, 0] for row in HAMMING] + [[1] * 8]


def numbers(matrix: plain.Matrix) -> list[int]:
    return [sum(bit << n for n, bit in enumerate(row)) for row in matrix]


def matrices(most: int = 8) -> st.SearchStrategy[plain.Matrix]:
    return st.integers(1, most).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 1), min_size=n, max_size=n), min_size=1, max_size=6)
    )


@settings(max_examples=80, deadline=None)
@given(matrices())
def test_rank_kernel_and_distance_match_an_enumeration(matrix: plain.Matrix) -> None:
    columns, rows = len(matrix[0]), numbers(matrix)
    assert gf2.rank(rows) == plain.rank(matrix, columns)
    kernel = gf2.kernel(rows, columns)
    words = plain.words(matrix, columns)
    assert len(words) == 2 ** len(kernel)
    assert gf2.weights(kernel, columns).tolist() == [
        sum(sum(word) == weight for word in words) for weight in range(columns + 1)
    ]
    assert gf2.distance(kernel, columns) == plain.distance(matrix, columns)
    turned = gf2.transpose(rows, columns)
    assert turned == numbers([list(column) for column in zip(*matrix, strict=True)])
    assert gf2.transpose(turned, len(rows)) == rows


@settings(max_examples=80, deadline=None)
@given(matrices(), st.integers(2, 4), st.integers(2, 6), st.integers(1, 4))
def test_the_score_matches_the_definition(matrix: plain.Matrix, wanted: int, weight: int, degree: int) -> None:
    columns = len(matrix[0])
    try:
        target = SearchTarget(columns, columns - len(matrix), wanted, min(weight, columns), degree)
    except UserError:
        return
    expected = plain.worth(matrix, columns, wanted, min(weight, columns), degree)
    found = survival_score(target, numbers(matrix))
    assert found == float(expected) and 0 <= found <= 1
    if wanted in (2, 3):  # halves of halves, to the last bit
        assert Fraction(found) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_the_score_is_invariant_under_renumbering(seed: int, rng: random.Random) -> None:
    drawn = random.Random(seed)
    matrix = [[drawn.randrange(2) for _ in range(8)] for _ in range(4)]
    target = SearchTarget(8, 4, 3, 4, 3)
    order = rng.sample(range(8), 8)
    other = [[row[n] for n in order] for row in rng.sample(matrix, 4)]
    assert survival_score(target, numbers(matrix)) == survival_score(target, numbers(other))


@pytest.mark.parametrize(
    ("matrix", "target", "expected"),
    [
        (HAMMING, (7, 4, 3, 4, 3), 1),
        (HAMMING, (7, 4, 3, 3, 3), 1 / 8),  # three checks of four, each one too heavy
        (HAMMING, (7, 4, 3, 4, 2), 1 / 2),
        (HAMMING, (7, 4, 2, 4, 0), 1),
        (EXTENDED, (8, 4, 4, 8, 4), 1),
        (EXTENDED, (8, 4, 4, 4, 0), 1 / 16),
        (EXTENDED, (8, 4, 3, 8, 0), 1),  # more distance than required scores no more
        ([[1, 1, 0, 0], [0, 0, 1, 1]], (4, 2, 2, 2, 1), 1),
        ([[1, 1, 0, 0], [1, 1, 0, 0]], (4, 2, 2, 2, 2), 0),
        ([[1, 1, 1, 0], [0, 1, 0, 0]], (4, 2, 2, 3, 2), 0),  # a shard in no check: its loss is final
    ],
)
def test_known_codes_have_known_scores(matrix: plain.Matrix, target: tuple[int, ...], expected: float) -> None:
    assert survival_score(SearchTarget(*target), numbers(matrix)) == expected


def test_a_matrix_that_does_not_match_the_target_is_refused() -> None:
    target = SearchTarget(8, 4, 3, 4, 3)
    for rows in ([1] * 3, [1 << 8] * 4, [1, 2, 4, 256]):
        with pytest.raises(ValueError, match="checks of 8 shards"):
            survival_score(target, rows)
    with pytest.raises(ValueError, match="2\\^21"):
        gf2.weights([1 << n for n in range(21)], 30)


def test_annealing_obeys_a_bound_on_degrees() -> None:
    target = SearchTarget(12, 6, 3, 4, 2)
    found = anneal(target, seed=1, tries=3000)
    assert certificate(found)["distance"] == weights(found.code)[1] >= 3
    degrees = [sum(shard in check for check in found.code.checks) for shard in range(12)]
    rows = [sum(1 << shard for shard in check) for check in found.code.checks]
    assert excess_weight(target, rows) == found.excess == 0 and max(degrees) <= 2
    assert survival_score(target, rows) == 1


@pytest.mark.parametrize(("degree", "complaint"), [(-1, "degree = -1"), (5, "at most 4 checks")])
def test_an_impossible_bound_on_degrees_is_refused(degree: int, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        SearchTarget(8, 4, 3, 4, degree)


def test_checks_of_all_shards_terminate() -> None:
    """There is only one such check, so independent ones do not exist."""
    assert anneal(SearchTarget(5, 2, 2, 5), seed=0, tries=10).tried == 10
