"""Strangers become peers one at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.checks.standing import Standing
from planaria.swarm.records.lines import NEWCOMERS

CROWD = [f"stranger {n}" for n in range(400)]
rounds = st.lists(st.frozensets(st.sampled_from("abcdefgh"), max_size=8), max_size=60)


def known(standing: Standing, number: int, heard: list[str]) -> set[str]:
    return {peer for peer, account in standing.hear(number, heard).items() if account == peer}


@given(rounds, st.integers(1, 9))
def test_no_more_than_one_becomes_known_in_a_window(heard: list[frozenset[str]], window: int) -> None:
    standing, before = Standing("ab", 2, window, seed=1), {"a", "b"}
    for number, peers in enumerate(heard):
        accounts = standing.hear(number, peers)
        assert accounts.keys() == peers
        assert all(account in (peer, NEWCOMERS) for peer, account in accounts.items())
        now = set(standing.memory()[0])
        assert before <= now and len(now) <= 2 + -(-(number + 1) // window)
        assert {peer for peer, account in accounts.items() if account == peer} == before & peers
        before = now


def test_a_crowd_stays_one_account_for_hundreds_of_rounds() -> None:
    standing = Standing("ab", 2, 8, seed=1)
    for number in range(80):
        there = known(standing, number, ["a", "b", *CROWD])
        assert {"a", "b"} <= there and len(there) <= 2 + number // 8


def test_one_newcomer_is_a_peer_after_a_window() -> None:
    standing = Standing("ab", 2, 8, seed=1)
    assert [known(standing, n, ["a", "b", "c"]) == {*"abc"} for n in range(10)] == [False] * 8 + [True] * 2


def test_without_founders_as_many_as_the_run_was_made_for_are_known() -> None:
    found = [known(Standing((), 4, 8, seed=1), 0, list(order)) for order in (CROWD, CROWD[::-1])]
    assert found[0] == found[1] and len(found[0]) == 4


@given(rounds)
def test_a_standing_goes_on_from_its_memory(heard: list[frozenset[str]]) -> None:
    one, other = Standing("a", 1, 3, seed=1), Standing("a", 1, 3, seed=1)
    for number, peers in enumerate(heard):
        again = Standing((), 1, 3, seed=1)
        again.recall(*other.memory())
        other = again
        assert list(one.hear(number, peers).items()) == list(other.hear(number, peers).items())
