"""Lines of descent and chains of domains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.lab.experts.lineage import chains, lineages, numbered_name, parent_seed, tier_of_domains


@given(st.integers(1, 9), st.integers(0, 99))
def test_every_parent_is_in_one_line_of_descent(parents: int, seed: int) -> None:
    found = lineages(["S", "M", "L"], parents, seed)
    assert found == lineages(["S", "M", "L"], parents, seed)
    for size in "SML":
        assert sorted(line[size] for line in found) == sorted(numbered_name(size, n) for n in range(parents))


def test_the_seed_determines_the_lines() -> None:
    assert len({str(lineages(["S", "M", "L"], 3, seed)) for seed in range(20)}) > 10


def test_training_seeds_of_parents_differ() -> None:
    assert len({parent_seed(seed, number) for seed in range(100) for number in range(9)}) == 900
    assert parent_seed(7, 0) == 7 and numbered_name("M", 0) == "M"


def test_domains_are_ordered_in_chains() -> None:
    after = {"c": "b", "a": "", "x": "", "b": "a"}
    assert chains(after) == [["a", "b", "c"], ["x"]]


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        ({"a": "", "b": "z"}, r"experts\.domains\.b\.after = 'z': no such domain"),
        ({"a": "", "b": "a", "c": "a"}, r"experts\.domains\.c\.after = 'a': b also comes after it"),
        ({"a": "", "b": "c", "c": "b"}, r"experts\.domains\.b\.after: forms a cycle"),
        ({"a": "a", "b": ""}, r"experts\.domains\.a\.after: forms a cycle"),
    ],
)
def test_an_invalid_chain_is_rejected(after: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        chains(after)


def test_a_chain_has_one_tier_by_its_mean_difficulty() -> None:
    difficulty = {"a": 0.1, "b": 0.9, "x": 0.4, "y": 0.4, "p": 0.6, "q": 0.6}
    after = {"a": "", "b": "a", "x": "", "y": "x", "p": "", "q": "p"}
    assert tier_of_domains(difficulty, after, 3) == {"a": 1, "b": 1, "x": 0, "y": 0, "p": 2, "q": 2}
