"""The synchronous protocol: hash-locked credits with deadlines, hop by hop (after the idea of SyncPCN).

The sender locks its channel by the hash of a secret that the receiver holds. Each party locks its outgoing channel once
its incoming one is locked. The receiver reveals the secret, and channels are unlocked backwards. A party without an
answer sends the secret to the channel's committee before the deadline; afterwards the payer gets its credits back.
Deadlines: hop i of h ends at T_i = 2Δh + 3Δ(h − i), so each party has 3Δ to forward what it learned.

The protocol assumes that messages arrive within Δ, that clocks agree, and that links are authenticated. All functions
are pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from planaria.swarm.credits.messages import quorum

Status = Literal["locked", "paid", "back"]
EventKind = Literal["lock", "secret", "expire", "wake", Status]
PartyFault = Literal["", "locks nothing", "reveals nothing", "unlocks nothing", "claims late"]
FAULTS: tuple[PartyFault, ...] = ("locks nothing", "reveals nothing", "unlocks nothing", "claims late")


class ReceiverEvent(NamedTuple):
    """A message, or a timer of the receiver."""

    kind: EventKind
    hop: int
    sender: str
    secret: bytes = b""


class Sending(NamedTuple):
    to: str
    event: ReceiverEvent
    due: float = -1.0
    """time of a timer; −1: a message, to be sent immediately"""


@dataclass(frozen=True)
class PaymentTerms:
    """Parameters of a payment, known to all."""

    hops: int
    members: int
    """members of each committee"""
    delta: float
    """Δ: assumed maximum message delay"""
    locked_by: bytes
    """SHA-256 of the secret"""

    def deadline(self, hop: int) -> float:
        """T_i = 2Δh + 3Δ(h − i)."""
        return self.delta * (2 * self.hops + 3 * (self.hops - hop))

    def is_secret(self, secret: bytes) -> bool:
        return hashlib.sha256(secret).digest() == self.locked_by

    def committee(self, hop: int) -> list[str]:
        return [f"c{hop}m{n}" for n in range(self.members)]


@dataclass
class Arbiter:
    """A member of a channel's committee, which decides once whether the channel pays or returns the credits."""

    terms: PaymentTerms
    hop: int
    name: str
    locked: bool = False
    status: Status | None = None

    def receive(self, now: float, event: ReceiverEvent) -> list[Sending]:
        early = now < self.terms.deadline(self.hop)
        match event.kind:
            case "lock" if event.sender == f"p{self.hop}" and early and not self.locked:
                self.locked = True
                return self._announce("locked", b"")
            case "secret" if self.locked and self.status is None and early and self.terms.is_secret(event.secret):
                self.status = "paid"
                return self._announce("paid", event.secret)
            case "expire" if self.locked and self.status is None and not early:
                self.status = "back"
                return self._announce("back", b"")
        return []

    def _announce(self, status: Status, secret: bytes) -> list[Sending]:
        return [
            Sending(f"p{end}", ReceiverEvent(status, self.hop, self.name, secret)) for end in (self.hop, self.hop + 1)
        ]


@dataclass
class Party:
    """Party i: payer of hop i, payee of hop i − 1. The last party holds the secret."""

    terms: PaymentTerms
    hop: int
    secret: bytes = b""
    fault: PartyFault = ""
    votes: set[tuple[Status, int, str]] = field(default_factory=set)
    settled: dict[int, Status] = field(default_factory=dict)
    """hop → status certified by its committee"""
    acted: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"p{self.hop}"

    def begin(self) -> list[Sending]:
        """Return the first messages: the sender locks its channel."""
        return self._lock() if self.hop == 0 else []

    def receive(self, now: float, event: ReceiverEvent) -> list[Sending]:
        match event.kind:
            case "locked" | "paid" | "back":
                return self._count_vote(now, event.kind, event)
            case "secret" if event.hop == self.hop:
                return self._learn(now, event.secret)
            case "wake" if event.hop == self.hop and self.hop not in self.settled:
                return self._to_committee("expire", self.hop)
            case "wake" if event.hop == self.hop - 1 and event.hop not in self.settled:
                return self._to_committee("secret", event.hop)
        return []

    def _count_vote(self, now: float, status: Status, event: ReceiverEvent) -> list[Sending]:
        """Count a committee member's vote, which may contain the secret."""
        if event.sender not in self.terms.committee(event.hop):
            return []
        out = self._learn(now, event.secret) if status == "paid" and event.hop == self.hop else []
        self.votes.add((status, event.hop, event.sender))
        votes = Counter((status, hop) for status, hop, _ in self.votes)
        if votes[status, event.hop] < quorum(self.terms.members):
            return out
        if status != "locked":
            self.settled.setdefault(event.hop, status)
        elif event.hop == self.hop - 1:
            out += self._reveal(now) if self.hop == self.terms.hops else self._lock()
        return out

    def _lock(self) -> list[Sending]:
        if "lock" in self.acted or self.fault == "locks nothing":
            return []
        self.acted.add("lock")
        wake = Sending(self.name, ReceiverEvent("wake", self.hop, self.name), self.terms.deadline(self.hop))
        return [*self._to_committee("lock", self.hop), wake]

    def _learn(self, now: float, secret: bytes) -> list[Sending]:
        """Use a revealed secret: unlock the own payment and claim the incoming one."""
        if not self.terms.is_secret(secret) or "reveal" in self.acted:
            return []
        self.secret = secret
        unlock = [] if self.fault == "unlocks nothing" else self._to_committee("secret", self.hop)
        return [*unlock, *(self._reveal(now) if self.hop else [])]

    def _reveal(self, now: float) -> list[Sending]:
        """Show the payer the secret, and the committee 2Δ before the deadline unless it has been settled."""
        if "reveal" in self.acted or self.fault == "reveals nothing":
            return []
        self.acted.add("reveal")
        hop, late = self.hop - 1, self.fault == "claims late"
        before = (0.5 if late else 2.0) * self.terms.delta
        claim = Sending(self.name, ReceiverEvent("wake", hop, self.name), max(now, self.terms.deadline(hop) - before))
        return [claim] if late else [Sending(f"p{hop}", ReceiverEvent("secret", hop, self.name, self.secret)), claim]

    def _to_committee(self, kind: EventKind, hop: int) -> list[Sending]:
        event = ReceiverEvent(kind, hop, self.name, self.secret if kind == "secret" else b"")
        return [Sending(member, event) for member in self.terms.committee(hop)]

    def has_lost(self) -> bool:
        """Return whether the party lost credits: its own were not returned and the residual ones not paid."""
        gave = self.hop < self.terms.hops and "lock" in self.acted and self.settled.get(self.hop) != "back"
        if self.hop == 0:
            return gave and self.settled.get(0) == "paid" and not self.secret
        if self.hop == self.terms.hops:
            gave = "reveal" in self.acted  # the secret is its receipt
        return gave and self.settled.get(self.hop - 1) != "paid"
