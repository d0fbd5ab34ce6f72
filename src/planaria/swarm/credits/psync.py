"""One member of a channel's committee, by the asynchronous protocol: message in, messages out; no clock (PSyncPCN).

After the idea of arXiv 2207.11615; the structure is ours. Each committee has n = 3f+1 members, of whom f may lie.

1. The order comes to the first committee. Members vote whether it can be locked: the balance suffices or not.
2. A certificate that it is locked goes to the next committee, which then votes in its turn.
3. The last committee's certificate decides that it is paid; the first refusal, that it is dropped.
4. Members vote to settle as decided. That certificate goes on to the neighbour from which the decision did not come.

What a member goes by:

- **One vote for each phase of each number**, and the vote to lock follows from the channel's agreed state alone. An
  order is looked at when all of lower numbers are settled, so that members find the same.
- **A decision that overtakes its lock is parked** until the channel's own lock is certified.
- **A certificate that exists is followed**, also by a member that has not voted.

An operator that gives one number twice, or numbers orders that cross each other in different orders, can bring channels
to a stand. It cannot have one paid in part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planaria.common.errors import UserError
from planaria.swarm.credits.messages import (
    Certificate,
    Committees,
    Letter,
    Message,
    Order,
    Phase,
    Signer,
    Statement,
    Verify,
    Vote,
    quorum,
    valid,
)


@dataclass(frozen=True)
class Channel:
    """What the committee of a channel agrees about. Orders are taken one by one, by their numbers."""

    name: str
    ends: tuple[str, str]
    has: tuple[int, int]
    """free credits of each end"""
    locked: int = 0
    """of the order under way"""
    payer: str = ""
    """who pays it, while any are locked"""
    next: int = 0
    """number of the order under way, or of the next one"""

    def __post_init__(self) -> None:
        if any(type(credit) is not int or credit < 0 for credit in self.has):
            raise UserError(f"channel {self.name}: credits {self.has}; give whole numbers from 0 on")
        if self.ends[0] == self.ends[1]:
            raise UserError(f"channel {self.name}: both ends are {self.ends[0]}; name two parties")

    @property
    def total(self) -> int:
        """All credits in it."""
        return sum(self.has) + self.locked

    def joins(self, payer: str, payee: str) -> bool:
        return {payer, payee} == {*self.ends} and payer != payee

    def can_lock(self, payer: str, amount: int) -> bool:
        """Does the agreed state suffice? The vote follows from this alone."""
        return not self.locked and self.has[self.ends.index(payer)] >= amount

    def lock(self, payer: str, amount: int) -> Channel:
        """:raises ValueError: when there are not so many."""
        if amount <= 0 or not self.can_lock(payer, amount):
            raise ValueError(f"channel {self.name}: {payer} cannot lock {amount}")
        return replace(self._given(payer, -amount), locked=amount, payer=payer)

    def settle(self, paid: bool) -> Channel:
        """The order under way is over: what is locked goes to the other end, or back."""
        over = replace(self, locked=0, payer="", next=self.next + 1)
        if not self.locked:
            return over
        other = self.ends[1 - self.ends.index(self.payer)]
        return over._given(other if paid else self.payer, self.locked)

    def _given(self, end: str, amount: int) -> Channel:
        first = end == self.ends[0]
        return replace(self, has=(self.has[0] + amount * first, self.has[1] + amount * (not first)))


AHEAD = 256
"""so many numbers beyond the next are listened to"""


@dataclass
class _Slot:
    """What is known of a number."""

    orders: dict[str, Order] = field(default_factory=dict)
    """by digest: one, unless the operator lies"""
    entitled: str = ""
    """digest of the first order that may be locked: all before it on its route are"""
    decided: dict[str, bool] = field(default_factory=dict)
    """digest → what a neighbour's certificate says, or the own one"""
    told_by: dict[str, int] = field(default_factory=dict)
    """digest → the hop of that neighbour"""
    votes: dict[Statement, dict[str, str]] = field(default_factory=dict)
    said: dict[Phase, Statement] = field(default_factory=dict)
    certified: dict[Phase, Certificate] = field(default_factory=dict)


