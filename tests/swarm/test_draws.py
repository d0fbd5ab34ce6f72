"""Everything random can be drawn again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.draws import derived, generator, own_problems, shared_problems

naturals = st.integers(0, 10**6)


@given(
    st.lists(st.one_of(naturals, st.text("abc")), max_size=4), st.lists(st.one_of(naturals, st.text("abc")), max_size=4)
)
def test_different_parts_give_different_seeds(one: list[object], other: list[object]) -> None:
    same = list(map(str, one)) == list(map(str, other))
    assert (derived(*one) == derived(*other)) == (same or {repr(one), repr(other)} == {"[]", "['']"})
    assert 0 <= derived(*one) < 2**63


def test_seeds_are_the_same_on_every_machine() -> None:
    # Written down once: whoever draws otherwise could not follow a run that began before.
    assert derived("x", 1) == generator("x", 1).initial_seed() == 3934374265583277430
    assert shared_problems(1, 2, 99, 3) == [82, 70, 83] and own_problems(1, "p", 2, 99, 3, bool) == [3, 87, 60]


@given(naturals, naturals, st.integers(1, 50), st.integers(1, 60))
def test_shared_problems_are_training_problems_each_once(seed: int, number: int, training: int, count: int) -> None:
    found = shared_problems(seed, number, training, count)
    assert len(set(found)) == len(found) == min(count, training) and all(0 <= p < training for p in found)
    assert found == shared_problems(seed, number, training, count)


def test_rounds_and_seeds_have_problems_of_their_own() -> None:
    drawn = [tuple(shared_problems(seed, number, 10_000, 8)) for seed in range(5) for number in range(5)]
    assert len(set(drawn)) == 25


@given(naturals, st.integers(1, 60), st.integers(1, 70), st.sets(st.integers(0, 60)), st.integers(1, 80))
def test_own_problems_are_the_wanted_ones_first(
    seed: int, training: int, count: int, wanted: set[int], tries: int
) -> None:
    found = own_problems(seed, "p0", 3, training, count, wanted.__contains__, tries)
    assert len(set(found)) == len(found) == min(count, training) and all(0 <= p < training for p in found)
    liked = [problem in wanted for problem in found]
    assert liked == sorted(liked, reverse=True)
    if tries >= training:
        assert sum(liked) == min(count, len({p for p in wanted if p < training}))


def test_peers_choose_for_themselves() -> None:
    chosen = {tuple(own_problems(1, f"p{n}", 0, 10_000, 4, lambda _: True)) for n in range(6)}
    assert len(chosen) == 6
