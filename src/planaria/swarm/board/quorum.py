"""How a peer meets the others: whom a round expects, how long it waits, and rounds that the peer slept through.

Peers with equal weights stay equal only while they learn from the same completions, and clocks differ: a message that
comes as a round's time runs out, or from a peer that nobody waits for, is there for one and not yet for another. So
whoever closes a round first says on the board whom it heard, and the others learn from just these. Such a word is
followed only where it cannot shut anybody out: see :meth:`Quorum.gather`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Set

from planaria.swarm.board.attendance import Gathered, Terms
from planaria.swarm.board.board import AlreadyThere, Board
from planaria.swarm.board.message import Closing, Goodbye, Hello, Rollouts
from planaria.swarm.board.patience import Patience
from planaria.swarm.config import RoundsConfig

POLL_S = 0.02
"""between two looks at a board in a local folder"""
POLL_FAR_S = 1.0
"""the same for a board that every look costs a request"""
LOOKS = 10
"""at a message that another peer says it has read"""


class Quorum:
    """The board of one run, as one of its peers uses it."""

    def __init__(
        self,
        board: Board,
        me: str,
        rounds: RoundsConfig,
        size: int,
        near: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``size``: peers that the run was made for. ``near``: the board is a folder of this machine's."""
        self._board, self.me, self._rounds, self._size, self._clock = board, me, rounds, size, clock
        self._poll_s = POLL_S if near else POLL_FAR_S
        self._patience = Patience(frozenset())
        self._began = clock()

    @property
    def run(self) -> str:
        return self._board.rules.run

    def arrive(self, hello: Hello, known: Set[str]) -> int:
        """Take part, and wait a while until all of the run do, ``known`` peers among them: a stranger may have come
        before them. The round that this peer said it begins with.
        """
        size = self._size if self._rounds.gather else 1
        joined = self._board.join(hello).joined
        self._patience = Patience(known)
        until = self._clock() + self._rounds.timeout_s
        while self._clock() < until:
            there = self._board.peers().hellos.keys()
            if len(there) >= size and known <= there:
                break
            time.sleep(self._poll_s)
        return joined

    def newest(self) -> int:
        """The furthest round that a quorum of the other peers has published; -1 if none has."""
        others = [peer for peer in self._board.peers().hellos if peer != self.me]
        reached = sorted((self._furthest(peer) for peer in others), reverse=True)
        return min(reached[self._quorum(others) - 1], self._rounds.count - 1) if others else -1

    def closed(self, number: int) -> bool:
        """Round ``number`` begins for this peer. Whether it is over: then nobody waits for this peer any more.

        It is when a quorum of the others has gone on to the next round. One peer that hurries ahead closes nothing.
        """
        self._began = self._clock()
        if not self._rounds.gather:
            return False
        awaited = self._awaited(number)
        if number + 1 == self._rounds.count:
            first = self._board.closing(number)
            return first is not None and self._named(first, number, awaited) is not None
        ahead = sum(self._there(peer, number + 1) for peer in awaited - {self.me})
        return ahead >= max(1, self._quorum(awaited))

    def publish(self, rollouts: Rollouts) -> None:
        """Append a round's completions. What this peer published before it was restarted stays as it was."""
        try:
            self._board.publish(rollouts)
        except AlreadyThere:
            return

    def leave(self, after: int) -> None:
        """Take no part in what comes after so many rounds: nobody waits for this peer any more."""
        with contextlib.suppress(AlreadyThere):
            self._board.leave(Goodbye(run=self.run, peer=self.me, after=max(0, after - 1)))

    def gather(self, number: int, closed: bool) -> Gathered:
        """The completions of a round that all peers learn from, once it closes; of one that is closed, what was heard.

        The first word on who was heard is followed if it names a quorum of those awaited, if all that it names is
        there, and if it leaves out nobody awaited: or if it does when half of the time to wait for them is over, or
        the round is closed anyway. Otherwise this peer learns from what it found itself.

        :raises RoundStalled: when fewer than the quorum came.
        """
        if not self._rounds.gather:
            return self._board.gather(number, [self.me])
        awaited = self._awaited(number)
        if closed:
            found = self._board.gather(number, self._members(number))
            first = self._board.closing(number)
        else:
            found = self._wait(number, awaited)
            first = self._board.close(number, found.found)
        if first is not None and set(first.heard) != found.found.keys():
            late = self._clock() - self._began >= self._rounds.timeout_s / 2
            if closed or late or awaited <= set(first.heard):
                found = self._named(first, number, awaited) or found
        self._patience.note(awaited, found.found.keys())
        return found

    def _wait(self, number: int, awaited: frozenset[str]) -> Gathered:
        """What those awaited sent, and what others had sent by then."""
        rounds = self._rounds
        terms = Terms(self._quorum(awaited), rounds.timeout_s, max(rounds.patience_s, rounds.timeout_s))
        found = self._board.wait(number, awaited | {self.me}, terms, self._poll_s)
        late = self._board.gather(number, self._members(number) - awaited - {self.me})
        return Gathered(found.found | late.found, found.missing + late.missing, found.refused | late.refused)

    def _named(self, first: Closing, number: int, awaited: frozenset[str]) -> Gathered | None:
        """What those sent whom ``first`` names; None if its word is not to be taken."""
        members, heard = self._members(number), frozenset(first.heard)
        if first.peer not in members or not heard <= members or len(heard & awaited) < self._quorum(awaited):
            return None
        soon = LOOKS * self._poll_s
        found = self._board.wait(number, heard, Terms(0, soon, soon), self._poll_s)
        if found.found.keys() != heard:
            return None
        others = self._board.gather(number, members - heard)
        return Gathered(found.found, tuple(sorted(members - heard - others.refused.keys())), others.refused)

    def _members(self, number: int) -> frozenset[str]:
        return self._board.peers().members(number)

    def _awaited(self, number: int) -> frozenset[str]:
        """Those of the members who have not let others wait lately; all in the first round."""
        if self._patience.fresh and number and (before := self._board.closing(number - 1)):
            self._patience.note(frozenset(), frozenset(before.heard))
        return self._patience.awaited(self._members(number))

    def _quorum(self, peers: Set[str] | list[str]) -> int:
        """How many of them a round needs. Whoever makes up a hundred peers stops nobody who waits for three."""
        return math.ceil(self._rounds.quorum * min(len(peers), self._size))

    def _furthest(self, peer: str) -> int:
        furthest = -1
        while furthest + 1 < self._rounds.count and self._there(peer, furthest + 1):
            furthest += 1
        return furthest

    def _there(self, peer: str, number: int) -> bool:
        return bool(self._board.gather(number, [peer]).found)
