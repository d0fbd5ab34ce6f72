"""Codes of sparse parity checks: search, certificate, files, and tolerated losses."""

import json
from itertools import combinations, product

import numpy as np
import pytest

from planaria.common.errors import UserError
from planaria.recovery import codes
from planaria.recovery.codes.base import repairable_shares
from planaria.recovery.codes.search import SearchTarget, anneal, certificate, code_file
from planaria.recovery.codes.sparse import weights


@pytest.fixture(scope="module")
def found():
    return anneal(SearchTarget(16, 8, 4, 4), seed=4, tries=3000)


def test_the_search_meets_its_target_and_the_certificate_matches_an_enumeration(found):
    properties = certificate(found)
    assert (properties["distance"], properties["excess"], properties["check weights"]) == (4, 0, [4] * 8)
    rows = [[int(n in check) for n in range(16)] for check in found.code.checks]
    words = list(product((0, 1), repeat=8))
    whole = np.array([[*word, *(np.array(word) @ found.code.weights.T % 2)] for word in words])
    assert not (whole @ np.array(rows).T % 2).any()
    assert np.bincount(whole.sum(axis=1), minlength=17).tolist() == properties["words by weight"]


def test_the_same_seed_gives_the_same_code(found):
    assert code_file(anneal(SearchTarget(16, 8, 4, 4), seed=4, tries=3000)) == code_file(found)


def test_all_560_triples_are_restored_and_one_loss_reads_three(found):
    drawn = np.random.default_rng(0).integers(0, 256, (8, 40), dtype=np.uint8)
    everything = [*drawn, *found.code.encode(list(drawn))]
    for lost in combinations(range(16), 3):
        back = found.code.repair({n: everything[n] for n in found.code.plan(lost)}, lost)
        assert all(back[n].tobytes() == everything[n].tobytes() for n in lost)
    assert {len(found.code.plan([n])) for n in range(16)} == {3}


def test_more_losses_are_survived_as_often_as_by_known_codes(found):
    for ours, known in zip(repairable_shares(found.code)[4:], (0.996, 0.974, 0.909, 0.746, 0.423), strict=True):
        assert ours >= known - 0.02


def test_a_loss_of_four_is_refused_where_it_is_unrecoverable(found):
    word = next(w for w in combinations(range(16), 4) if isinstance(found.code.plan(w), str))
    assert found.code.plan(word).startswith(f"shards {', '.join(map(str, word))} cannot be rebuilt")


def test_a_code_file_restores_the_code(found, tmp_path):
    path = tmp_path / "code.json"
    path.write_text(code_file(found).model_dump_json())
    again = codes.make_code(str(path), 16, 3)
    assert (again.weights == found.code.weights).all() and again.checks == found.code.checks
    assert weights(again)[1] == 4


@pytest.mark.parametrize(
    ("change", "members", "tolerate", "complaint"),
    [
        ({"distance": 5}, 16, 3, "distance = 5, but it is 4"),
        ({}, 16, 4, "survives any 3 losses, not tolerate = 4"),
        ({}, 12, 3, "a code of 16 shards for a group of 12"),
        ({"checks": [[0, 0, 1]]}, 16, 3, "check 0 must list two or more shards"),
        ({"checks": [[0, 99]]}, 16, 3, "check 0 must list two or more shards"),
        ({"checks": [[0, 1]] * 8}, 16, 3, "the last 8 shards are not determined"),
        ({"checks": [[14, 15]] * 15}, 16, 3, "the last 15 shards are not determined"),
        ({"checks": [[0, 1]], "shards": 40}, 40, 3, "leave 39 for data"),
        ({"checks": "all"}, 16, 3, "checks"),
        ({"shards": 10**9}, 16, 3, "shards"),
        ({"more": 1}, 16, 3, "more"),
    ],
)
def test_an_inconsistent_code_file_is_refused(found, tmp_path, change, members, tolerate, complaint):
    path = tmp_path / "code.json"
    path.write_text(json.dumps(json.loads(code_file(found).model_dump_json()) | change))
    with pytest.raises(UserError) as error:
        codes.make_code(str(path), members, tolerate)
    assert complaint in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ((16, 8, 8, 4), "allow at most 7"),
        ((16, 8, 0, 4), "distance = 0"),
        ((40, 17, 3, 4), "data has 1 to 16"),
        ((16, 8, 4, 1), "a check 2 or more"),
        ((80, 8, 4, 4), "at most 64"),
    ],
)
def test_impossible_targets_are_refused(target, complaint):
    with pytest.raises(UserError, match=complaint):
        SearchTarget(*target)


def test_a_search_without_budget_reports_its_shortfall():
    best = anneal(SearchTarget(14, 3, 6, 3), seed=0, tries=1)
    assert best.tried == 1 and certificate(best)["distance"] < 6
