"""How a peer meets the others: whom a round expects, how long it waits, and rounds that the peer slept through."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from planaria.swarm.board import AlreadyThere, Board
from planaria.swarm.config import RoundsConfig
from planaria.swarm.message import Hello, Rollouts
from planaria.swarm.rounds import Gathered, Terms

POLL_S = 0.02
"""between two looks at a board in a local folder"""
POLL_FAR_S = 1.0
"""the same for a board that every look costs a request"""


class Meeting:
    """The board of one run, as one of its peers uses it."""

    def __init__(
        self, board: Board, me: str, rounds: RoundsConfig, near: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``near``: the board is a folder of this machine's."""
        self._board, self.me, self._rounds, self._clock = board, me, rounds, clock
        self._poll_s = POLL_S if near else POLL_FAR_S
        self._absent: set[str] = set()
        """peers that sent nothing for the last round: nobody waits for them until they are heard again"""

    @property
    def run(self) -> str:
        return self._board.rules.run

    def arrive(self, hello: Hello, size: int) -> int:
        """Take part, and wait a while until ``size`` peers do. The round that it said it begins with."""
        joined = self._board.join(hello).joined
        until = self._clock() + self._rounds.timeout_s
        while len(self._board.peers().hellos) < size and self._clock() < until:
            time.sleep(self._poll_s)
        return joined

    def newest(self) -> int:
        """The furthest round that any other peer has published; -1 if none has."""
        others = [peer for peer in self._board.peers().hellos if peer != self.me]
        furthest = -1
        for peer in others:
            while self._there(peer, furthest + 1):
                furthest += 1
        return furthest

    def closed(self, number: int) -> bool:
        """Whether another peer has gone on to the round after ``number``: then nobody waits for this one any more."""
        census = self._board.peers()
        return any(self._there(peer, number + 1) for peer in census.hellos if peer != self.me)

    def publish(self, rollouts: Rollouts) -> None:
        """Append a round's completions. What this peer published before it was restarted stays as it was."""
        try:
            self._board.publish(rollouts)
        except AlreadyThere:
            return

    def gather(self, number: int, closed: bool) -> Gathered:
        """Everybody's completions of a round, once it closes; of one that the others have closed, what is there.

        :raises RoundStalled: when fewer than the quorum came.
        """
        if not self._rounds.gather:
            return self._board.gather(number, [self.me])
        census = self._board.peers()
        everyone = census.members(number)
        awaited = everyone - self._absent | {self.me}
        if closed:
            found = self._board.gather(number, everyone)
        else:
            quorum = math.ceil(self._rounds.quorum * len(awaited))
            terms = Terms(quorum, self._rounds.timeout_s, max(self._rounds.patience_s, self._rounds.timeout_s))
            found = self._board.wait(number, awaited, terms, self._poll_s)
            late = self._board.gather(number, everyone - awaited)
            found = Gathered(found.found | late.found, found.missing + late.missing, found.refused | late.refused)
        self._absent = set(everyone - found.found.keys())
        return found

    def _there(self, peer: str, number: int) -> bool:
        return bool(self._board.gather(number, [peer]).found)
