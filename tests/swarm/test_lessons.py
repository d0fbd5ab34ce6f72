"""Which completions teach, and how much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tiny_swarm import case

from planaria.swarm.learning.advantage import group_advantages
from planaria.swarm.learning.lessons import Lessons, lessons
from planaria.swarm.rollout import Rollout


def round_of(entries: list[tuple[str, int, float]]) -> list[Rollout]:
    """(peer, problem, reward) of each."""
    return [case(peer, problem, index, reward=reward) for index, (peer, problem, reward) in enumerate(entries)]


rounds = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.sampled_from([0.0, 1.0])), max_size=40).map(
    round_of
)
modes = st.sampled_from(["horizontal", "vertical"])


def by_name(found: Lessons) -> dict[object, float]:
    return {lesson.name: lesson.advantage for lesson in found.taken}


@given(rounds, st.booleans())
def test_without_a_bound_each_group_gets_its_own_advantages(cases: list[Rollout], scale: bool) -> None:
    found = by_name(lessons(cases, "horizontal", scale))
    for problem in range(5):
        group = [c for c in cases if c.problem.number == problem]
        values = group_advantages([c.reward for c in group], scale) or [None] * len(group)
        assert [found.get(c.name) for c in group] == values


@given(rounds, modes)
def test_every_group_teaches_or_is_counted_as_skipped(cases: list[Rollout], mode: str) -> None:
    found = lessons(cases, mode, True)  # type: ignore[arg-type]
    keys = {(c.problem.number, c.peer if mode == "vertical" else "") for c in cases}
    taught = {(x.problem.number, x.peer if mode == "vertical" else "") for x in found.taken}
    assert found.groups == len(taught) and found.groups + found.skipped == len(keys)


@given(rounds, modes, st.randoms(use_true_random=False))
def test_lessons_come_by_problem_and_peer_whatever_the_order_of_the_cases(cases: list[Rollout], mode: str, rng) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(cases)
    rng.shuffle(shuffled)
    found = [x.problem.number for x in lessons(shuffled, mode, True).taken]  # type: ignore[arg-type]
    assert found == sorted(found)


def test_a_refused_completion_moves_neither_mean_nor_deviation() -> None:
    rest = [case("a", index=0, reward=1.0), case("b", index=0, reward=0.0), case("c", index=0, reward=1.0)]
    refused = case("d", index=0, reward=1.0)
    without, zeroed = lessons(rest, "horizontal", True), lessons([*rest, refused], "horizontal", True)
    expected = group_advantages([1.0, 0.0, 1.0])
    assert [lesson.advantage for lesson in without.taken] == expected != [x.advantage for x in zeroed.taken][:3]


def test_vertical_groups_are_each_peers_own() -> None:
    cases = round_of([("a", 0, 1.0), ("a", 0, 0.0), ("b", 0, 1.0), ("b", 0, 1.0)])
    assert {x.peer for x in lessons(cases, "vertical", True).taken} == {"a"}
    assert lessons(cases, "vertical", True).skipped == 1
    assert {x.peer for x in lessons(cases, "horizontal", True).taken} == {"a", "b"}


def test_a_peer_that_owns_all_that_teaches_keeps_its_advantages() -> None:
    cases = round_of([("a", 0, 1.0), ("a", 0, 0.0), ("b", 1, 1.0), ("b", 1, 1.0)])
    found = lessons(cases, "vertical", True)
    assert [x.advantage for x in found.taken] == group_advantages([1.0, 0.0])


def test_nothing_sent_teaches_nothing() -> None:
    assert lessons([], "horizontal", True) == Lessons([], 0, 0)
