"""A peer's rounds on a board: awaited peers, waiting times, and rounds that the peer missed.

Peers with equal weights stay equal only if they learn from the same completions. A message that arrives near the end of
a round, or from a peer that is not awaited, may be visible to one reader and not to another. Each peer therefore
publishes a closing with the messages it received, and all follow the same closing
(:mod:`planaria.swarm.board.receipts`). A certificate of the committee, if the rules name one, takes precedence.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping, Set

from planaria.swarm.board.attendance import PeerSelector, RoundMessages, RoundTerms
from planaria.swarm.board.board import AlreadyThere, Board
from planaria.swarm.board.claims import digest_of, of_round
from planaria.swarm.board.message import Goodbye, Hello, Rollouts
from planaria.swarm.board.receipts import (
    MAX_POLLS,
    Agreement,
    Committee,
    Completed,
    MessageList,
    majority_list,
    matching,
    rewards_in,
    rewards_text,
    text_of,
)
from planaria.swarm.config.rounds import RoundsConfig

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
        near: bool,
        clock: Callable[[], float] = time.monotonic,
        committee: Committee | None = None,
    ) -> None:
        """``size``: intended number of peers. ``near``: the board is a local folder."""
        self._board = board
        self.me = me
        self._rounds = rounds
        self._size = size
        self._clock = clock
        self._poll_s = POLL_S if near else POLL_FAR_S
        self._patience = PeerSelector(frozenset())
        self._began = clock()
        self.receipts = Agreement(board, me, committee, self._poll_s)
        self._known: tuple[int, frozenset[str]] = (-1, frozenset())
        """(round, its members)"""
        self._uncertified: dict[int, str] = {}
        """rounds without a certificate so far → the message list this peer followed"""
        self._past: tuple[int, PeerSelector] | None = None
        """the first of them, and the patience before it"""

    @property
    def run(self) -> str:
        return self._board.rules.run

    def arrive(self, hello: Hello, known: Set[str]) -> int:
        """Join, and wait up to ``timeout_s`` until all peers of the run have, including the ``known`` ones.

        Return this peer's first round.
        """
        size = self._size if self._rounds.gather else 1
        joined = self._board.join(hello).joined
        self._patience = PeerSelector(known)
        until = self._clock() + self._rounds.timeout_s
        while self._clock() < until:
            joined_peers = self._board.peers().hellos.keys()
            if len(joined_peers) >= size and known <= joined_peers:
                break
            time.sleep(self._poll_s)
        return joined

    def newest(self) -> int:
        """Return the last round that a quorum of the other peers has published; -1 if none."""
        others = [peer for peer in self._board.peers().hellos if peer != self.me]
        reached = sorted((self._last_published_round(peer) for peer in others), reverse=True)
        return min(reached[self._quorum(others) - 1], self._rounds.count - 1) if others else -1

    def closed(self, number: int) -> bool:
        """Begin round ``number``; return whether a quorum of the other peers has closed it already."""
        self._began = self._clock()
        if not self._rounds.gather:
            return False
        self._members(number)
        awaited = self._awaited(number)
        return len(self._peers_past_round(number, awaited - {self.me})) >= max(1, self._quorum(awaited))

    def publish(self, rollouts: Rollouts) -> None:
        """Append a round's completions; those published before a restart stay."""
        try:
            self._board.publish(rollouts)
        except AlreadyThere:
            return

    def leave(self, after: int) -> None:
        """Leave the run after ``after`` rounds."""
        with contextlib.suppress(AlreadyThere):
            self._board.leave(Goodbye(run=self.run, peer=self.me, after=max(0, after - 1)))

    def gather(self, number: int, closed: bool) -> RoundMessages:
        """Return the completions of a round that all peers learn from, once the round closes.

        Other peers' closings are read when they may differ: an awaited peer is missing, another one is there, or half
        of the time is over; and always with a committee.

        :raises RoundStalled: if the round stays below its quorum.
        """
        if not self._rounds.gather:
            return self._board.gather(number, [self.me])
        awaited = self._awaited(number)
        result = self._board.gather(number, self._drawn(number)) if closed else self._wait(number, awaited)
        if number:  # peers here have closed the round before: equal readers know the same of it
            self.receipts.look(number - 1, result.found.keys())
        result = self._without_equivocators(result)
        late = self._clock() - self._began >= self._rounds.timeout_s / 2
        if closed or late or result.found.keys() != awaited or self.receipts.committee:
            result = self._agreed(number, awaited, result, closed)
        else:
            self.receipts.close(number, self._message_list(number, result))
        self._patience.note(awaited, result.found.keys())
        return result

    def overruled(self, number: int) -> int | None:
        """Return the first round without a certificate, to restart from, if a later certificate contradicts it.

        Rounds are checked 1, 2, 4, … rounds later, and at the end of the run. The rounds since are forgotten.
        """
        for before, text in sorted(self._uncertified.items()):
            later = number - before
            if later & (later - 1) and number < self._rounds.count:
                continue
            named = self.receipts.named(before)
            if named is not None and text_of(named) != text and self._past is not None:
                back, self._patience = self._past
                self._uncertified, self._past = {}, None
                return back
            if named is not None:
                del self._uncertified[before]
        if not self._uncertified:
            self._past = None
        return None

    @property
    def may_be_overruled(self) -> bool:
        """Whether a pending certificate may still send this peer back."""
        return bool(self._uncertified)

    def rewards(self, number: int, messages: RoundMessages) -> dict[Completed, float]:
        """Return the certified rewards of the messages found; empty if there are none."""
        text = self.receipts.certified("rewards", number)
        return rewards_in(text, digest_of(text_of(self._message_list(number, messages)))) if text else {}

    def vouch(self, number: int, messages: RoundMessages, rewards: Mapping[Completed, float]) -> None:
        """Sign the rewards that this peer computed."""
        text = rewards_text(digest_of(text_of(self._message_list(number, messages))), rewards)
        self.receipts.publish_receipt("rewards", number, digest_of(text), text)

    def _agreed(self, number: int, awaited: frozenset[str], result: RoundMessages, closed: bool) -> RoundMessages:
        """Select the messages that all peers follow, by certificate or else by closings."""
        receipts, committee = self.receipts, self.receipts.committee
        if (named := receipts.named(number)) and (certified := self._follow(number, named, result)):
            receipts.close(number, named)
            receipts.sign_round(number, named)
            return certified
        voters = committee.members if committee else awaited
        early = self._early(result)

        def choose() -> MessageList | None:
            lists = receipts.lists(number, voters)
            return majority_list(lists, voters, awaited, self._quorum(awaited), early)

        def decided() -> bool:
            lists = receipts.lists(number, voters)
            most = max((list(lists.values()).count(each) for each in lists.values()), default=0)
            return 2 * most > len(voters) or voters & result.found.keys() <= lists.keys()

        result = self._followed(number, choose(), result)
        receipts.close(number, self._message_list(number, result))
        if not closed:
            receipts.poll_until(decided)
        result = self._followed(number, choose(), result)
        if committee is None:
            return result
        messages = self._message_list(number, result)
        receipts.sign_round(number, messages)
        named = receipts.await_round(number, result.found.keys())
        if named is None:
            self._uncertified[number] = text_of(messages)
            self._past = self._past or (number, copy.deepcopy(self._patience))
            return result
        return self._follow(number, named, result) or result

    def _wait(self, number: int, awaited: frozenset[str]) -> RoundMessages:
        """Return the messages of awaited peers, and those of others that arrived by then."""
        rounds = self._rounds
        terms = RoundTerms(self._quorum(awaited), rounds.timeout_s, max(rounds.patience_s, rounds.timeout_s))
        began = self._clock() - self._began
        result = self._board.wait(number, awaited | {self.me}, terms, self._poll_s)
        late = self._board.gather(number, self._drawn(number) - awaited - {self.me})
        came = {peer: began + seconds for peer, seconds in result.arrival_s.items()}
        return RoundMessages(
            result.found | late.found, result.missing + late.missing, result.refused | late.refused, came
        )

    def _early(self, messages: RoundMessages) -> frozenset[str]:
        """Peers that arrived in the first half of the time: every honest closing lists them."""
        return frozenset(peer for peer, seconds in messages.arrival_s.items() if seconds < self._rounds.timeout_s / 2)

    def _message_list(self, number: int, messages: RoundMessages) -> MessageList:
        """Return the digest of each message found, by peer."""
        ledger, location = self._board.ledger, of_round("rounds", number)
        return {peer: claim.digest for peer in messages.found if (claim := ledger.claim(peer, location)) is not None}

    def _followed(self, number: int, messages: MessageList | None, found: RoundMessages) -> RoundMessages:
        """Return the messages of the list ``messages``, or those found if it is None or incomplete on the board."""
        return (messages and self._follow(number, messages, found)) or self._without_equivocators(found)

    def _follow(self, number: int, messages: MessageList, found: RoundMessages) -> RoundMessages | None:
        """Return exactly the listed messages; None if one is missing or of a non-member."""
        if not matching(messages, self._message_list(number, found)):
            if not messages.keys() <= self._members(number):
                return None
            soon = MAX_POLLS * self._poll_s
            more = self._board.wait(number, messages, RoundTerms(0, soon, soon), self._poll_s)
            found = RoundMessages(found.found | more.found, found.missing, found.refused, found.arrival_s)
            if not matching(messages, self._message_list(number, found)):
                return None
        return found.only(messages.keys(), self.receipts.guilty())

    def _without_equivocators(self, messages: RoundMessages) -> RoundMessages:
        """Drop the messages of proven equivocators."""
        guilty = self.receipts.guilty()
        return messages.only(messages.found.keys() - guilty.keys(), guilty)

    def _members(self, number: int) -> frozenset[str]:
        """Read the current members of a round."""
        self._known = (number, self._board.peers().members(number))
        return self._known[1]

    def _here(self, number: int) -> frozenset[str]:
        """Return the members as of the last read in that round: a read costs a request per peer."""
        round, members = self._known
        return members if round == number else self._members(number)

    def _drawn(self, number: int) -> frozenset[str]:
        """Members whose message of a round this peer reads."""
        return self._patience.drawn(self.run, number, self._here(number))

    def _awaited(self, number: int) -> frozenset[str]:
        """Members that were not absent lately; all in the first round."""
        members = self._here(number) - self.receipts.guilty().keys()
        if self._patience.fresh and number:
            committee = self.receipts.committee
            voters = committee.members if committee else self._patience.founders or members
            lists = self.receipts.lists(number - 1, voters)
            if (before := majority_list(lists, voters, frozenset(), 0, frozenset())) is not None:
                self._patience.note(frozenset(), before.keys())
        return self._patience.awaited(members)

    def _quorum(self, peers: Set[str] | list[str]) -> int:
        """Number of these peers that a round needs; bounded by the run's size, so that fake peers cannot block it."""
        return math.ceil(self._rounds.quorum * min(len(peers), self._size))

    def _last_published_round(self, peer: str) -> int:
        furthest = -1
        while furthest + 1 < self._rounds.count and self._board.gather(furthest + 1, [peer]).found:
            furthest += 1
        return furthest

    def _peers_past_round(self, number: int, peers: Set[str]) -> Set[str]:
        """Return the peers past a round: they closed it, or published in the next, which follows a closing."""
        over = set(self._board.closings(number, peers))
        if over and number + 1 < self._rounds.count:
            over |= self._board.gather(number + 1, peers - over).found.keys()
        return over
