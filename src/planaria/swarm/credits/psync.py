"""A committee member in the asynchronous protocol: messages in, messages out; no clock (PSyncPCN).

After the idea of arXiv 2207.11615 but with its own structure. A committee has n = 3f+1 members, at most f of them
Byzantine.

1. The first committee gets the order. Members vote whether the balance suffices to lock it.
2. The certificate of the lock goes to the next committee, which votes in turn.
3. The last committee's certificate decides that the order is paid; the first refusal, that it is dropped.
4. Members vote to settle as decided. That certificate goes to the neighbour on the other side of the decision.

Rules of a member:

- **One vote per phase and number.** The vote to lock depends on the channel's agreed state alone. An order is processed
  after all lower numbers are settled, so all members reach the same result.
- **A decision that overtakes its lock is parked** until the channel's own lock is certified.
- **An existing certificate is followed**, also by a member that has not voted.

An operator that assigns one number twice, or numbers crossing orders inconsistently, can block channels. It cannot
cause a partial payment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planaria.common.errors import UserError
from planaria.swarm.credits.messages import (
    Committees,
    CreditOrder,
    Letter,
    MemberVote,
    Message,
    Phase,
    Signer,
    Statement,
    StatementCertificate,
    Verify,
    is_valid,
    quorum,
)


@dataclass(frozen=True)
class CreditChannel:
    """Agreed state of a channel. Orders are processed one at a time, by number."""

    name: str
    ends: tuple[str, str]
    has: tuple[int, int]
    """free credits of each end"""
    locked: int = 0
    """credits of the current order"""
    payer: str = ""
    """payer of the locked credits"""
    next: int = 0
    """number of the current or next order"""

    def __post_init__(self) -> None:
        if any(type(credit) is not int or credit < 0 for credit in self.has):
            raise UserError(f"channel {self.name}: credits {self.has}; use integers of at least 0")
        if self.ends[0] == self.ends[1]:
            raise UserError(f"channel {self.name}: both ends are {self.ends[0]}; use two parties")

    @property
    def total(self) -> int:
        return sum(self.has) + self.locked

    def joins(self, payer: str, payee: str) -> bool:
        return {payer, payee} == {*self.ends} and payer != payee

    def can_lock(self, payer: str, amount: int) -> bool:
        """Return whether the agreed state suffices; the vote depends on this alone."""
        return not self.locked and self.has[self.ends.index(payer)] >= amount

    def lock(self, payer: str, amount: int) -> CreditChannel:
        """:raises ValueError: if the credits do not suffice."""
        if amount <= 0 or not self.can_lock(payer, amount):
            raise ValueError(f"channel {self.name}: {payer} cannot lock {amount}")
        return replace(self._credit(payer, -amount), locked=amount, payer=payer)

    def settle(self, paid: bool) -> CreditChannel:
        """End the current order: pay the locked credits to the other end, or return them."""
        over = replace(self, locked=0, payer="", next=self.next + 1)
        if not self.locked:
            return over
        other = self.ends[1 - self.ends.index(self.payer)]
        return over._credit(other if paid else self.payer, self.locked)

    def _credit(self, end: str, amount: int) -> CreditChannel:
        first = end == self.ends[0]
        return replace(self, has=(self.has[0] + amount * first, self.has[1] + amount * (not first)))


AHEAD = 256
"""numbers beyond the next one for which messages are accepted"""


@dataclass
class _Slot:
    """Messages known for one number."""

    orders: dict[str, CreditOrder] = field(default_factory=dict)
    """orders by digest; more than one only with a Byzantine operator"""
    entitled: str = ""
    """digest of the first order whose previous channels are all locked"""
    decided: dict[str, bool] = field(default_factory=dict)
    """digest → decision of a neighbour's or the own certificate"""
    decided_by: dict[str, int] = field(default_factory=dict)
    """digest → hop of that neighbour"""
    votes: dict[Statement, dict[str, str]] = field(default_factory=dict)
    voted: dict[Phase, Statement] = field(default_factory=dict)
    """own votes"""
    certified: dict[Phase, StatementCertificate] = field(default_factory=dict)


