"""Pure decisions: which peers a reader polls, which peers a round waits for, and when the round closes."""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256

from planaria.common.errors import RunStopped
from planaria.common.object_store import NOT_READABLE
from planaria.swarm.board.message import NOT_JSON, Goodbye, Hello, Rollouts

_MAY_STILL_COME = {NOT_JSON, NOT_READABLE}
"""reasons that may disappear: a store may show a message before its content or permissions are complete"""


@dataclass(frozen=True)
class Census:
    """Participants of a run, by peer id."""

    hellos: dict[str, Hello]
    goodbyes: dict[str, Goodbye]
    refused: dict[str, str]
    """reason, for each peer whose hello or goodbye is invalid"""
    left_out: int
    """number of peer folders beyond the limit that were not read"""

    def members(self, round: int) -> frozenset[str]:
        """Return the peers that joined by ``round`` and did not leave before it."""
        left = {peer for peer, goodbye in self.goodbyes.items() if goodbye.after < round}
        return frozenset(peer for peer, hello in self.hellos.items() if hello.joined <= round) - left


@dataclass(frozen=True)
class RoundMessages:
    """Messages received in a round so far, by peer id."""

    found: dict[str, Rollouts]
    missing: tuple[str, ...]
    refused: dict[str, str]
    """reason, for each peer whose message is invalid"""
    arrival_s: Mapping[str, float] = field(default_factory=dict)
    """seconds from the start of the wait until each message arrived"""

    @property
    def texts(self) -> list[tuple[str, list[str]]]:
        """(peer, all its texts), unordered."""
        return [
            (peer, [c.text for g in rollouts.groups for c in g.completions]) for peer, rollouts in self.found.items()
        ]

    @property
    def refused_permanently(self) -> dict[str, str]:
        """Permanently refused peers: their messages are complete, and messages are never replaced."""
        return {peer: why for peer, why in self.refused.items() if why not in _MAY_STILL_COME}

    @property
    def open(self) -> tuple[str, ...]:
        """Peers whose message is missing or may still be incomplete."""
        return (*self.missing, *(self.refused.keys() - self.refused_permanently.keys()))

    def updated(self, later: RoundMessages) -> RoundMessages:
        """Merge a later read of the open peers."""
        return RoundMessages(
            self.found | later.found, later.missing, self.refused_permanently | later.refused, self.arrival_s
        )

    def timed(self, elapsed_s: float) -> RoundMessages:
        """Set the arrival time of the new messages to ``elapsed_s``."""
        return replace(self, arrival_s={peer: self.arrival_s.get(peer, elapsed_s) for peer in self.found})

    def only(self, listed: Set[str], guilty: Mapping[str, str]) -> RoundMessages:
        """Keep the messages of ``listed`` peers; mark the other peers missing, or refused if they are in ``guilty``."""
        left = {*self.found, *self.missing, *self.refused} - listed
        refused = self.refused | {peer: guilty[peer] for peer in left & guilty.keys()}
        result = {peer: message for peer, message in self.found.items() if peer in listed}
        return replace(self, found=result, missing=tuple(sorted(left - refused.keys())), refused=refused)


class Decision(enum.Enum):
    """State of a round."""

    CLOSE = "close"
    """learn from the messages received"""
    WAIT = "wait"
    STALLED = "stalled"
    """below the quorum after the patience"""


@dataclass(frozen=True)
class RoundTerms:
    """Quorum and time limits of a round."""

    quorum: int
    """number of messages that closes a round after the timeout"""
    timeout_s: float
    """seconds after which the quorum is enough"""
    patience_s: float
    """seconds after which a round below the quorum ends the run"""

    def __post_init__(self) -> None:
        if self.quorum < 0 or not 0 <= self.timeout_s <= self.patience_s:
            raise ValueError(f"a round waits 0 <= timeout_s <= patience_s for a quorum of at least 0, not {self}")


def decide(expected: Set[str], found: Set[str], refused: Set[str], elapsed_s: float, terms: RoundTerms) -> Decision:
    """Decide whether a round closes after ``elapsed_s`` seconds.

    It closes when all expected messages are there. With a quorum, it closes after the timeout, or at once if all other
    peers are permanently ``refused``. Below the quorum it stalls after the patience. Messages of unexpected peers do
    not count.
    """
    present = expected & found
    if present == expected:
        return Decision.CLOSE
    if len(present) >= terms.quorum and (elapsed_s >= terms.timeout_s or present | refused >= expected):
        return Decision.CLOSE
    return Decision.STALLED if elapsed_s >= terms.patience_s else Decision.WAIT


def until_next(elapsed_s: float, terms: RoundTerms) -> float:
    """Return the seconds until time alone may change the decision; 0 after the patience."""
    moment = terms.timeout_s if elapsed_s < terms.timeout_s else terms.patience_s
    return max(moment - elapsed_s, 0.0)


