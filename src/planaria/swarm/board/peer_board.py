"""A peer's rounds on a board: awaited peers, waiting times, and missed rounds.

Peers with equal weights stay equal only if they learn from the same completions. One reader may see a message that
another does not: if it arrives near the end of a round, or from a peer that is not awaited. Each peer therefore
publishes a closing with the messages it received, and all follow the same closing. A certificate of the committee, if
the run has one, takes precedence (:mod:`planaria.swarm.board.receipts`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from planaria.swarm.board.attendance import PeerSelector, RoundMessages, RoundTerms
from planaria.swarm.board.board import AlreadyPublished, Board
from planaria.swarm.board.claims import digest_of, round_path
from planaria.swarm.board.message import Goodbye, Hello, Rollouts
from planaria.swarm.board.receipts import (
    MAX_POLLS,
    Agreement,
    Committee,
    Completed,
    MessageList,
    contains_all,
    list_text,
    majority_list,
    parse_rewards,
    rewards_text,
)
from planaria.swarm.config.rounds_config import RoundsConfig

POLL_S = 0.02
"""seconds between two reads of a board in a local folder"""
POLL_FAR_S = 1.0
"""seconds between two reads of a remote board"""


class PeerBoard:
    """The board of one run, as used by one of its peers."""

    def __init__(
        self,
        board: Board,
        me: str,
        rounds: RoundsConfig,
        size: int,
        is_local: bool,
        clock: Callable[[], float] = time.monotonic,
        committee: Committee | None = None,
    ) -> None:
        """Open the run on ``board`` as peer ``me``.

        :param size: intended number of peers
        :param is_local: the board is a local folder
        """
        self._board = board
        self.me = me
        self._rounds = rounds
        self._size = size
        self._clock = clock
        self._poll_s = POLL_S if is_local else POLL_FAR_S
        self._selector = PeerSelector(frozenset())
        self._began = clock()
        self.receipts = Agreement(board, me, committee, self._poll_s)
        self._last_members: tuple[int, frozenset[str]] = (-1, frozenset())
        """(round, its members)"""
        self._invalid_members: dict[str, str] = {}
        """peer → reason why its hello or goodbye is invalid, when members were last read"""
        self._uncertified: dict[int, str] = {}
        """round without a certificate → the message list that this peer followed"""
        self._past: tuple[int, PeerSelector] | None = None
        """first round without a certificate, and the selector before it"""

    @property
    def run(self) -> str:
        return self._board.rules.run

    def join_and_wait(self, hello: Hello, known: Set[str]) -> int:
        """Join the run, wait up to ``timeout_s`` for the other peers, and return this peer's first round.

        The wait ends when ``size`` peers have joined, all ``known`` ones among them.
        """
        size = self._size if self._rounds.gather else 1
        joined = self._board.join(hello).joined
        self._selector = PeerSelector(known)
        until = self._clock() + self._rounds.timeout_s
        while self._clock() < until:
            joined_peers = self._board.peers().hellos.keys()
            if len(joined_peers) >= size and known <= joined_peers:
                break
            time.sleep(self._poll_s)
        return joined

    def newest(self) -> int:
        """Return the last round that a quorum of the other peers has published; -1 without one."""
        others = [peer for peer in self._board.peers().hellos if peer != self.me]
        reached = sorted((self._last_published_round(peer) for peer in others), reverse=True)
        return min(reached[self._quorum_size(others) - 1], self._rounds.count - 1) if others else -1

    def begin_round(self, round_number: int) -> bool:
        """Begin a round; return whether a quorum of the other peers has already closed it."""
        self._began = self._clock()
        if not self._rounds.gather:
            return False
        self._read_members(round_number)
        awaited = self._peers_to_await(round_number)
        return len(self._peers_past_round(round_number, awaited - {self.me})) >= max(1, self._quorum_size(awaited))

    def publish(self, rollouts: Rollouts) -> None:
        """Append a round's completions; those published before a restart stay."""
        with contextlib.suppress(AlreadyPublished):
            self._board.publish(rollouts)

    def leave(self, after: int) -> None:
        """Leave the run after ``after`` rounds."""
        with contextlib.suppress(AlreadyPublished):
            self._board.publish(Goodbye(run=self.run, peer=self.me, after=max(0, after - 1)))

    def gather(self, round_number: int, closed: bool) -> RoundMessages:
        """Return the completions of a round that all peers learn from, once the round closes.

        With a committee, other peers' closings are always read. Without one they are read only when they may differ: an
        awaited peer is missing, a member is not awaited, or half of the time has passed. Members are read again, since
        an awaited peer may have begun the round with a member that joined after this peer began.

        :raises RoundStalled: if the round stays below its quorum.
        """
        if not self._rounds.gather:
            return self._board.gather(round_number, [self.me])
        awaited = self._peers_to_await(round_number)
        result = (
            self._board.gather(round_number, self._peers_to_read(round_number))
            if closed
            else self._await_messages(round_number, awaited)
        )
        if round_number:  # these peers have closed the previous round
            self.receipts.read_closings(round_number - 1, result.found.keys())
        result = self._without_equivocators(result)
        is_late = self._clock() - self._began >= self._rounds.timeout_s / 2
        may_differ = closed or is_late or result.found.keys() != awaited or self.receipts.committee
        if may_differ or self._has_other_members(round_number, awaited):
            result = self._agree(round_number, awaited, result, closed)
        else:
            self.receipts.publish_closing(round_number, self._message_list(round_number, result))
        self._selector.record_round(awaited, result.found.keys())
        return replace(result, rejected=self._invalid_members | result.rejected)

    def overruled_round(self, round_number: int) -> int | None:
        """Return the round to restart from if a certificate contradicts what this peer followed; else None.

        Uncertified rounds are checked 1, 2, 4, … rounds later and at the end of the run. The restart is from the first
        of them, and the rounds after it are forgotten.
        """
        for before, text in sorted(self._uncertified.items()):
            later = round_number - before
            if later & (later - 1) and round_number < self._rounds.count:
                continue
            certified = self.receipts.certified_list(before)
            if certified is not None and list_text(certified) != text and self._past is not None:
                back, self._selector = self._past
                self._uncertified, self._past = {}, None
                return back
            if certified is not None:
                del self._uncertified[before]
        if not self._uncertified:
            self._past = None
        return None

    @property
    def may_be_overruled(self) -> bool:
        """Whether a pending certificate may still make this peer restart from an earlier round."""
        return bool(self._uncertified)

    def rewards(self, round_number: int, messages: RoundMessages) -> dict[Completed, float]:
        """Return the certified rewards of these messages; empty without a certificate."""
        text = self.receipts.certified_text("rewards", round_number)
        return parse_rewards(text, digest_of(list_text(self._message_list(round_number, messages)))) if text else {}

    def sign_rewards(self, round_number: int, messages: RoundMessages, rewards: Mapping[Completed, float]) -> None:
        """Sign the rewards that this peer computed."""
        text = rewards_text(digest_of(list_text(self._message_list(round_number, messages))), rewards)
        self.receipts.publish_receipt("rewards", round_number, digest_of(text), text)

    def _agree(self, round_number: int, awaited: frozenset[str], result: RoundMessages, closed: bool) -> RoundMessages:
        """Select the messages that all peers follow, by certificate or else by closings."""
        receipts, committee = self.receipts, self.receipts.committee
        if (listed := receipts.certified_list(round_number)) and (
            followed := self._follow(round_number, listed, result)
        ):
            receipts.publish_closing(round_number, listed)
            receipts.sign_round(round_number, listed)
            return followed
        voters = committee.members if committee else awaited
        # Every honest closing lists the peers that arrived in the first half of the time.
        early = frozenset(peer for peer, s in result.arrival_s.items() if s < self._rounds.timeout_s / 2)

        def choose() -> MessageList | None:
            lists = receipts.message_lists(round_number, voters)
            return majority_list(lists, voters, awaited, self._quorum_size(awaited), early)

        def is_decided() -> bool:
            lists = receipts.message_lists(round_number, voters)
            largest = max((list(lists.values()).count(each) for each in lists.values()), default=0)
            return 2 * largest > len(voters) or voters & result.found.keys() <= lists.keys()

        result = self._follow_or_keep(round_number, choose(), result)
        receipts.publish_closing(round_number, self._message_list(round_number, result))
        if not closed:
            receipts.poll_until(is_decided)
        result = self._follow_or_keep(round_number, choose(), result)
        if committee is None:
            return result
        messages = self._message_list(round_number, result)
        receipts.sign_round(round_number, messages)
        certified = receipts.await_certificate(round_number, result.found.keys())
        if certified is None:
            self._uncertified[round_number] = list_text(messages)
            self._past = self._past or (round_number, copy.deepcopy(self._selector))
            return result
        return self._follow(round_number, certified, result) or result

    def _await_messages(self, round_number: int, awaited: frozenset[str]) -> RoundMessages:
        """Return the messages of the awaited peers and of the others that have arrived when these are complete."""
        rounds = self._rounds
        terms = RoundTerms(self._quorum_size(awaited), rounds.timeout_s, max(rounds.patience_s, rounds.timeout_s))
        began = self._clock() - self._began
        result = self._board.wait(round_number, awaited | {self.me}, terms, self._poll_s)
        others = self._board.gather(round_number, self._peers_to_read(round_number) - awaited - {self.me})
        arrival_s = {peer: began + seconds for peer, seconds in result.arrival_s.items()}
        return RoundMessages(
            result.found | others.found, result.missing + others.missing, result.rejected | others.rejected, arrival_s
        )

    def _message_list(self, round_number: int, messages: RoundMessages) -> MessageList:
        ledger, location = self._board.ledger, round_path("rounds", round_number)
        return {peer: claim.digest for peer in messages.found if (claim := ledger.claim(peer, location)) is not None}

    def _follow_or_keep(self, round_number: int, messages: MessageList | None, found: RoundMessages) -> RoundMessages:
        """Return the messages of the list ``messages``, or those found if it is None or incomplete on the board."""
        return (messages and self._follow(round_number, messages, found)) or self._without_equivocators(found)

    def _follow(self, round_number: int, messages: MessageList, found: RoundMessages) -> RoundMessages | None:
        """Return exactly the listed messages, or None if one is missing or its sender is not a member."""
        if not contains_all(messages, self._message_list(round_number, found)):
            if not messages.keys() <= self._read_members(round_number):
                return None
            soon = MAX_POLLS * self._poll_s
            more = self._board.wait(round_number, messages, RoundTerms(0, soon, soon), self._poll_s)
            found = RoundMessages(found.found | more.found, found.missing, found.rejected, found.arrival_s)
            if not contains_all(messages, self._message_list(round_number, found)):
                return None
        return found.restrict_to(messages.keys(), self.receipts.equivocators())

    def _without_equivocators(self, messages: RoundMessages) -> RoundMessages:
        """Drop the messages of proven equivocators."""
        equivocators = self.receipts.equivocators()
        return messages.restrict_to(messages.found.keys() - equivocators.keys(), equivocators)

    def _has_other_members(self, round_number: int, awaited: Set[str]) -> bool:
        """Return whether a round has members now that are not awaited, and whose messages another peer may read."""
        members = self._read_members(round_number)
        return not self._selector.peers_to_read(self.run, round_number, members) <= awaited

    def _read_members(self, round_number: int) -> frozenset[str]:
        census = self._board.peers()
        self._last_members, self._invalid_members = (round_number, census.members(round_number)), census.rejected
        return self._last_members[1]

    def _known_members(self, round_number: int) -> frozenset[str]:
        """Return the members of a round without reading them again, which costs a request per peer."""
        round, members = self._last_members
        return members if round == round_number else self._read_members(round_number)

    def _peers_to_read(self, round_number: int) -> frozenset[str]:
        return self._selector.peers_to_read(self.run, round_number, self._known_members(round_number))

    def _peers_to_await(self, round_number: int) -> frozenset[str]:
        """Return the members that were not absent recently; all in the first round."""
        members = self._known_members(round_number) - self.receipts.equivocators().keys()
        if self._selector.is_new and round_number:
            committee = self.receipts.committee
            voters = committee.members if committee else self._selector.founders or members
            lists = self.receipts.message_lists(round_number - 1, voters)
            if (before := majority_list(lists, voters, frozenset(), 0, frozenset())) is not None:
                self._selector.record_round(frozenset(), before.keys())
        return self._selector.peers_to_await(members)

    def _quorum_size(self, peers: Set[str] | list[str]) -> int:
        """Return the number of peers that a round needs, bounded by the run's size: fake peers cannot block it."""
        return math.ceil(self._rounds.quorum * min(len(peers), self._size))

    def _last_published_round(self, peer: str) -> int:
        furthest = -1
        while furthest + 1 < self._rounds.count and self._board.gather(furthest + 1, [peer]).found:
            furthest += 1
        return furthest

    def _peers_past_round(self, round_number: int, peers: Set[str]) -> Set[str]:
        """Return the peers past a round: they closed it, or published in the next, which follows a closing."""
        over = set(self._board.closings(round_number, peers))
        if over and round_number + 1 < self._rounds.count:
            over |= self._board.gather(round_number + 1, peers - over).found.keys()
        return over