class Member:
    """A member of one committee."""

    def __init__(
        self,
        me: Signer,
        channel: Channel,
        committees: Committees,
        operator: str,
        verify: Verify,
        relay: bool = False,
    ) -> None:
        """``relay``: votes go to one member, which tells the others what is certified; else to all."""
        self.channel, self.settled = channel, dict[int, bool]()
        """numbers → were they paid?"""
        self._me, self._committees, self._operator = me, committees, operator
        self._verify, self._relay = verify, relay
        self._slots: dict[int, _Slot] = {}
        self._out: list[Letter] = []

    @property
    def name(self) -> str:
        return self._me.name

    def order(self, number: int) -> Order | None:
        """The order with this number, if one is known."""
        return next(iter(self._slots[number].orders.values()), None) if number in self._slots else None

    def receive(self, message: Message) -> list[Letter]:
        """What is to be sent once this is known. What is forged, late or not for this committee changes nothing."""
        match message:
            case Order():
                self._take_order(message)
            case Vote():
                self._take_vote(message)
            case Certificate():
                self._take_certificate(message)
        while self._step():
            pass
        out, self._out = self._out, []
        return out

    def prompt(self) -> list[Letter]:
        """Nothing has come for long: whoever relays may be silent. Tell everybody all that was said since."""
        self._relay = False
        for number in range(max(0, self.channel.next - AHEAD), self.channel.next + 1):
            if slot := self._slots.get(number):
                for statement in slot.said.values():
                    self._send(self.channel.name, Vote.of(statement, self._me))
                for certificate in slot.certified.values():
                    self._pass_on(slot, certificate)
        out, self._out = self._out, []
        return out

    def _slot(self, number: int) -> _Slot | None:
        if not self.channel.next <= number < self.channel.next + AHEAD:
            return None
        return self._slots.setdefault(number, _Slot())

    def _take_order(self, order: Order) -> _Slot | None:
        """Note an order that the operator has signed and that passes here; its slot if it is not over."""
        name = self.channel.name
        hop = order.channels.index(name) if name in order.channels else -1
        if hop < 0 or not self.channel.joins(*order.parties[hop : hop + 2]):
            return None
        slot = self._slot(order.numbers[hop])
        if slot is None or not self._verify(self._operator, order.signature, order.said()):
            return None
        slot.orders.setdefault(order.digest, order)
        if hop == 0:
            slot.entitled = slot.entitled or order.digest
        return slot

    def _take_vote(self, vote: Vote) -> None:
        statement = vote.statement
        slot = self._slot(statement.number) if statement.channel == self.channel.name else None
        if slot is None or vote.member not in self._committees[self.channel.name]:
            return
        phases = (known for known in slot.votes if known.phase == statement.phase)
        if any(vote.member in slot.votes[known] for known in phases):
            return  # its first word counts
        if not self._verify(vote.member, vote.signature, statement.said()):
            return
        slot.votes.setdefault(statement, {})[vote.member] = vote.signature
        if vote.member == self.name:  # said before this member was started again
            slot.said.setdefault(statement.phase, statement)

    def _take_certificate(self, certificate: Certificate) -> None:
        order, about = certificate.order, certificate.statement
        hop = order.channels.index(self.channel.name) if self.channel.name in order.channels else -1
        source = order.hop(about.channel, about.number)
        if min(hop, source) < 0 or abs(source - hop) > 1 or not self._news(certificate, hop, source):
            return
        if not valid(certificate, self._committees, self._verify) or (slot := self._take_order(order)) is None:
            return
        if source == hop:
            slot.certified.setdefault(about.phase, certificate)
        elif about.phase == "lock":
            slot.entitled = slot.entitled or about.order
        else:
            slot.decided.setdefault(about.order, about.yes)
            slot.told_by.setdefault(about.order, source)

    def _news(self, certificate: Certificate, hop: int, source: int) -> bool:
        """Does it say what this place goes by, and is not known? Most copies are refused here, before any signature."""
        about = certificate.statement
        slot = self._slot(certificate.order.numbers[hop])
        if slot is None:
            return False
        if source == hop:
            return about.phase not in slot.certified
        if about.phase == "lock":
            return about.yes and source == hop - 1 and not slot.entitled
        return about.order not in slot.decided and (source == hop + 1 or not about.yes)

    def _step(self) -> bool:
        """One thing that is to be done about the order under way; False if there is none."""
        slot = self._slots.get(self.channel.next)
        if slot is None:
            return False
        for phase in ("lock", "settle"):
            if phase not in slot.certified and (made := self._certificate(slot, phase)):
                slot.certified[phase] = made
                return True
        return self._locking(slot) or self._settling(slot)

    def _certificate(self, slot: _Slot, phase: Phase) -> Certificate | None:
        needed = quorum(len(self._committees[self.channel.name]))
        for statement, votes in slot.votes.items():
            if statement.phase == phase and len(votes) >= needed and statement.order in slot.orders:
                enough = tuple(sorted(votes.items()))
                return Certificate(statement=statement, order=slot.orders[statement.order], votes=enough)
        return None

    def _locking(self, slot: _Slot) -> bool:
        certified, entitled = slot.certified.get("lock"), slot.entitled
        if certified is None:
            if "lock" in slot.said or not entitled or slot.decided.get(entitled) is False or "settle" in slot.said:
                return False
            order = slot.orders[entitled]
            payer = order.parties[order.channels.index(self.channel.name)]
            self._say(slot, "lock", entitled, self.channel.can_lock(payer, order.amount))
            return True
        order, yes = certified.order, certified.statement.yes
        hop = order.channels.index(self.channel.name)
        if "lock" not in slot.said:
            self._say(slot, "lock", order.digest, yes)
            return True
        if yes and not self.channel.locked:
            payer = order.parties[hop]
            if not self.channel.can_lock(payer, order.amount):
                return False  # more than f lie
            self.channel = self.channel.lock(payer, order.amount)
            self._pass_on(slot, certified)
            return True
        if order.digest not in slot.decided and (not yes or hop == len(order.channels) - 1):
            slot.decided[order.digest] = yes
            return True
        return False

    def _settling(self, slot: _Slot) -> bool:
        certified, lock = slot.certified.get("settle"), slot.certified.get("lock")
        if certified is None:
            decided = next(iter(slot.decided.items()), None)
            if "settle" in slot.said or decided is None or not self._may_settle(slot, *decided):
                return False
            self._say(slot, "settle", *decided)
            return True
        about = certified.statement
        if about.yes and (lock is None or not self.channel.locked):
            return False  # parked: its lock is on the way
        if "settle" not in slot.said:
            self._say(slot, "settle", about.order, about.yes)
        self._pass_on(slot, certified)
        self.settled[self.channel.next] = about.yes
        self._slots.pop(self.channel.next - AHEAD, None)
        self.channel = self.channel.settle(about.yes)
        return True

    def _may_settle(self, slot: _Slot, order: str, paid: bool) -> bool:
        """Paid: only what this committee has locked. Dropped: not while another order is voted for."""
        lock, said = slot.certified.get("lock"), slot.said.get("lock")
        if paid:
            return lock is not None and (lock.statement.order, lock.statement.yes) == (order, True)
        return said is None or said.order == order

    def _say(self, slot: _Slot, phase: Phase, order: str, yes: bool) -> None:
        own = Statement(phase=phase, channel=self.channel.name, number=self.channel.next, order=order, yes=yes)
        slot.said[phase] = own
        self._send(self.channel.name, Vote.of(own, self._me), self._leader(own.number) if self._relay else "")

    def _leader(self, number: int) -> str:
        members = self._committees[self.channel.name]
        return members[number % len(members)]

    def _pass_on(self, slot: _Slot, made: Certificate) -> None:
        """Tell those who go by this certificate; where one member relays, by that one alone."""
        if self._relay:
            if self._leader(made.statement.number) != self.name:
                return
            self._send(self.channel.name, made)
        for neighbour in self._heirs(slot, made):
            self._send(neighbour, made)

    def _heirs(self, slot: _Slot, made: Certificate) -> Iterator[str]:
        """The next channel, of a lock; of what is settled those that may not know: before, after a refusal both."""
        about, channels = made.statement, made.order.channels
        hop = channels.index(self.channel.name)
        if about.phase == "lock":  # also where its decision came before: some there may wait for this
            beside = [hop + 1] if about.yes else []
        else:
            beside = [hop - 1] if about.yes else [hop - 1, hop + 1]
            beside = [place for place in beside if place != slot.told_by.get(about.order)]
        return (channels[place] for place in beside if 0 <= place < len(channels))

    def _send(self, channel: str, message: Message, to: str = "") -> None:
        self._out.append(Letter(channel, (to,) if to else self._committees[channel], message))
