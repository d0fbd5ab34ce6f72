"""The board of a run among honest peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.board.attendance import RoundStalled, RoundTerms
from planaria.swarm.board.board import AlreadyPublished, Board
from planaria.swarm.board.claims import first_difference
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import Completion, ProblemCompletions
from support.swarm import stores
from support.swarm.boards import RULES, Clock, lower_limits, member, place
from support.swarm.swarm_messages import goodbye, hello, rollouts

KINDS = ("folder", "memory", "scratch", "plain")


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    stores.Scratch.clear()
    return place(request.param, tmp_path)


def test_published_messages_are_read_by_others(url: str) -> None:
    (first, one), (second, two) = member(url), member(url)
    run = first.rules.run
    assert second.rules == first.rules and first.rules.rules == RULES
    assert first.gather(0, [two.peer]).missing == (two.peer,)
    sent = rollouts(two, run, 0)
    second.publish(sent)
    gathered = first.gather(0, [one.peer, two.peer])
    assert (gathered.found, gathered.missing, gathered.rejected) == ({two.peer: sent}, (one.peer,), {})
    assert Board(url).gather(0, [two.peer]).found == {two.peer: sent}  # read-only


def test_all_peers_see_all_hellos(url: str) -> None:
    boards = [member(url) for _ in range(4)]
    for board, _ in boards:
        census = board.peers()
        assert set(census.hellos) == {who.peer for _, who in boards}
        assert (census.goodbyes, census.rejected) == ({}, {})


def test_a_peer_that_left_is_no_longer_a_member(url: str) -> None:
    (first, one), (second, two) = member(url), member(url)
    second.publish(goodbye(two, first.rules.run, after=3))
    census = first.peers()
    assert census.members(3) == {one.peer, two.peer} and census.members(4) == {one.peer}
    with pytest.raises(UserError, match="has left this run"):
        second.join(hello(two, first.rules.run))


def test_publishing_is_idempotent_and_never_replaces(url: str) -> None:
    board, who = member(url)
    run = board.rules.run
    board.publish(rollouts(who, run, 0))
    board.publish(rollouts(who, run, 0))
    for groups in ((), (ProblemCompletions(problem=1, completions=(Completion(text="y" * 999, ended=True),)),)):
        with pytest.raises(AlreadyPublished, match=r"rounds/000000\.json"):
            board.publish(rollouts(who, run, 0, groups=groups))
    assert board.gather(0, [who.peer]).found == {who.peer: rollouts(who, run, 0)}


def test_other_rules_are_refused_with_the_first_difference(url: str) -> None:
    member(url)
    for rules, words in (
        (RULES | {"loss": {"clip": 0.3}}, "loss.clip is 0.2 there and 0.3 here"),
        (RULES | {"group": 12.0}, "group is 12 there and 12.0 here"),
        (RULES | {"extra": 1}, "extra is only here"),
        ({"task": "sums", "group": 12}, "loss is only there"),
    ):
        with pytest.raises(UserError, match=words):
            Board(url, PeerIdentity.generate()).create_run(rules)


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=3), json_values), st.dictionaries(st.text(max_size=3), json_values))
def test_difference_is_none_or_printable(mine: Any, theirs: Any) -> None:
    assert first_difference(mine, mine) is None
    difference = first_difference(mine, theirs)
    assert (difference is None) == (first_difference(theirs, mine) is None)
    assert difference is None or (difference.isascii() and difference.isprintable())
    assert difference is not None or repr(sorted(mine)) == repr(sorted(theirs))


def test_a_place_without_a_run_is_refused(url: str) -> None:
    one = PeerIdentity.generate()
    for act in (lambda: Board(url).rules, lambda: Board(url, one).join(hello(one))):
        with pytest.raises(UserError, match="this board has no run"):
            act()


def test_rejoining_returns_the_earlier_hello(url: str) -> None:
    board, who = member(url)
    run = board.rules.run
    again = Board(url, who)
    assert again.join(hello(who, run, joined=7, name="new name")) == hello(who, run)
    with pytest.raises(UserError, match="another tokenizer"):
        again.join(hello(who, run, tokenizer="f" * 16))


def test_invalid_messages_are_not_published(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, message_bytes=2000, groups=1)
    board, who = member(url)
    other = PeerIdentity.generate()
    run = board.rules.run
    group = ProblemCompletions(problem=1, completions=(Completion(text="x" * 2000, ended=True),))
    with pytest.raises(UserError, match="oversized"):
        board.publish(rollouts(who, run, groups=(group,)))
    small = [ProblemCompletions(problem=n, completions=(Completion(text="x", ended=True),)) for n in range(2)]
    with pytest.raises(UserError, match="too many groups"):
        board.publish(rollouts(who, run, groups=tuple(small)))
    with pytest.raises(UserError, match="another run"):
        board.publish(rollouts(who, "f" * 32))
    with pytest.raises(ValueError, match="cannot sign a message of"):
        board.publish(rollouts(other, run))
    with pytest.raises(ValueError, match="read-only"):
        Board(url).publish(rollouts(who, run))
    assert board.gather(3, [who.peer]).missing == (who.peer,)


@pytest.mark.parametrize("peer", ["", "..", "../" + "a" * 29, "a" * 31, "A" * 32, "a" * 32 + "\n", "a" * 31 + "/"])
def test_invalid_peer_ids_and_rounds_are_refused(url: str, peer: str) -> None:
    board, _ = member(url)
    with pytest.raises(ValueError, match="not a peer id"):
        board.gather(0, [peer])
    for round in (-1, 10**6):
        with pytest.raises(ValueError, match="out of range"):
            board.gather(round, ["a" * 32])


def test_a_round_closes_when_all_messages_are_there(url: str) -> None:
    """The second message comes after 2.5 s, the third after 4.5 s."""
    (_, one), (second, two), (third, three) = member(url), member(url), member(url)
    run = second.rules.run

    def happen(now: float) -> None:
        if now >= 2.5:
            second.publish(rollouts(two, run, 1))
        if now >= 4.5:
            third.publish(rollouts(three, run, 1))

    clock = Clock(happen)
    first, _ = member(url, one, clock)
    first.publish(rollouts(one, run, 1))
    closed = first.wait(1, [one.peer, two.peer, three.peer], RoundTerms(quorum=1, timeout_s=60, patience_s=90))
    assert set(closed.found) == {one.peer, two.peer, three.peer} and not closed.missing and clock.now == 5.0


def test_the_quorum_closes_after_the_timeout_and_less_stalls(url: str) -> None:
    (board, one), (_, two) = member(url), member(url)
    board.publish(rollouts(one, board.rules.run, 1))
    everyone = [one.peer, two.peer]
    clock = Clock()
    first, _ = member(url, one, clock)
    closed = first.wait(1, everyone, RoundTerms(quorum=1, timeout_s=2.5, patience_s=9))
    assert set(closed.found) == {one.peer} and closed.missing == (two.peer,)
    assert clock.naps == [1.0, 1.0, 0.5]
    clock = Clock()
    first, _ = member(url, one, clock)
    with pytest.raises(RoundStalled, match=f"present: {one.peer[:8]}; missing: {two.peer[:8]} \\(sent nothing\\)"):
        first.wait(1, everyone, RoundTerms(quorum=2, timeout_s=2.5, patience_s=4), poll_s=2)
    assert clock.now == 4.0


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://x", "use a folder"),
        ("simplecache::memory://x", "chained file systems"),
        ("filecache::s3://user:secret@x", "chained file systems"),
    ],
)
def test_unsupported_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        Board(url)
    assert "secret" not in str(error.value)


def test_known_peers_are_read_first_and_others_in_turn(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board with four seats: two known peers keep theirs among twelve others."""
    friends = [member(url)[1] for _ in range(2)]
    crowd = [member(url)[1] for _ in range(12)]
    lower_limits(monkeypatch, peers=4)
    met = set()
    for _ in range(40):
        census = Board(url, known=[friend.peer for friend in friends]).peers()
        assert len(census.hellos) == 4
        assert {friend.peer for friend in friends} <= set(census.hellos)
        met |= set(census.hellos)
    assert len(met) > 10  # the draw depends on the reader's secret
    board = Board(url)
    first = board.peers().hellos
    assert board.peers().hellos == first  # all seats are taken
    leaver = next(who for who in (*friends, *crowd) if who.peer in first)
    Board(url, leaver).publish(goodbye(leaver, board.rules.run))
    assert max(len(board.peers().hellos) for _ in range(4)) == 5  # and one is free again
    own = [set(Board(url, crowd[0]).peers().hellos) for _ in range(3)]
    assert own[0] == own[1] == own[2] and crowd[0].peer in own[0]  # and on nothing else


def test_empty_peer_folders_do_not_block_new_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, peers=8)
    board, _ = member(str(tmp_path))
    for n in range(100):
        (tmp_path / "peers" / f"{n:032x}").mkdir()
    _, newcomer = member(str(tmp_path))
    looks = 0
    while newcomer.peer not in board.peers().hellos:
        looks += 1
        assert looks < 500  # each look finds it with a chance of 7 in 101
