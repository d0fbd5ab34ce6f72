"""Which peers a round waits for, which ones a reader looks at, and when the round is over: pure decisions."""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256

from planaria.common.errors import RunStopped
from planaria.swarm.board.message import NOT_JSON, NOT_READABLE, Goodbye, Hello, Rollouts

_MAY_STILL_COME = {NOT_JSON, NOT_READABLE}
"""a store may show a message before all of it, or its permissions, are there"""


@dataclass(frozen=True)
class Census:
    """Who takes part, by peer id."""

    hellos: dict[str, Hello]
    goodbyes: dict[str, Goodbye]
    refused: dict[str, str]
    """why, for those whose hello or goodbye is none"""
    left_out: int
    """how many more folders of peers there are than the limit allows to look into"""

    def members(self, round: int) -> frozenset[str]:
        """The peers that send completions for a round: they joined by then and have not left before."""
        left = {peer for peer, goodbye in self.goodbyes.items() if goodbye.after < round}
        return frozenset(peer for peer, hello in self.hellos.items() if hello.joined <= round) - left


@dataclass(frozen=True)
class Gathered:
    """What was found of a round so far, by peer id."""

    found: dict[str, Rollouts]
    missing: tuple[str, ...]
    refused: dict[str, str]
    """why, for those that sent something else"""
    came: Mapping[str, float] = field(default_factory=dict)
    """seconds into the wait, if there was one, until each was found"""

    @property
    def texts(self) -> list[tuple[str, list[str]]]:
        """(peer, all texts that it sent), in no order."""
        return [(peer, [c.text for g in one.groups for c in g.completions]) for peer, one in self.found.items()]

    @property
    def settled(self) -> dict[str, str]:
        """Those of the refused for whom nothing else will come: what is there is whole, and is never replaced."""
        return {peer: why for peer, why in self.refused.items() if why not in _MAY_STILL_COME}

    @property
    def open(self) -> tuple[str, ...]:
        """Those whose message may still come: nothing is there, or what is there may not be whole yet."""
        return (*self.missing, *(self.refused.keys() - self.settled.keys()))

    def updated(self, later: Gathered) -> Gathered:
        """With what a later look at those that were open found."""
        return Gathered(self.found | later.found, later.missing, self.settled | later.refused, self.came)

    def timed(self, elapsed_s: float) -> Gathered:
        """With what was found since then as found now."""
        return replace(self, came={peer: self.came.get(peer, elapsed_s) for peer in self.found})

    def only(self, heard: Set[str], guilty: Mapping[str, str]) -> Gathered:
        """Of what was found, what these sent; the others are missing, or refused because they are ``guilty``."""
        left = {*self.found, *self.missing, *self.refused} - heard
        refused = self.refused | {peer: guilty[peer] for peer in left & guilty.keys()}
        found = {peer: message for peer, message in self.found.items() if peer in heard}
        return replace(self, found=found, missing=tuple(sorted(left - refused.keys())), refused=refused)


class Decision(enum.Enum):
    """What to do about a round."""

    CLOSE = "close"
    """go on with what is there"""
    WAIT = "wait"
    STALLED = "stalled"
    """too few came, for too long"""


@dataclass(frozen=True)
class Terms:
    """How long a round waits for whom."""

    quorum: int
    """with so many messages a round may close before all are there"""
    timeout_s: float
    """from then on the quorum is enough"""
    patience_s: float
    """from then on less than the quorum ends the run"""

    def __post_init__(self) -> None:
        if self.quorum < 0 or not 0 <= self.timeout_s <= self.patience_s:
            raise ValueError(f"a round waits 0 <= timeout_s <= patience_s for a quorum of at least 0, not {self}")


def decide(expected: Set[str], found: Set[str], refused: Set[str], elapsed_s: float, terms: Terms) -> Decision:
    """Whether a round closes after ``elapsed_s`` seconds.

    It closes when a message of everyone expected is there. With a quorum of them it closes as soon as nothing more can
    come, since those that are not there were ``refused`` for good, or after the timeout. With less it stalls after the
    patience. Messages of others than those expected do not count.
    """
    there = expected & found
    if there == expected:
        return Decision.CLOSE
    if len(there) >= terms.quorum and (elapsed_s >= terms.timeout_s or there | refused >= expected):
        return Decision.CLOSE
    return Decision.STALLED if elapsed_s >= terms.patience_s else Decision.WAIT


def until_next(elapsed_s: float, terms: Terms) -> float:
    """Seconds until time alone may change the decision; 0 after the patience."""
    moment = terms.timeout_s if elapsed_s < terms.timeout_s else terms.patience_s
    return max(moment - elapsed_s, 0.0)


class RoundStalled(RunStopped):
    """A round got fewer messages than its quorum, for longer than the run has patience."""

    def __init__(self, run: str, round: int, there: Iterable[str], missing: Mapping[str, str], quorum: int) -> None:
        """``missing``: why, for everyone expected who is not ``there``."""
        self.run, self.round = run, round
        self.there, self.missing = tuple(sorted(there)), dict(sorted(missing.items()))
        names = ", ".join(peer[:8] for peer in self.there) or "nobody"
        absent = ", ".join(f"{peer[:8]} ({why})" for peer, why in self.missing.items())
        came = f"{len(self.there)} of {len(self.there) + len(self.missing)} peers came"
        super().__init__(
            f"run {run[:8]}, round {round}: {came} and the quorum is {quorum}; there: {names}; missing: {absent}"
        )


