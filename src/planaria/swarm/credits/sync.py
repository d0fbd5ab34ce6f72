"""The synchronous protocol: credits locked by one hash and by deadlines, hop by hop (after the idea of SyncPCN).

The sender locks its channel by the hash of a secret that the receiver has; each party, once its incoming channel is
locked for certain, locks the outgoing one. The receiver reveals the secret, and channels are unlocked backwards. Who is
not answered takes the secret to the channel's committee before the deadline; after it, the payer gets its credits back.
Deadlines: hop i of h ends at T_i = 2Δh + 3Δ(h − i), so each party has 3Δ to bring backwards what it has learned.

All of it leans on two things: that a message arrives within Δ, and that clocks agree. Senders are known, as over
authenticated links. Pure: what comes in, and when, gives what goes out, and when.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from planaria.swarm.credits.messages import quorum

Word = Literal["locked", "paid", "back"]
Kind = Literal["lock", "secret", "expire", "wake", Word]
Fault = Literal["", "locks nothing", "reveals nothing", "unlocks nothing", "claims late"]
FAULTS: tuple[Fault, ...] = ("locks nothing", "reveals nothing", "unlocks nothing", "claims late")


class Said(NamedTuple):
    """A message, or an alarm that somebody sets for itself."""

    kind: Kind
    hop: int
    sender: str
    secret: bytes = b""


class Sending(NamedTuple):
    to: str
    said: Said
    at: float = -1.0
    """of an alarm: when; −1: a message, to be sent now"""


@dataclass(frozen=True)
class Terms:
    """What all know of a payment before it begins."""

    hops: int
    members: int
    """of each committee"""
    delta: float
    """Δ: a message takes no longer, they hope"""
    locked_by: bytes
    """SHA-256 of the secret"""

    def deadline(self, hop: int) -> float:
        """T_i = 2Δh + 3Δ(h − i)."""
        return self.delta * (2 * self.hops + 3 * (self.hops - hop))

    def opens(self, secret: bytes) -> bool:
        return hashlib.sha256(secret).digest() == self.locked_by

    def committee(self, hop: int) -> list[str]:
        return [f"c{hop}m{n}" for n in range(self.members)]


@dataclass
class Arbiter:
    """A member of a channel's committee: says once whether it is paid or goes back."""

    terms: Terms
    hop: int
    name: str
    locked: bool = False
    word: Word | None = None

    def receive(self, now: float, said: Said) -> list[Sending]:
        early = now < self.terms.deadline(self.hop)
        match said.kind:
            case "lock" if said.sender == f"p{self.hop}" and early and not self.locked:
                self.locked = True
                return self._tell("locked", b"")
            case "secret" if self.locked and self.word is None and early and self.terms.opens(said.secret):
                self.word = "paid"
                return self._tell("paid", said.secret)
            case "expire" if self.locked and self.word is None and not early:
                self.word = "back"
                return self._tell("back", b"")
        return []

    def _tell(self, word: Word, secret: bytes) -> list[Sending]:
        return [Sending(f"p{end}", Said(word, self.hop, self.name, secret)) for end in (self.hop, self.hop + 1)]


@dataclass
class Party:
    """Party i: payer of hop i, payee of hop i − 1. The last one has the secret from the beginning."""

    terms: Terms
    place: int
    secret: bytes = b""
    fault: Fault = ""
    told: set[tuple[Word, int, str]] = field(default_factory=set)
    settled: dict[int, Word] = field(default_factory=dict)
    """hop → what its committee has certified"""
    acted: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"p{self.place}"

    def begin(self) -> list[Sending]:
        """The sender locks its channel."""
        return self._lock() if self.place == 0 else []

    def receive(self, now: float, said: Said) -> list[Sending]:
        match said.kind:
            case "locked" | "paid" | "back":
                return self._heard(now, said.kind, said)
            case "secret" if said.hop == self.place:
                return self._learn(now, said.secret)
            case "wake" if said.hop == self.place and self.place not in self.settled:
                return self._to_committee("expire", self.place)
            case "wake" if said.hop == self.place - 1 and said.hop not in self.settled:
                return self._to_committee("secret", said.hop)
        return []

    def _heard(self, now: float, word: Word, said: Said) -> list[Sending]:
        """Votes of committees; a single one may bring the secret."""
        if said.sender not in self.terms.committee(said.hop):
            return []
        out = self._learn(now, said.secret) if word == "paid" and said.hop == self.place else []
        self.told.add((word, said.hop, said.sender))
        votes = Counter((word, hop) for word, hop, _ in self.told)
        if votes[word, said.hop] < quorum(self.terms.members):
            return out
        if word != "locked":
            self.settled.setdefault(said.hop, word)
        elif said.hop == self.place - 1:
            out += self._reveal(now) if self.place == self.terms.hops else self._lock()
        return out

    def _lock(self) -> list[Sending]:
        if "lock" in self.acted or self.fault == "locks nothing":
            return []
        self.acted.add("lock")
        wake = Sending(self.name, Said("wake", self.place, self.name), self.terms.deadline(self.place))
        return [*self._to_committee("lock", self.place), wake]

    def _learn(self, now: float, secret: bytes) -> list[Sending]:
        """Whoever has been paid for shows the secret: unlock what one owes, and take it to whom one is owed by."""
        if not self.terms.opens(secret) or "reveal" in self.acted:
            return []
        self.secret = secret
        unlock = [] if self.fault == "unlocks nothing" else self._to_committee("secret", self.place)
        return [*unlock, *(self._reveal(now) if self.place else [])]

    def _reveal(self, now: float) -> list[Sending]:
        """Show the payer the secret, and the committee 2Δ before the deadline, unless it is settled by then."""
        if "reveal" in self.acted or self.fault == "reveals nothing":
            return []
        self.acted.add("reveal")
        hop, late = self.place - 1, self.fault == "claims late"
        before = (0.5 if late else 2.0) * self.terms.delta
        claim = Sending(self.name, Said("wake", hop, self.name), max(now, self.terms.deadline(hop) - before))
        return [claim] if late else [Sending(f"p{hop}", Said("secret", hop, self.name, self.secret)), claim]

    def _to_committee(self, kind: Kind, hop: int) -> list[Sending]:
        told = Said(kind, hop, self.name, self.secret if kind == "secret" else b"")
        return [Sending(member, told) for member in self.terms.committee(hop)]

    def lost(self) -> bool:
        """Is it out of pocket: what it owed is not back, and what it is owed was not paid?"""
        gave = self.place < self.terms.hops and "lock" in self.acted and self.settled.get(self.place) != "back"
        if self.place == 0:
            return gave and self.settled.get(0) == "paid" and not self.secret
        if self.place == self.terms.hops:
            gave = "reveal" in self.acted  # the secret is its receipt
        return gave and self.settled.get(self.place - 1) != "paid"