class RoundStalled(RunStopped):
    """A round stayed below its quorum for longer than its patience."""

    def __init__(self, run: str, round: int, there: Iterable[str], missing: Mapping[str, str], quorum: int) -> None:
        """``missing``: reason, by absent peer."""
        self.run, self.round = run, round
        self.there, self.missing = tuple(sorted(there)), dict(sorted(missing.items()))
        names = ", ".join(peer[:8] for peer in self.there) or "none"
        absent = ", ".join(f"{peer[:8]} ({why})" for peer, why in self.missing.items())
        came = f"{len(self.there)} of {len(self.there) + len(self.missing)} peers are present"
        super().__init__(
            f"run {run[:8]}, round {round}: {came} and the quorum is {quorum}; present: {names}; missing: {absent}"
        )


AGAIN = 8
"""maximum number of peers without a hello that one read polls again"""
LEFT = 2
"""maximum number of inactive peers polled for a goodbye, which frees their seats"""


class PolledPeers:
    """Peers that a reader polls.

    Peer ids are free to create, and each read costs a request. Known peers have reserved seats; all others share the
    rest. A new peer is polled once. Peers without a hello, and peers that never sent completions, are polled again a
    few at a time.
    """

    def __init__(self, known: Iterable[str], seats: int, secret: bytes) -> None:
        """``seats``: maximum number of peers, including the known ones. ``secret``: seeds the order of unknown peers,
        so that no peer can choose an id that sorts first."""
        self.known = {*known}
        self._seats = seats
        self._secret = secret
        self.hellos: dict[str, Hello] = {}
        self.goodbyes: dict[str, Goodbye] = {}
        self._active: set[str] = set()
        self._looks = 0
        self._looked: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def mark_active(self, peers: Iterable[str]) -> None:
        """Record that these peers sent completions."""
        self._active.update(peers)

    def newcomers(self, names: Set[str]) -> list[str]:
        """Select the peers without a hello to read: known peers, then unknown ones while seats are free, least polled
        first."""
        self._looks += 1
        taken = self.hellos.keys() - self.goodbyes.keys()
        seats = max(0, self._seats - len(taken | self.known))
        drawn = heapq.nsmallest(seats, names - self.known, key=lambda peer: (self._looked[peer], self._lot(peer)))
        again = [peer for peer in drawn if self._looked[peer]][AGAIN:]
        chosen = sorted(names & self.known) + [peer for peer in drawn if peer not in {*again}]
        self._looked.update(chosen)
        return chosen

    def leavers(self) -> list[str]:
        """Select the peers without a goodbye to read: all peers that a round may wait for, and a few inactive ones."""
        members = self.hellos.keys() - self.goodbyes.keys()
        silent = members - self.known - self._active
        again = heapq.nsmallest(LEFT, silent, key=lambda peer: (self._asked[peer], self._lot(peer)))
        self._asked.update(again)
        return sorted(members - silent) + again

    def _lot(self, peer: str) -> bytes:
        return sha256(self._secret + b"%d " % self._looks + peer.encode()).digest()


AT_ONCE = 8
"""maximum number of peers per round that are read without being awaited"""
STRANGERS = ""
"""shared account of all peers that are not founders: each free id would otherwise cost one timeout"""


class PeerSelector:
    """Selects the peers that the next round waits for; equal for all readers with equal inputs.

    After each absence, a peer must be received in four times as many consecutive rounds before it is awaited again. A
    peer that withholds messages thus costs about log4(R) timeouts in R rounds. A peer that is not awaited still counts
    if it is in time.
    """

    def __init__(self, founders: Set[str]) -> None:
        """``founders``: peers with an account of their own; if empty, the first peers received."""
        self.founders = frozenset(founders)
        self._row: Counter[str] | None = None
        self._missed: Counter[str] = Counter()

    @property
    def fresh(self) -> bool:
        """Whether no round was noted yet."""
        return self._row is None

    def note(self, awaited: Set[str], received: Set[str]) -> None:
        """Record a finished round."""
        self.founders = self.founders or frozenset(received)
        self._missed.update({self._account(peer) for peer in awaited - received})
        row = self._row or Counter()
        self._row = Counter({peer: row[peer] + 1 for peer in received})

    def awaited(self, members: Set[str]) -> frozenset[str]:
        """Return the members to wait for; before the first round, the founders if known, else all."""
        row = self._row
        if row is None:
            return frozenset(members) & self.founders or frozenset(members)
        return frozenset(peer for peer in members if row[peer] >= self._needed(peer))

    def drawn(self, run: str, number: int, members: Set[str]) -> frozenset[str]:
        """Return the members whose message of a round is read: founders, the last peers received, and a few others.

        The others are redrawn each round, equally for all readers with the same members. All non-founders count as one
        peer (:mod:`planaria.swarm.checks.defence`)."""
        if not self.founders:
            return frozenset(members)
        sure = frozenset(members) & (self.founders | (self._row or {}).keys())
        lots = {peer: sha256(f"{run} {number} {peer}".encode()).digest() for peer in members - sure}
        return sure | frozenset(heapq.nsmallest(AT_ONCE, lots, key=lots.__getitem__))

    def _needed(self, peer: str) -> int:
        """Return the consecutive rounds that a peer must have been received in."""
        return 1 << (2 * min(15, max(0, self._missed[self._account(peer)] - 1)))

    def _account(self, peer: str) -> str:
        return peer if peer in self.founders else STRANGERS