AGAIN = 8
"""strangers without a hello that a look asks for once more"""
LEFT = 2
"""silent strangers that a look asks whether they have left: it only frees their seats"""


class Roster:
    """Which peers a reader looks at, as far as they were read.

    Ids are free, and each look costs a request. So known peers have seats of their own, which no crowd can take; all
    others share the remaining seats. A stranger is looked at when it is new. Peers that were looked at in vain, or have
    never sent a completion, are looked at again a few at a time.
    """

    def __init__(self, known: Iterable[str], seats: int, secret: bytes) -> None:
        """``seats``: most peers, the known ones among them. ``secret``: what orders strangers, so that nobody can make
        an id that comes before others'."""
        self.known, self._seats, self._secret = {*known}, seats, secret
        self.hellos: dict[str, Hello] = {}
        self.goodbyes: dict[str, Goodbye] = {}
        self._heard: set[str] = set()
        self._looks = 0
        self._looked: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def heard(self, peers: Iterable[str]) -> None:
        """These have sent completions."""
        self._heard.update(peers)

    def newcomers(self, names: Set[str]) -> list[str]:
        """Those of ``names``, of whom no hello was read yet, whose hello this look reads: the known ones, and strangers
        while there are seats, those that were looked at least often first."""
        self._looks += 1
        taken = self.hellos.keys() - self.goodbyes.keys()
        seats = max(0, self._seats - len(taken | self.known))
        drawn = heapq.nsmallest(seats, names - self.known, key=lambda peer: (self._looked[peer], self._lot(peer)))
        again = [peer for peer in drawn if self._looked[peer]][AGAIN:]
        chosen = sorted(names & self.known) + [peer for peer in drawn if peer not in {*again}]
        self._looked.update(chosen)
        return chosen

    def leavers(self) -> list[str]:
        """Those of whom no goodbye was read yet, whose goodbye this look reads: everybody whom a round may wait for,
        and a few of the silent strangers."""
        here = self.hellos.keys() - self.goodbyes.keys()
        silent = here - self.known - self._heard
        again = heapq.nsmallest(LEFT, silent, key=lambda peer: (self._asked[peer], self._lot(peer)))
        self._asked.update(again)
        return sorted(here - silent) + again

    def _lot(self, peer: str) -> bytes:
        return sha256(self._secret + b"%d " % self._looks + peer.encode()).digest()


AT_ONCE = 8
"""strangers in a round whose messages are looked for although nobody waits for them"""
STRANGERS = ""
"""all peers together that were not there first: ids cost nothing, and each new one would be waited for once"""


class Patience:
    """Whom the next round waits for, by the absences of each peer; the same for all that received the same.

    A peer that withholds its message costs everybody the timeout. After each absence it must first be heard in four
    times as many rounds in a row before it is waited for again: in R rounds it costs about log4(R) timeouts, whatever
    it does. A peer that is not waited for still counts if it is in time.
    """

    def __init__(self, founders: Set[str]) -> None:
        """``founders``: peers with an account of their own; unless given, those who are heard first."""
        self.founders = frozenset(founders)
        self._row: Counter[str] | None = None
        self._missed: Counter[str] = Counter()

    @property
    def fresh(self) -> bool:
        """It has heard nobody yet."""
        return self._row is None

    def note(self, awaited: Set[str], heard: Set[str]) -> None:
        """A round is over: who was waited for, and who was heard in it."""
        self.founders = self.founders or frozenset(heard)
        self._missed.update({self._account(peer) for peer in awaited - heard})
        row = self._row or Counter()
        self._row = Counter({peer: row[peer] + 1 for peer in heard})

    def awaited(self, members: Set[str]) -> frozenset[str]:
        """Those of the members whom the next round waits for; before the first, founders if they are known, or all."""
        row = self._row
        if row is None:
            return frozenset(members) & self.founders or frozenset(members)
        return frozenset(peer for peer in members if row[peer] >= self._needed(peer))

    def drawn(self, run: str, number: int, members: Set[str]) -> frozenset[str]:
        """Those of the members whose message of a round is looked for: the founders, those heard last, and a few of the
        others, drawn anew in each round, the same for all who know the same members. Each look costs a request, and all
        strangers together count as one peer anyway (:mod:`planaria.swarm.checks.defence`)."""
        if not self.founders:
            return frozenset(members)
        sure = frozenset(members) & (self.founders | (self._row or {}).keys())
        lots = {peer: sha256(f"{run} {number} {peer}".encode()).digest() for peer in members - sure}
        return sure | frozenset(heapq.nsmallest(AT_ONCE, lots, key=lots.__getitem__))

    def _needed(self, peer: str) -> int:
        """Rounds in a row that it must have been heard in."""
        return 1 << (2 * min(15, max(0, self._missed[self._account(peer)] - 1)))

    def _account(self, peer: str) -> str:
        return peer if peer in self.founders else STRANGERS