class CommitteeMember:
    """A member of one committee."""

    def __init__(
        self,
        me: Signer,
        channel: CreditChannel,
        committees: Committees,
        operator: str,
        verify: Verify,
        relay: bool = False,
    ) -> None:
        """Start without orders.

        :param relay: send votes to one member, which forwards certificates; otherwise to all members
        """
        self.channel, self.settled = channel, dict[int, bool]()
        """number → whether it was paid"""
        self._me = me
        self._committees = committees
        self._operator = operator
        self._verify, self._relay = verify, relay
        self._slots: dict[int, _Slot] = {}
        self._out: list[Letter] = []

    @property
    def name(self) -> str:
        return self._me.name

    def order(self, number: int) -> CreditOrder | None:
        return next(iter(self._slots[number].orders.values()), None) if number in self._slots else None

    def receive(self, message: Message) -> list[Letter]:
        """Process a message; return the replies. Forged, stale or foreign messages have no effect."""
        match message:
            case CreditOrder():
                self._receive_order(message)
            case MemberVote():
                self._receive_vote(message)
            case StatementCertificate():
                self._receive_certificate(message)
        while self._advance():
            pass
        out, self._out = self._out, []
        return out

    def prompt(self) -> list[Letter]:
        """Stop relying on a relay, which may be silent; resend all own votes and certificates to all members."""
        self._relay = False
        for number in range(max(0, self.channel.next - AHEAD), self.channel.next + 1):
            if slot := self._slots.get(number):
                for statement in slot.voted.values():
                    self._send(self.channel.name, MemberVote.of(statement, self._me))
                for certificate in slot.certified.values():
                    self._pass_on(slot, certificate)
        out, self._out = self._out, []
        return out

    def _slot(self, number: int) -> _Slot | None:
        if not self.channel.next <= number < self.channel.next + AHEAD:
            return None
        return self._slots.setdefault(number, _Slot())

    def _receive_order(self, order: CreditOrder) -> _Slot | None:
        """Record an order that is signed by the operator and passes this channel; return its slot if it is not over."""
        name = self.channel.name
        hop = order.channels.index(name) if name in order.channels else -1
        if hop < 0 or not self.channel.joins(*order.parties[hop : hop + 2]):
            return None
        slot = self._slot(order.numbers[hop])
        if slot is None or not self._verify(self._operator, order.signature, order.signed_bytes()):
            return None
        slot.orders.setdefault(order.digest, order)
        if hop == 0:
            slot.entitled = slot.entitled or order.digest
        return slot

    def _receive_vote(self, vote: MemberVote) -> None:
        statement = vote.statement
        slot = self._slot(statement.number) if statement.channel == self.channel.name else None
        if slot is None or vote.member not in self._committees[self.channel.name]:
            return
        phases = (statement_voted for statement_voted in slot.votes if statement_voted.phase == statement.phase)
        if any(vote.member in slot.votes[statement_voted] for statement_voted in phases):
            return  # the first vote counts
        if not self._verify(vote.member, vote.signature, statement.signed_bytes()):
            return
        slot.votes.setdefault(statement, {})[vote.member] = vote.signature
        if vote.member == self.name:  # sent before this member was restarted
            slot.voted.setdefault(statement.phase, statement)

    def _receive_certificate(self, certificate: StatementCertificate) -> None:
        order, about = certificate.order, certificate.statement
        hop = order.channels.index(self.channel.name) if self.channel.name in order.channels else -1
        source = order.hop(about.channel, about.number)
        if min(hop, source) < 0 or abs(source - hop) > 1 or not self._is_news(certificate, hop, source):
            return
        if not is_valid(certificate, self._committees, self._verify) or (slot := self._receive_order(order)) is None:
            return
        if source == hop:
            slot.certified.setdefault(about.phase, certificate)
        elif about.phase == "lock":
            slot.entitled = slot.entitled or about.order
        else:
            slot.decided.setdefault(about.order, about.yes)
            slot.decided_by.setdefault(about.order, source)

    def _is_news(self, certificate: StatementCertificate, hop: int, source: int) -> bool:
        """Return whether a certificate is relevant and new; rejects most copies before any signature check."""
        about = certificate.statement
        slot = self._slot(certificate.order.numbers[hop])
        if slot is None:
            return False
        if source == hop:
            return about.phase not in slot.certified
        if about.phase == "lock":
            return about.yes and source == hop - 1 and not slot.entitled
        return about.order not in slot.decided and (source == hop + 1 or not about.yes)

    def _advance(self) -> bool:
        """Take one pending action for the current order; return False if there is none."""
        slot = self._slots.get(self.channel.next)
        if slot is None:
            return False
        for phase in ("lock", "settle"):
            if phase not in slot.certified and (certificate := self._find_certificate(slot, phase)):
                slot.certified[phase] = certificate
                return True
        return self._advance_lock(slot) or self._advance_settlement(slot)

    def _find_certificate(self, slot: _Slot, phase: Phase) -> StatementCertificate | None:
        needed = quorum(len(self._committees[self.channel.name]))
        for statement, votes in slot.votes.items():
            if statement.phase == phase and len(votes) >= needed and statement.order in slot.orders:
                enough = tuple(sorted(votes.items()))
                return StatementCertificate(statement=statement, order=slot.orders[statement.order], votes=enough)
        return None

    def _advance_lock(self, slot: _Slot) -> bool:
        certified, entitled = slot.certified.get("lock"), slot.entitled
        if certified is None:
            if "lock" in slot.voted or not entitled or slot.decided.get(entitled) is False or "settle" in slot.voted:
                return False
            order = slot.orders[entitled]
            payer = order.parties[order.channels.index(self.channel.name)]
            self._vote(slot, "lock", entitled, self.channel.can_lock(payer, order.amount))
            return True
        order, yes = certified.order, certified.statement.yes
        hop = order.channels.index(self.channel.name)
        if "lock" not in slot.voted:
            self._vote(slot, "lock", order.digest, yes)
            return True
        if yes and not self.channel.locked:
            payer = order.parties[hop]
            if not self.channel.can_lock(payer, order.amount):
                return False  # more than f members are Byzantine
            self.channel = self.channel.lock(payer, order.amount)
            self._pass_on(slot, certified)
            return True
        if order.digest not in slot.decided and (not yes or hop == len(order.channels) - 1):
            slot.decided[order.digest] = yes
            return True
        return False

    def _advance_settlement(self, slot: _Slot) -> bool:
        certified, lock = slot.certified.get("settle"), slot.certified.get("lock")
        if certified is None:
            decided = next(iter(slot.decided.items()), None)
            if "settle" in slot.voted or decided is None or not self._may_settle(slot, *decided):
                return False
            self._vote(slot, "settle", *decided)
            return True
        about = certified.statement
        if about.yes and (lock is None or not self.channel.locked):
            return False  # parked until its lock arrives
        if "settle" not in slot.voted:
            self._vote(slot, "settle", about.order, about.yes)
        self._pass_on(slot, certified)
        self.settled[self.channel.next] = about.yes
        self._slots.pop(self.channel.next - AHEAD, None)
        self.channel = self.channel.settle(about.yes)
        return True

    def _may_settle(self, slot: _Slot, order: str, paid: bool) -> bool:
        """Pay only an order that this committee locked; drop none while voting for another order."""
        lock, voted = slot.certified.get("lock"), slot.voted.get("lock")
        if paid:
            return lock is not None and (lock.statement.order, lock.statement.yes) == (order, True)
        return voted is None or voted.order == order

    def _vote(self, slot: _Slot, phase: Phase, order: str, yes: bool) -> None:
        own = Statement(phase=phase, channel=self.channel.name, number=self.channel.next, order=order, yes=yes)
        slot.voted[phase] = own
        self._send(self.channel.name, MemberVote.of(own, self._me), self._leader(own.number) if self._relay else "")

    def _leader(self, number: int) -> str:
        members = self._committees[self.channel.name]
        return members[number % len(members)]

    def _pass_on(self, slot: _Slot, certificate: StatementCertificate) -> None:
        """Send a certificate to the channels that depend on it; with a relay, only the leader sends."""
        if self._relay:
            if self._leader(certificate.statement.number) != self.name:
                return
            self._send(self.channel.name, certificate)
        for neighbour in self._recipients(slot, certificate):
            self._send(neighbour, certificate)

    def _recipients(self, slot: _Slot, certificate: StatementCertificate) -> Iterator[str]:
        """Return the channels that receive ``certificate``: the next one for a lock; for a settlement the previous one,
        or both neighbours if it was refused.
        """
        about, channels = certificate.statement, certificate.order.channels
        hop = channels.index(self.channel.name)
        if about.phase == "lock":  # even if the decision arrived first: some members may wait for the lock
            neighbours = [hop + 1] if about.yes else []
        else:
            neighbours = [hop - 1] if about.yes else [hop - 1, hop + 1]
            neighbours = [index for index in neighbours if index != slot.decided_by.get(about.order)]
        return (channels[index] for index in neighbours if 0 <= index < len(channels))

    def _send(self, channel: str, message: Message, to: str = "") -> None:
        self._out.append(Letter(channel, (to,) if to else self._committees[channel], message))
