"""Peers that a reader polls and a round waits for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.board.attendance import (
    MAX_GOODBYE_REPOLLS,
    MAX_HELLO_REPOLLS,
    MAX_UNAWAITED_READS,
    PeerSelector,
    PolledPeers,
    RoundTerms,
)
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import PeerIdentity
from support.swarm.boards import lower_limits, member
from support.swarm.swarm_messages import goodbye, hello, rollouts

PEERS = [PeerIdentity.generate() for _ in range(20)]
CROWD = {f"{n:032x}" for n in range(500)}


@given(st.integers(1, 40), st.sets(st.integers(0, 19), max_size=10), st.lists(st.integers(0, 19), unique=True))
def test_known_peers_always_have_a_seat(spare: int, friends: set[int], arrivals: list[int]) -> None:
    known = {PEERS[n].peer for n in friends}
    roster = PolledPeers(known, len(known) + spare, b"secret")
    names: set[str] = set()
    for n in arrivals:
        names.add(PEERS[n].peer)
        for peer in roster.select_unjoined(names - roster.hellos.keys()):
            roster.hellos[peer] = hello(PEERS[[who.peer for who in PEERS].index(peer)])
        assert known & names <= roster.hellos.keys()
        assert len(roster.hellos) <= len(known) + spare
    assert len(roster.hellos) == len(known & names) + min(spare, len(names - known))


def test_empty_folders_cost_one_read_each_and_then_a_few() -> None:
    roster = PolledPeers({"a"}, 256, b"secret")
    cost = [len(roster.select_unjoined(CROWD)) for _ in range(6)]
    assert cost[:3] == [255, 245 + MAX_HELLO_REPOLLS, MAX_HELLO_REPOLLS] and max(cost[2:]) == MAX_HELLO_REPOLLS


def test_inactive_peers_are_polled_for_goodbyes_in_turn() -> None:
    roster = PolledPeers({"a", "b"}, 256, b"secret")
    roster.hellos = dict.fromkeys(["a", "b", "c", *sorted(CROWD)[:200]], hello(PEERS[0]))
    roster.mark_active(["c"])
    looks = [roster.select_unleft() for _ in range(100)]
    assert all({"a", "b", "c"} <= {*look} and len(look) == 3 + MAX_GOODBYE_REPOLLS for look in looks)
    assert {peer for look in looks for peer in look} == roster.hellos.keys()


def test_many_earlier_peers_do_not_displace_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills every seat before the second of two known peers comes."""
    url, friend = str(tmp_path), PeerIdentity.generate()
    for _ in range(12):
        member(url)
    lower_limits(monkeypatch, peers=6)
    board, me = member(url, known=[friend.peer])
    assert len(board.peers().hellos) == 5 and friend.peer not in board.peers().hellos
    late, _ = member(url, friend)
    late.publish(rollouts(friend, late.rules.run, 0))
    assert {friend.peer, me.peer} <= board.peers().hellos.keys()
    found = board.wait(0, board.peers().members(0) - {me.peer}, RoundTerms(quorum=1, timeout_s=5, patience_s=9)).found
    assert set(found) == {friend.peer}
    Board(url, friend).publish(goodbye(friend, board.rules.run, after=0))
    assert friend.peer not in board.peers().members(1)


def test_silent_unknown_peers_are_not_awaited_and_rarely_read() -> None:
    patience, members = PeerSelector(frozenset("ab")), frozenset("ab") | CROWD
    assert patience.peers_to_await(members) == {"a", "b"}
    draws = [patience.peers_to_read("run", number, members) for number in range(40)]
    assert all({"a", "b"} <= draw and len(draw) == 2 + MAX_UNAWAITED_READS for draw in draws)
    assert len(frozenset().union(*draws)) > 200
    one = min(draws[0] - {"a", "b"})
    patience.record_round(patience.peers_to_await(members), frozenset({"a", "b", one}))
    assert all(one in patience.peers_to_read("run", number, members) for number in range(40))


def test_without_founders_all_members_are_read_at_first() -> None:
    patience = PeerSelector(frozenset())
    assert patience.peers_to_await(CROWD) == CROWD == patience.peers_to_read("run", 0, CROWD)


ALL = frozenset("abx")


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_one_peer_costs_logarithmically_many_timeouts(present: list[bool]) -> None:
    patience, waits = PeerSelector(ALL), 0
    for there in present:
        awaited = patience.peers_to_await(ALL)
        assert {"a", "b"} <= awaited
        received = ALL if there else ALL - {"x"}
        waits += bool(awaited - received)
        patience.record_round(awaited, received)
    assert waits <= 2 + len(present).bit_length() / 2


def test_unknown_peers_together_cost_as_much_as_one() -> None:
    patience, waits = PeerSelector(frozenset("ab")), 0
    crowd = [f"x{n}" for n in range(200)]
    patience.record_round(frozenset(), frozenset({"a", "b", *crowd}))
    for number in range(200):  # in each round another one withholds
        awaited = patience.peers_to_await(frozenset({"a", "b", *crowd}))
        received = frozenset({"a", "b", *crowd}) - {crowd[number]}
        waits += bool(awaited - received)
        patience.record_round(awaited, received)
    assert waits <= 2 + (200).bit_length() / 2


def test_a_peer_absent_once_is_awaited_after_its_return() -> None:
    patience, two = PeerSelector(ALL), frozenset("ab")
    for received, awaited in ((ALL, ALL), (two, two), (ALL, ALL), (two, two), *[(ALL, two)] * 3, (ALL, ALL)):
        patience.record_round(patience.peers_to_await(ALL), received)
        assert patience.peers_to_await(ALL) == awaited
