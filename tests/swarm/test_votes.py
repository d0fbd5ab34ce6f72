"""Votes: one per peer, independent of its number of completions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.checks.votes import (
    BehaviourVote,
    MajorityLabel,
    agreements,
    majority_label,
    most_agreeing,
    plurality,
    vote_weights,
)
from planaria.swarm.tasks.base import Behaviour

VALUES = st.one_of(st.none(), st.sampled_from("abc"))
BALLOTS = st.lists(
    st.builds(BehaviourVote, st.sampled_from("pqrs"), st.tuples(VALUES, VALUES, VALUES) | st.just(())), max_size=12
)


def ballots(**sent: list[Behaviour]) -> list[BehaviourVote]:
    return [BehaviourVote(voter, behaviour) for voter, behaviours in sent.items() for behaviour in behaviours]


def values(found: MajorityLabel | None) -> Behaviour | None:
    return None if found is None else found.values


def test_an_answer_above_the_share_is_the_label() -> None:
    three_of_four = ballots(p=[("7",)], q=[("7",)], r=[("7",)], s=[("8",)])
    found = majority_label(three_of_four, 0.5)
    assert found == MajorityLabel((0,), ("7",), Fraction(3, 4))
    assert values(majority_label(three_of_four, 0.74)) == ("7",) and majority_label(three_of_four, 0.75) is None


def test_copies_by_one_peer_share_one_vote() -> None:
    sent = ballots(p=[("lie",)] * 12, q=[("7",)], r=[("7",)], s=[("8",)])
    assert vote_weights([one.voter for one in sent])[:12] == [Fraction(1, 12)] * 12
    assert majority_label(sent, 0.49) == MajorityLabel((0,), ("7",), Fraction(1, 2)), (
        "by completions the lie would have 12 of 15"
    )
    assert majority_label(sent, 0.5) is None


def test_the_break_point_is_half_of_the_peers() -> None:
    def lie(byzantine: int) -> Behaviour | None:
        honest = {f"h{n}": [("7",)] for n in range(4 - byzantine)}
        return values(majority_label(ballots(**honest, **{f"c{n}": [("lie",)] for n in range(byzantine)}), 0.5))

    assert [lie(count) for count in range(5)] == [("7",), ("7",), None, ("lie",), ("lie",)]


@pytest.mark.parametrize(
    "nothing", [(), (None, None, None, None), ("a", None, None, "b"), ("a", "a", "a", "a")], ids=str
)
def test_a_completion_without_behaviour_counts_without_a_vote(nothing: Behaviour) -> None:
    works: Behaviour = ("a", "b", "c", "d")
    found = majority_label(ballots(p=[works], q=[works], r=[nothing, nothing], s=[works, nothing]), 0.5)
    assert found == MajorityLabel((0, 1, 2, 3), works, Fraction(5, 8))
    if nothing != ("a", None, None, "b"):  # the only comparable calls
        assert majority_label(ballots(p=[nothing], q=[nothing]), 0.1) is None


def test_calls_that_fail_for_most_are_ignored() -> None:
    sent = ballots(p=[("a", "b", None)], q=[("a", "b", None)], r=[("a", None, "c")])
    assert majority_label(sent, 0.5) == MajorityLabel((0, 1), ("a", "b"), Fraction(2, 3))


def test_near_ignores_failed_calls_but_accepts_no_constant() -> None:
    found = MajorityLabel((0, 1, 2, 4), ("a", "b", "a", "c"), Fraction(1))
    assert found.matches(("a", "b", "a", "?", "c")) and found.is_near(("a", "b", "a", "?", "c"))
    assert found.is_near(("a", "b", "a", "?", None)) and not found.matches(("a", "b", "a", "?", None))
    assert not found.is_near(("a", "a", "a", "a", "a")) and not found.is_near(()) and not found.matches(())
    assert MajorityLabel((0,), ("a",), Fraction(1)).is_near(("a",)), (
        "who does the same is near, whatever one value would do"
    )


@given(BALLOTS, st.randoms(use_true_random=False))
def test_votes_are_independent_of_order_and_shares_are_at_most_one(sent: list[BehaviourVote], rng: object) -> None:
    found = {(one.values, one.share) for one in plurality(sent)}
    shuffled = sent[:]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {(one.values, one.share) for one in plurality(shuffled)} == found
    assert all(0 < share <= 1 for _, share in found)


@given(BALLOTS, st.sampled_from("pqrs"), st.integers(2, 9))
def test_copies_of_a_peers_completions_change_nothing(sent: list[BehaviourVote], peer: str, times: int) -> None:
    copied = [one for one in sent for _ in range(times if one.voter == peer else 1)]
    assert {(o.parts, o.values, o.share) for o in plurality(copied)} == {
        (o.parts, o.values, o.share) for o in plurality(sent)
    }


@given(BALLOTS, st.floats(0.01, 0.99))
def test_a_label_exceeds_the_share_and_holders_have_behaviour(sent: list[BehaviourVote], agreement: float) -> None:
    found = majority_label(sent, agreement)
    if found is not None:
        assert found.share > agreement
        holders = [one for one in sent if found.matches(one.behaviour)]
        assert holders and all(found.is_near(one.behaviour) for one in holders)


@given(st.lists(st.lists(VALUES, max_size=4).map(tuple), max_size=8))
def test_agreement_matches_funcoder_equation_1(behaviours: list[Behaviour]) -> None:
    inputs = max(map(len, behaviours), default=0)
    whole = [done + (None,) * (inputs - len(done)) for done in behaviours]
    by_hand = []
    for place, own in enumerate(whole):
        total = Fraction()
        for other in (*whole[:place], *whole[place + 1 :]):
            for ours, theirs in zip(own, other, strict=True):
                total += Fraction(int(ours is not None and ours == theirs), inputs)
        by_hand.append(total)
    assert agreements(behaviours) == by_hand
    if behaviours:
        assert most_agreeing(behaviours) == by_hand.index(max(by_hand))
