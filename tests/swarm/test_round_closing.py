"""When a round closes: everyone, or the quorum after a while, or nobody knows how to go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from words import goodbye, hello, rollouts

from planaria.swarm.board.attendance import Census, Decision, Gathered, RoundStalled, Terms, decide, until_next
from planaria.swarm.board.identity import Identity

peers = st.frozensets(st.sampled_from("abcdefgh"))
seconds = st.integers(0, 100 * 1024).map(lambda ticks: ticks / 1024)
"""in steps between which there is room: 0.99 of the least number above zero is that number again"""
terms = st.builds(
    lambda quorum, times: Terms(quorum, min(times), max(times)), st.integers(0, 9), st.tuples(seconds, seconds)
)


@given(peers, peers, peers, seconds, terms)
def test_a_round_closes_with_everyone_or_the_quorum_only(
    expected: frozenset[str], found: frozenset[str], refused: frozenset[str], elapsed: float, terms: Terms
) -> None:
    refused -= found
    there = expected & found
    match decide(expected, found, refused, elapsed, terms):
        case Decision.CLOSE:
            assert there == expected or len(there) >= terms.quorum
        case Decision.WAIT:
            assert there != expected and elapsed < terms.patience_s
            assert len(there) < terms.quorum or elapsed < terms.timeout_s
        case Decision.STALLED:
            assert len(there) < terms.quorum and elapsed >= terms.patience_s


@given(peers, peers, terms)
def test_no_round_waits_longer_than_the_run_has_patience(
    expected: frozenset[str], found: frozenset[str], terms: Terms
) -> None:
    assert decide(expected, found, frozenset(), terms.patience_s, terms) is not Decision.WAIT


@given(peers, seconds, terms)
def test_a_round_with_everyone_closes_at_once(expected: frozenset[str], elapsed: float, terms: Terms) -> None:
    assert decide(expected, expected | {"stranger"}, frozenset(), elapsed, terms) is Decision.CLOSE


@given(peers, peers, peers, seconds, seconds, terms)
def test_a_closed_round_stays_closed_whoever_else_comes_and_however_late(
    expected: frozenset[str], found: frozenset[str], more: frozenset[str], elapsed: float, later: float, terms: Terms
) -> None:
    if decide(expected, found, frozenset(), elapsed, terms) is Decision.CLOSE:
        assert decide(expected, found | more, frozenset(), elapsed + later, terms) is Decision.CLOSE


@given(peers, peers, seconds, terms)
def test_strangers_count_for_nothing(
    expected: frozenset[str], found: frozenset[str], elapsed: float, terms: Terms
) -> None:
    strangers = {f"stranger {n}" for n in range(20)}
    assert decide(expected, found | strangers, frozenset(), elapsed, terms) == decide(
        expected, found, strangers, elapsed, terms
    )


@given(peers, peers, peers, seconds, terms)
def test_nothing_changes_before_the_time_it_is_said_to(
    expected: frozenset[str], found: frozenset[str], refused: frozenset[str], elapsed: float, terms: Terms
) -> None:
    before = decide(expected, found, refused, elapsed, terms)
    assert decide(expected, found, refused, elapsed + 0.99 * until_next(elapsed, terms), terms) == before
    assert (until_next(elapsed, terms) == 0) == (elapsed >= terms.patience_s)


def test_a_round_does_not_wait_for_those_who_sent_rubbish() -> None:
    terms = Terms(quorum=2, timeout_s=10, patience_s=100)
    assert decide({*"abc"}, {*"ab"}, {*"c"}, 0, terms) is Decision.CLOSE
    assert decide({*"abc"}, {*"ab"}, set(), 0, terms) is Decision.WAIT
    assert decide({*"abc"}, {*"ab"}, set(), 10, terms) is Decision.CLOSE
    assert decide({*"abc"}, {*"a"}, {*"bc"}, 10, terms) is Decision.WAIT
    assert decide({*"abc"}, {*"a"}, {*"bc"}, 100, terms) is Decision.STALLED


@pytest.mark.parametrize("words", [(-1, 1, 2), (1, 2, 1), (1, -1, 2), (1, float("nan"), 2)])
def test_terms_that_mean_nothing_are_refused(words: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="a round waits"):
        Terms(*words)


def test_members_of_a_round_have_joined_and_not_left() -> None:
    early, late, left, never = (Identity.fresh() for _ in range(4))
    hellos = {who.peer: hello(who, joined=0) for who in (early, left, never)} | {late.peer: hello(late, joined=4)}
    goodbyes = {left.peer: goodbye(left, after=5), never.peer: goodbye(never, after=-1)}
    census = Census(hellos, goodbyes, {}, 0)
    assert census.members(0) == census.members(3) == {early.peer, left.peer}
    assert census.members(4) == census.members(5) == {early.peer, late.peer, left.peer}
    assert census.members(6) == {early.peer, late.peer}


def test_what_was_found_stays_and_what_may_still_come_is_looked_at_again() -> None:
    one = Identity.fresh()
    first = Gathered({}, ("b", one.peer), {"c": "forged", "d": "not JSON", "e": "not readable"})
    assert {*first.open} == {"b", "d", "e", one.peer} and first.settled == {"c": "forged"}
    message = rollouts(one)
    later = first.updated(Gathered({one.peer: message}, ("b",), {"d": "replayed", "e": "not JSON"}))
    assert later.found == {one.peer: message} and {*later.open} == {"b", "e"}
    assert later.refused == {"c": "forged", "d": "replayed", "e": "not JSON"}


def test_a_stalled_round_names_who_came_and_who_did_not_and_why() -> None:
    error = RoundStalled("ab" * 16, 7, ["1" * 32], {"2" * 32: "sent nothing", "3" * 32: "forged"}, 2)
    assert str(error) == (
        "run abababab, round 7: 1 of 3 peers came and the quorum is 2; there: 11111111; "
        "missing: 22222222 (sent nothing), 33333333 (forged)"
    )
