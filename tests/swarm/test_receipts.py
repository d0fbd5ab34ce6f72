"""Certificates, followed closings and round decisions."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.board.attendance import Census, RoundMessages, RoundStalled, RoundTerms
from planaria.swarm.board.claims import digest_of
from planaria.swarm.board.envelope import seal
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import BadMessage, Receipt
from planaria.swarm.board.receipts import (
    Committee,
    MessageList,
    cannot_reach_quorum,
    list_text,
    majority_list,
    parse_message_list,
    parse_rewards,
    quorum_digest,
    rewards_text,
)
from planaria.swarm.certificate import RunCertificate, check_certificate
from support.swarm.swarm_messages import goodbye, hello, rollouts, rules

WHO = [PeerIdentity.generate() for _ in range(7)]
IDS = [who.peer for who in WHO]
STRANGER = PeerIdentity.generate()
RULES = rules(WHO[0], task="sums", receipts={"committee": ",".join(IDS), "price": 0})
DIGEST = "ab" * 32


def receipt(who: PeerIdentity, **changes: Any) -> bytes:
    words = {"run": RULES.run, "round": 5, "about": "weights", "digest": DIGEST} | changes
    return seal(who, Receipt(peer=who.peer, **words))


def certificate(*receipts: bytes, founded: bytes | None = None) -> RunCertificate:
    raw = founded or seal(WHO[0], RULES)
    return RunCertificate(
        about="weights", round=5, digest=DIGEST, rules=raw.decode(), receipts=tuple(r.decode() for r in receipts)
    )


FIVE = [receipt(who) for who in WHO[:5]]


def reason(*receipts: bytes, founded: bytes | None = None) -> str:
    with pytest.raises(BadMessage) as refusal:
        check_certificate(certificate(*receipts, founded=founded))
    return refusal.value.reason


def test_a_quorum_is_n_minus_f() -> None:
    for n in range(1, 50):
        committee = Committee(frozenset(map(str, range(n))))
        f = committee.max_faulty
        assert 3 * f < n <= 3 * (f + 1) and committee.quorum == n - f
        assert 2 * committee.quorum - n > f  # any two quorums have an honest member in common


def test_a_quorum_of_named_members_certifies() -> None:
    found = check_certificate(certificate(*FIVE))
    assert found.rules == RULES and list(found.signers) == IDS[:5] and found.committee.members == frozenset(IDS)


def test_forged_certificates_are_refused_with_a_reason() -> None:
    four = FIVE[:4]
    assert reason(*four) == "4 receipts, but at least 5 are required"
    assert reason(*four, four[0]) == f"receipt 4 is the second of {IDS[0][:8]}"
    assert "not a committee member" in reason(*four, receipt(STRANGER))
    assert reason(*four, receipt(WHO[5], about="round")) == "receipt 4 is about round, not weights"
    assert reason(*four, receipt(WHO[5], run="f" * 32)) == "receipt 4 is another run"
    assert reason(*four, receipt(WHO[5], round=6)) == "receipt 4 is about another round"
    assert reason(*four, receipt(WHO[5], digest="cd" * 32)) == "receipt 4 is about another digest"
    pretended = receipt(STRANGER).replace(STRANGER.peer.encode(), IDS[5].encode())
    assert reason(*four, pretended) == "receipt 4 is forged"
    keyed = receipt(STRANGER).replace(STRANGER.public.hex().encode(), WHO[5].public.hex().encode())
    assert reason(*four, keyed) == "receipt 4 is forged"
    assert reason(*FIVE, founded=seal(WHO[0], rules(WHO[0], task="sums"))) == "the rules have no committee"
    softer = seal(WHO[0], RULES).replace(b"sums", b"gsm8")
    assert reason(*FIVE, founded=softer) == "the rules are forged"
    own = rules(STRANGER, task="sums", receipts={"committee": ",".join(IDS)})
    assert reason(*FIVE, founded=seal(STRANGER, own)) == "receipt 0 is another run"


@pytest.mark.slow
def test_damaged_receipts_are_refused() -> None:
    rng = random.Random(7)
    raw = FIVE[4]
    for _ in range(10_000):
        at = rng.randrange(len(raw))
        match rng.randrange(3):
            case 0:
                bad = raw[:at] + bytes([rng.choice(b'0123456789abcdef{}[]":,')]) + raw[at + 1 :]
            case 1:
                bad = raw[:at] + raw[at + 1 :]
            case _:
                other = rng.randrange(len(raw))
                bad = raw[:at] + raw[other : other + 9] + raw[at + 9 :]
        if bad != raw:
            with pytest.raises(BadMessage) as refusal:
                check_certificate(certificate(bad))  # alone: it is looked at before it is counted
            assert refusal.value.reason.startswith("receipt 0 is ")


message_lists = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from(["0" * 64, "1" * 64]), max_size=7)


@given(
    st.dictionaries(st.sampled_from("abcdefg"), message_lists),
    st.integers(0, 4),
    st.frozensets(st.sampled_from("abcdefg")),
)
def test_the_followed_list_is_independent_of_reading_order(
    closings: dict[str, MessageList], quorum: int, early: frozenset[str]
) -> None:
    voters = frozenset("abcdef")
    found = majority_list(closings, voters, voters, quorum, early)
    back = majority_list(dict(reversed(closings.items())), voters, voters, quorum, early)
    assert found == back
    if found is not None:
        named = [peer for peer, listed in closings.items() if listed == found and peer in voters]
        assert named and len(found.keys() & voters) >= quorum
        assert voters & early <= found.keys() or 2 * len(named) > len(voters)


@given(message_lists)
def test_message_lists_are_parsed_back(listed: MessageList) -> None:
    assert parse_message_list(list_text(listed)) == listed
    for nonsense in ("", "[", "[1]", '{"a": 1}'):
        assert parse_message_list(nonsense) == {}


def test_rewards_are_parsed_back_for_the_same_messages_only() -> None:
    rewards = {(IDS[0], 3, 0): 1.0, (IDS[1], 3, 1): 0.25}
    text = rewards_text(DIGEST, rewards)
    assert parse_rewards(text, DIGEST) == rewards
    assert parse_rewards(text, "cd" * 32) == {} and parse_rewards("{", DIGEST) == {}


def simulated(seed: int, byzantine: int) -> tuple[set[str], list[str]]:
    """Simulate a round of four members, the first ``byzantine`` of which sign two closings. Return the digests that a
    reader finds certified, and the lists of honest members with a certificate. Files arrive late, reordered, partially
    and twice."""
    rng = random.Random(seed)
    committee = Committee(frozenset("abcd"))
    honest = sorted(committee.members)[byzantine:]
    there = {peer: str(rng.randrange(2)) * 64 for peer in "abcd"}
    views = {peer: {p: d for p, d in there.items() if p == peer or rng.random() < 0.8} for peer in honest}
    false_lists: list[MessageList] = [
        {"a": "0" * 64, "b": "1" * 64, "c": "0" * 64},
        {"b": "1" * 64, "c": "1" * 64, "d": "0" * 64},
    ]
    closings: dict[str, MessageList] = {}
    signed: dict[str, list[Receipt]] = {}
    for peer in rng.sample(honest, len(honest)):
        seen = {p: listed for p, listed in closings.items() if rng.random() < 0.7}
        seen |= {byzantine_member: rng.choice(false_lists) for byzantine_member in "abcd"[:byzantine]}
        mine = majority_list(seen, committee.members, committee.members, 2, frozenset(views[peer])) or views[peer]
        closings[peer] = mine
        signed[peer] = [_signed(peer, mine)]
    for byzantine_member in "abcd"[:byzantine]:
        lists = [*rng.sample(false_lists, 2), *closings.values()]
        signed[byzantine_member] = [_signed(byzantine_member, listed) for listed in rng.sample(lists, 2)]
    certified, followed_by = set(), []
    for reader in honest:
        mine = list_text(closings[reader])
        for chance in (
            0.6,
            0.9,
            1.0,
        ):  # what it reads of a Byzantine member differs from look to look, each file is shown twice
            shown = [rng.choice(one) for one in signed.values() if rng.random() < chance] * 2
            if (digest := quorum_digest(shown, committee)) is not None:
                certified.add(digest)
                mine = next(r.text for r in shown if r.digest == digest)
        if digest_of(mine) in certified:
            followed_by.append(mine)
    return certified, followed_by


def _signed(peer: str, listed: MessageList) -> Receipt:
    text = list_text(listed)
    return Receipt.model_construct(peer=peer, about="round", round=0, digest=digest_of(text), text=text)


@pytest.mark.parametrize("byzantine", [0, 1])
def test_a_round_never_has_two_certificates(byzantine: int) -> None:
    made = 0
    for seed in range(1000):
        certified, lists = simulated(seed, byzantine)
        assert len(certified) <= 1
        made += len(certified)
        if certified:
            assert len({*lists}) == 1 and digest_of(lists[0]) in certified
    assert 100 < made < 1000


def test_more_than_f_byzantine_members_can_split_a_committee() -> None:
    """The bound is tight: with two Byzantine members of four, two digests can have three signatures each."""
    assert any(len(simulated(seed, 2)[0]) > 1 for seed in range(1000))


def test_impossible_certificates_are_not_awaited() -> None:
    committee = Committee(frozenset("abcd"))
    two = [_signed("a", {"a": "0" * 64}), _signed("b", {"b": "0" * 64})]
    assert not cannot_reach_quorum(two[:1], committee, 2) and cannot_reach_quorum(two[:1], committee, 1)
    assert not cannot_reach_quorum(two, committee, 2) and cannot_reach_quorum(two, committee, 1)


peers = st.frozensets(st.sampled_from("abcdefgh"))
seconds = st.integers(0, 100 * 1024).map(lambda ticks: ticks / 1024)
"""in steps between which there is room: 0.99 of the least number above zero is that number again"""
terms = st.builds(
    lambda quorum, times: RoundTerms(quorum, min(times), max(times)), st.integers(0, 9), st.tuples(seconds, seconds)
)


@given(peers, peers, peers, seconds, terms)
def test_a_round_closes_only_with_all_or_a_quorum(
    expected: frozenset[str], found: frozenset[str], refused: frozenset[str], elapsed: float, terms: RoundTerms
) -> None:
    refused -= found
    there = expected & found
    if terms.allow_closing(expected, found, refused, elapsed):
        assert there == expected or len(there) >= terms.quorum
    else:
        assert there != expected and (len(there) < terms.quorum or elapsed < terms.timeout_s)
    assert terms.allow_closing(expected, expected | {"stranger"}, frozenset(), elapsed)


@given(peers, peers, peers, seconds, seconds, terms)
def test_a_closed_round_stays_closed_and_strangers_do_not_count(
    expected: frozenset[str],
    found: frozenset[str],
    more: frozenset[str],
    elapsed: float,
    later: float,
    terms: RoundTerms,
) -> None:
    closes = terms.allow_closing(expected, found, frozenset(), elapsed)
    assert not closes or terms.allow_closing(expected, found | more, frozenset(), elapsed + later)
    strangers = {f"stranger {n}" for n in range(20)}
    assert terms.allow_closing(expected, found | strangers, strangers, elapsed) == closes


@given(peers, peers, peers, seconds, terms)
def test_time_alone_changes_nothing_before_the_stated_seconds(
    expected: frozenset[str], found: frozenset[str], refused: frozenset[str], elapsed: float, terms: RoundTerms
) -> None:
    almost = elapsed + 0.99 * terms.seconds_to_change(elapsed)
    closes = [terms.allow_closing(expected, found, refused, now) for now in (elapsed, almost)]
    assert closes[0] == closes[1] and (almost >= terms.patience_s) == (elapsed >= terms.patience_s)
    assert (terms.seconds_to_change(elapsed) == 0) == (elapsed >= terms.patience_s)


def test_a_round_does_not_wait_for_refused_peers() -> None:
    terms = RoundTerms(quorum=2, timeout_s=10, patience_s=100)
    assert terms.allow_closing({*"abc"}, {*"ab"}, {*"c"}, 0)
    assert not terms.allow_closing({*"abc"}, {*"ab"}, set(), 0)
    assert terms.allow_closing({*"abc"}, {*"ab"}, set(), 10)
    assert not terms.allow_closing({*"abc"}, {*"a"}, {*"bc"}, 100)


@pytest.mark.parametrize("words", [(-1, 1, 2), (1, 2, 1), (1, -1, 2), (1, float("nan"), 2)])
def test_invalid_terms_are_refused(words: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="a round requires"):
        RoundTerms(*words)


def test_members_of_a_round_have_joined_and_not_left() -> None:
    early, late, left, never = (PeerIdentity.generate() for _ in range(4))
    hellos = {who.peer: hello(who, joined=0) for who in (early, left, never)} | {late.peer: hello(late, joined=4)}
    goodbyes = {left.peer: goodbye(left, after=5), never.peer: goodbye(never, after=-1)}
    census = Census(hellos, goodbyes, {})
    assert census.members(0) == census.members(3) == {early.peer, left.peer}
    assert census.members(4) == census.members(5) == {early.peer, late.peer, left.peer}
    assert census.members(6) == {early.peer, late.peer}


def test_found_messages_stay_and_open_ones_are_read_again() -> None:
    one = PeerIdentity.generate()
    first = RoundMessages({}, ("b", one.peer), {"c": "forged", "d": "not JSON", "e": "not readable"})
    assert {*first.open} == {"b", "d", "e", one.peer} and first.rejected_permanently == {"c": "forged"}
    message = rollouts(one)
    later = first.merge(RoundMessages({one.peer: message}, ("b",), {"d": "replayed", "e": "not JSON"}), 2.5)
    assert later.found == {one.peer: message} and later.arrival_s == {one.peer: 2.5} and {*later.open} == {"b", "e"}
    assert later.rejected == {"c": "forged", "d": "replayed", "e": "not JSON"}


def test_a_stalled_round_lists_present_and_missing_peers() -> None:
    error = RoundStalled("ab" * 16, 7, ["1" * 32], {"2" * 32: "sent nothing", "3" * 32: "forged"}, 2)
    assert str(error) == (
        "run abababab, round 7: 1 of 3 peers are present and the quorum is 2; present: 11111111; "
        "missing: 22222222 (sent nothing), 33333333 (forged)"
    )
