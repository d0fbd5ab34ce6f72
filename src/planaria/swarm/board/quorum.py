"""How a peer meets the others: whom a round expects, how long it waits, and rounds that the peer slept through.

Peers with equal weights stay equal only while they learn from the same completions, and clocks differ: a message that
comes as a round's time runs out, or from a peer that nobody waits for, is there for one and not yet for another. So
each says on the board whom it heard, and where these closings may differ all follow the same one
(:mod:`planaria.swarm.board.receipts`). Where the rules name a committee, its certificate goes before them all.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping, Set

from planaria.swarm.board.attendance import Gathered, Patience, Terms
from planaria.swarm.board.board import AlreadyThere, Board
from planaria.swarm.board.message import Goodbye, Hello, Rollouts
from planaria.swarm.board.receipts import (
    LOOKS,
    Agreement,
    Committee,
    Completed,
    Heard,
    followed,
    matching,
    rewards_in,
    rewards_text,
    text_of,
)
from planaria.swarm.board.word import digest_of, of_round
from planaria.swarm.config import RoundsConfig

POLL_S = 0.02
"""between two looks at a board in a local folder"""
POLL_FAR_S = 1.0
"""the same for a board that every look costs a request"""


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
        committee: Committee | None = None,
    ) -> None:
        """``size``: peers that the run was made for. ``near``: the board is a folder of this machine's."""
        self._board, self.me, self._rounds, self._size, self._clock = board, me, rounds, size, clock
        self._poll_s = POLL_S if near else POLL_FAR_S
        self._patience = Patience(frozenset())
        self._began = clock()
        self.receipts = Agreement(board, me, committee, self._poll_s)
        self._known: tuple[int, frozenset[str]] = (-1, frozenset())
        """a round, and who takes part in it"""
        self._open: dict[int, str] = {}
        """rounds without a certificate so far: whom this peer followed"""
        self._past: tuple[int, Patience] | None = None
        """the first of them, and whom this peer awaited before it"""

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

        It is when a quorum of the others has closed it. One peer that hurries ahead closes nothing.
        """
        self._began = self._clock()
        if not self._rounds.gather:
            return False
        self._members(number)
        awaited = self._awaited(number)
        return len(self._over(number, awaited - {self.me})) >= max(1, self._quorum(awaited))

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

        Closings of others are looked at where they may differ: somebody awaited is missing, somebody else is there, or
        half of the time is over; and always where there is a committee.

        :raises RoundStalled: when fewer than the quorum came.
        """
        if not self._rounds.gather:
            return self._board.gather(number, [self.me])
        awaited = self._awaited(number)
        found = self._board.gather(number, self._drawn(number)) if closed else self._wait(number, awaited)
        if number:  # whoever is here has closed the round before: all who hear the same know the same of it
            self.receipts.look(number - 1, found.found.keys())
        found = self._innocent(found)
        late = self._clock() - self._began >= self._rounds.timeout_s / 2
        if closed or late or found.found.keys() != awaited or self.receipts.committee:
            found = self._agreed(number, awaited, found, closed)
        else:
            self.receipts.close(number, self._heard(number, found))
        self._patience.note(awaited, found.found.keys())
        return found

    def overruled(self, number: int) -> int | None:
        """The round to go back to, before ``number``, if a certificate came late and names others than this peer
        followed: the first that had none. What this peer has gathered since then it forgets.

        Rounds are looked at one, two, four, … rounds later, and at the end of the run.
        """
        for before, text in sorted(self._open.items()):
            later = number - before
            if later & (later - 1) and number < self._rounds.count:
                continue
            named = self.receipts.named(before)
            if named is not None and text_of(named) != text and self._past is not None:
                back, self._patience = self._past
                self._open, self._past = {}, None
                return back
            if named is not None:
                del self._open[before]
        if not self._open:
            self._past = None
        return None

    @property
    def unsettled(self) -> bool:
        """Whether a certificate may still come that sends this peer back."""
        return bool(self._open)

    def rewards(self, number: int, found: Gathered) -> dict[Completed, float]:
        """Certified rewards of what was found; none if there are none."""
        text = self.receipts.certified("rewards", number)
        return rewards_in(text, digest_of(text_of(self._heard(number, found)))) if text else {}

    def vouch(self, number: int, found: Gathered, rewards: Mapping[Completed, float]) -> None:
        """Sign what this peer itself has found the rewards to be."""
        text = rewards_text(digest_of(text_of(self._heard(number, found))), rewards)
        self.receipts.testify("rewards", number, digest_of(text), text)

    def _agreed(self, number: int, awaited: frozenset[str], found: Gathered, closed: bool) -> Gathered:
        """What all follow, by others' closings and, where there is a committee, by its certificate."""
        receipts, committee = self.receipts, self.receipts.committee
        if (named := receipts.named(number)) and (certified := self._follow(number, named, found)):
            receipts.close(number, named)
            receipts.sign_round(number, named)
            return certified
        voters = committee.members if committee else awaited
        early = self._early(found)

        def choose() -> Heard | None:
            lists = receipts.lists(number, voters)
            return followed(lists, voters, awaited, self._quorum(awaited), early)

        def decided() -> bool:
            lists = receipts.lists(number, voters)
            most = max((list(lists.values()).count(heard) for heard in lists.values()), default=0)
            return 2 * most > len(voters) or voters & found.found.keys() <= lists.keys()

        found = self._followed(number, choose(), found)
        receipts.close(number, self._heard(number, found))
        if not closed:
            receipts.settle(decided)
        found = self._followed(number, choose(), found)
        if committee is None:
            return found
        heard = self._heard(number, found)
        receipts.sign_round(number, heard)
        named = receipts.await_round(number, found.found.keys())
        if named is None:
            self._open[number] = text_of(heard)
            self._past = self._past or (number, copy.deepcopy(self._patience))
            return found
        return self._follow(number, named, found) or found

    def _wait(self, number: int, awaited: frozenset[str]) -> Gathered:
        """What those awaited sent, and what others had sent by then."""
        rounds = self._rounds
        terms = Terms(self._quorum(awaited), rounds.timeout_s, max(rounds.patience_s, rounds.timeout_s))
        began = self._clock() - self._began
        found = self._board.wait(number, awaited | {self.me}, terms, self._poll_s)
        late = self._board.gather(number, self._drawn(number) - awaited - {self.me})
        came = {peer: began + seconds for peer, seconds in found.came.items()}
        return Gathered(found.found | late.found, found.missing + late.missing, found.refused | late.refused, came)

    def _early(self, found: Gathered) -> frozenset[str]:
        """Those who were there in the first half of the time: no honest closing leaves them out."""
        return frozenset(peer for peer, seconds in found.came.items() if seconds < self._rounds.timeout_s / 2)

    def _heard(self, number: int, found: Gathered) -> Heard:
        """By digest."""
        ledger, place = self._board.ledger, of_round("rounds", number)
        return {peer: said.digest for peer in found.found if (said := ledger.said(peer, place)) is not None}

    def _followed(self, number: int, heard: Heard | None, found: Gathered) -> Gathered:
        """What those sent whom a closing names; what was found, if there is no closing or something is not there."""
        return (heard and self._follow(number, heard, found)) or self._innocent(found)

    def _follow(self, number: int, heard: Heard, found: Gathered) -> Gathered | None:
        """What those sent whom ``heard`` names, to the letter; None if it is not there, or of others than members."""
        if not matching(heard, self._heard(number, found)):
            if not heard.keys() <= self._members(number):
                return None
            soon = LOOKS * self._poll_s
            more = self._board.wait(number, heard, Terms(0, soon, soon), self._poll_s)
            found = Gathered(found.found | more.found, found.missing, found.refused, found.came)
            if not matching(heard, self._heard(number, found)):
                return None
        return found.only(heard.keys(), self.receipts.guilty())

    def _innocent(self, found: Gathered) -> Gathered:
        """Without those who are proven to have said two things."""
        guilty = self.receipts.guilty()
        return found.only(found.found.keys() - guilty.keys(), guilty)

    def _members(self, number: int) -> frozenset[str]:
        """Those who take part, as far as the board tells by now."""
        self._known = (number, self._board.peers().members(number))
        return self._known[1]

    def _here(self, number: int) -> frozenset[str]:
        """The same as of this peer's last look in that round: a look is a request for each of many peers."""
        round, members = self._known
        return members if round == number else self._members(number)

    def _drawn(self, number: int) -> frozenset[str]:
        """Those of the members whose message of a round this peer looks for."""
        return self._patience.drawn(self.run, number, self._here(number))

    def _awaited(self, number: int) -> frozenset[str]:
        """Those of the members who have not let others wait lately; all in the first round."""
        members = self._here(number) - self.receipts.guilty().keys()
        if self._patience.fresh and number:
            committee = self.receipts.committee
            voters = committee.members if committee else self._patience.founders or members
            lists = self.receipts.lists(number - 1, voters)
            if (before := followed(lists, voters, frozenset(), 0, frozenset())) is not None:
                self._patience.note(frozenset(), before.keys())
        return self._patience.awaited(members)

    def _quorum(self, peers: Set[str] | list[str]) -> int:
        """How many of them a round needs. Whoever makes up a hundred peers stops nobody who waits for three."""
        return math.ceil(self._rounds.quorum * min(len(peers), self._size))

    def _furthest(self, peer: str) -> int:
        furthest = -1
        while furthest + 1 < self._rounds.count and self._there(peer, furthest + 1):
            furthest += 1
        return furthest

    def _over(self, number: int, peers: Set[str]) -> Set[str]:
        """Those that have closed a round, or gone on to the next; nobody has before anybody has closed it."""
        over = set(self._board.closings(number, peers))
        if over and number + 1 < self._rounds.count:
            over |= self._board.gather(number + 1, peers - over).found.keys()
        return over

    def _there(self, peer: str, number: int) -> bool:
        return bool(self._board.gather(number, [peer]).found)
