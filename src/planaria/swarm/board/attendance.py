"""Pure decisions: which peers a reader polls, which peers a round waits for, and when the round closes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256

from planaria.common.errors import RunStopped
from planaria.common.object_store import NOT_READABLE
from planaria.swarm.board.message import NOT_JSON, Goodbye, Hello, Rollouts

_TEMPORARY = {NOT_JSON, NOT_READABLE}
"""reasons that may disappear: a store may show a message before its content or permissions are complete"""


@dataclass(frozen=True)
class Census:
    """Participants of a run, by peer id."""

    hellos: dict[str, Hello]
    goodbyes: dict[str, Goodbye]
    rejected: dict[str, str]
    """reason, for each peer whose hello or goodbye is invalid"""

    def members(self, round_number: int) -> frozenset[str]:
        """Return the peers that joined by ``round_number`` and did not leave before it."""
        left = {peer for peer, goodbye in self.goodbyes.items() if goodbye.after < round_number}
        return frozenset(peer for peer, hello in self.hellos.items() if hello.joined <= round_number) - left


@dataclass(frozen=True)
class RoundMessages:
    """Messages received in a round so far, by peer id."""

    found: dict[str, Rollouts]
    missing: tuple[str, ...]
    rejected: dict[str, str]
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
    def rejected_permanently(self) -> dict[str, str]:
        """Permanently rejected peers: their messages are complete, and messages are never replaced."""
        return {peer: why for peer, why in self.rejected.items() if why not in _TEMPORARY}

    @property
    def open(self) -> tuple[str, ...]:
        """Peers whose message is missing or may still be incomplete."""
        return (*self.missing, *(self.rejected.keys() - self.rejected_permanently.keys()))

    def merge(self, later: RoundMessages, elapsed_s: float) -> RoundMessages:
        """Merge a later read of the open peers; its messages arrived after ``elapsed_s`` seconds."""
        arrival_s = {**dict.fromkeys(later.found, elapsed_s), **self.arrival_s}
        return RoundMessages(
            self.found | later.found, later.missing, self.rejected_permanently | later.rejected, arrival_s
        )

    def restrict_to(self, listed: Set[str], guilty: Mapping[str, str]) -> RoundMessages:
        """Keep the messages of ``listed`` peers; mark others missing, or rejected if they are in ``guilty``."""
        others = {*self.found, *self.missing, *self.rejected} - listed
        rejected = self.rejected | {peer: guilty[peer] for peer in others & guilty.keys()}
        found = {peer: message for peer, message in self.found.items() if peer in listed}
        return replace(self, found=found, missing=tuple(sorted(others - rejected.keys())), rejected=rejected)


@dataclass(frozen=True)
class RoundTerms:
    """Quorum and time limits of a round."""

    quorum: int
    """number of messages that closes a round after the timeout"""
    timeout_s: float
    """seconds after which the quorum is enough"""
    patience_s: float
    """seconds after which a round below the quorum stops the run"""

    def __post_init__(self) -> None:
        if self.quorum < 0 or not 0 <= self.timeout_s <= self.patience_s:
            raise ValueError(f"{self}: a round requires 0 <= timeout_s <= patience_s and a quorum of at least 0")

    def allow_closing(self, expected: Set[str], found: Set[str], rejected: Set[str], elapsed_s: float) -> bool:
        """Return whether a round may close after ``elapsed_s`` seconds.

        It closes when all expected messages have arrived. With a quorum, it closes after the timeout, or immediately if
        all other peers are permanently ``rejected``. Messages of unexpected peers do not count.
        """
        present = expected & found
        closes_early = elapsed_s >= self.timeout_s or present | rejected >= expected
        return present == expected or (len(present) >= self.quorum and closes_early)

    def seconds_to_change(self, elapsed_s: float) -> float:
        """Return the seconds until time alone may close or stall a round; 0 after the patience."""
        moment = self.timeout_s if elapsed_s < self.timeout_s else self.patience_s
        return max(moment - elapsed_s, 0.0)


class RoundStalled(RunStopped):
    """A round stayed below its quorum for longer than its patience."""

    def __init__(
        self, run: str, round_number: int, present_peers: Iterable[str], missing: Mapping[str, str], quorum: int
    ) -> None:
        """Describe the round.

        :param missing: absent peer → reason
        """
        present = sorted(present_peers)
        names = ", ".join(peer[:8] for peer in present) or "none"
        absent = ", ".join(f"{peer[:8]} ({why})" for peer, why in sorted(missing.items()))
        came = f"{len(present)} of {len(present) + len(missing)} peers are present"
        super().__init__(
            f"run {run[:8]}, round {round_number}: {came} and the quorum is {quorum}; present: {names}; "
            f"missing: {absent}"
        )


MAX_HELLO_REPOLLS = 8
"""maximum number of peers without a hello that one read polls again"""
MAX_GOODBYE_REPOLLS = 2
"""maximum number of inactive peers polled for a goodbye, which frees their seats"""


class PolledPeers:
    """Peers that a reader polls.

    Anyone can create peer ids, and each read costs a request. Known peers have reserved seats; all others share the
    rest. A new peer is polled once. Peers without a hello, and peers that never sent completions, are polled again, a
    few per read.
    """

    def __init__(self, known: Iterable[str], seats: int, secret: bytes) -> None:
        """Reserve seats for the ``known`` peers.

        :param seats: maximum number of peers, including the known ones
        :param secret: seeds the order of unknown peers, so that no peer can choose an id that sorts first
        """
        self.known = {*known}
        self._seats = seats
        self._secret = secret
        self.hellos: dict[str, Hello] = {}
        self.goodbyes: dict[str, Goodbye] = {}
        self._active: set[str] = set()
        self._reads = 0
        self._hello_polls: Counter[str] = Counter()
        self._goodbye_polls: Counter[str] = Counter()

    def mark_active(self, peers: Iterable[str]) -> None:
        self._active.update(peers)

    def select_unjoined(self, names: Set[str]) -> list[str]:
        """Select the peers to poll for a hello: known, then unknown ones for the free seats, least polled first."""
        self._reads += 1
        taken = self.hellos.keys() - self.goodbyes.keys()
        seats = max(0, self._seats - len(taken | self.known))
        drawn = heapq.nsmallest(
            seats, names - self.known, key=lambda peer: (self._hello_polls[peer], self._lottery_key(peer))
        )
        again = [peer for peer in drawn if self._hello_polls[peer]][MAX_HELLO_REPOLLS:]
        chosen = sorted(names & self.known) + [peer for peer in drawn if peer not in {*again}]
        self._hello_polls.update(chosen)
        return chosen

    def select_unleft(self) -> list[str]:
        """Select the peers to poll for a goodbye: all peers that a round may wait for, and a few inactive ones."""
        members = self.hellos.keys() - self.goodbyes.keys()
        silent = members - self.known - self._active
        again = heapq.nsmallest(
            MAX_GOODBYE_REPOLLS, silent, key=lambda peer: (self._goodbye_polls[peer], self._lottery_key(peer))
        )
        self._goodbye_polls.update(again)
        return sorted(members - silent) + again

    def _lottery_key(self, peer: str) -> bytes:
        return sha256(self._secret + b"%d " % self._reads + peer.encode()).digest()


MAX_UNAWAITED_READS = 8
"""maximum number of messages per round that are read without being awaited"""
UNKNOWN_ACCOUNT = ""
"""shared account of all peers that are not founders; otherwise each new id could cost one timeout"""


class PeerSelector:
    """Selects the peers that the next round waits for; the selection is the same for all readers with equal inputs.

    After its n-th absence a peer is awaited again once it was received in 4^(n - 1) consecutive rounds, that is in one
    round after its first. A peer that withholds messages thus costs about log4(R) timeouts in R rounds. A message of a
    peer that is not awaited still counts if it arrives in time.
    """

    def __init__(self, founders: Set[str]) -> None:
        """Start without history.

        :param founders: peers with their own account; if empty, the first peers received
        """
        self.founders = frozenset(founders)
        self._streaks: Counter[str] | None = None
        self._missed: Counter[str] = Counter()

    @property
    def is_new(self) -> bool:
        return self._streaks is None

    def record_round(self, awaited: Set[str], received: Set[str]) -> None:
        """Record a finished round."""
        self.founders = self.founders or frozenset(received)
        self._missed.update({self._account(peer) for peer in awaited - received})
        streaks = self._streaks or Counter()
        self._streaks = Counter({peer: streaks[peer] + 1 for peer in received})

    def peers_to_await(self, members: Set[str]) -> frozenset[str]:
        """Return the members to wait for; before the first round, the founders if known, else all."""
        streaks = self._streaks
        if streaks is None:
            return frozenset(members) & self.founders or frozenset(members)
        return frozenset(peer for peer in members if streaks[peer] >= self._required_streak(peer))

    def peers_to_read(self, run: str, number: int, members: Set[str]) -> frozenset[str]:
        """Return the members whose message of a round is read: founders, the last peers received, and a few others.

        The others are redrawn each round, equally for all readers with the same members. All non-founders count as one
        peer (:mod:`planaria.swarm.checks.defence`)."""
        if not self.founders:
            return frozenset(members)
        sure = frozenset(members) & (self.founders | (self._streaks or {}).keys())
        lots = {peer: sha256(f"{run} {number} {peer}".encode()).digest() for peer in members - sure}
        return sure | frozenset(heapq.nsmallest(MAX_UNAWAITED_READS, lots, key=lots.__getitem__))

    def _required_streak(self, peer: str) -> int:
        """Return the consecutive rounds that a peer must have been received in: 4^(absences - 1), at least 1."""
        return 1 << (2 * min(15, max(0, self._missed[self._account(peer)] - 1)))

    def _account(self, peer: str) -> str:
        return peer if peer in self.founders else UNKNOWN_ACCOUNT
