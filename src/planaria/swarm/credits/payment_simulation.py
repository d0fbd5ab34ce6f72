"""Both settlement protocols in simulated networks: the asynchronous one with seeded delays and Byzantine members, the
synchronous one with message delays up to a bound that may exceed the promised one."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from planaria.common.errors import UserError
from planaria.swarm.credits.messages import (
    MAX_HOPS,
    CreditOrder,
    Letter,
    MemberVote,
    Message,
    Signer,
    StandIn,
    Statement,
    StatementCertificate,
)
from planaria.swarm.credits.psync import CommitteeMember, CreditChannel
from planaria.swarm.credits.sync import FAULTS, Arbiter, Party, PaymentTerms, ReceiverEvent, Sending

Item = TypeVar("Item")
OPERATOR = "operator"
EACH = 10
"""initial credits of each end of a channel"""
AMOUNT = 3


@dataclass(frozen=True)
class PaymentScene:
    """A simulated route with orders in both directions and Byzantine members in each committee."""

    hops: int = 4
    tolerated: int = 1
    """f: a committee has 3f+1 members"""
    byzantine: int = 0
    """Byzantine members per committee"""
    dry: int = -1
    """hop whose payer has no credits; −1: none"""
    orders: int = 1
    """every second one in the reverse direction"""
    relay: bool = False

    def __post_init__(self) -> None:
        for setting, value, low, high in (
            ("hops", self.hops, 1, MAX_HOPS),
            ("faulty members tolerated", self.tolerated, 0, 20),
            ("byzantine", self.byzantine, 0, 3 * self.tolerated + 1),
            ("orders", self.orders, 1, 100),
            ("dry hop", self.dry, -1, self.hops - 1),
        ):
            if not low <= value <= high:
                raise UserError(f"{setting}: {value}; use {low} to {high}")

    @property
    def members(self) -> int:
        return 3 * self.tolerated + 1

    def committees(self) -> dict[str, tuple[str, ...]]:
        return {f"c{hop}": tuple(f"c{hop}m{n}" for n in range(self.members)) for hop in range(self.hops)}

    def channels(self) -> dict[str, CreditChannel]:
        return {
            f"c{hop}": CreditChannel(f"c{hop}", (f"p{hop}", f"p{hop + 1}"), (0 if hop == self.dry else EACH, EACH))
            for hop in range(self.hops)
        }

    def route(self, number: int) -> CreditOrder:
        """Return the unsigned order with this number, which it has in each channel."""
        parties = tuple(f"p{index}" for index in range(self.hops + 1))
        channels = tuple(f"c{hop}" for hop in range(self.hops))
        turn = -1 if number % 2 else 1
        numbers = (number,) * self.hops
        return CreditOrder(parties=parties[::turn], channels=channels[::turn], numbers=numbers, amount=AMOUNT)


@dataclass(frozen=True)
class PaymentOutcome:
    """Result of a simulation, as seen by honest members."""

    ended: bool
    """whether all settled all orders"""
    mixed: bool
    """whether an order is paid for some and dropped for others"""
    conserved: bool
    """whether channel totals are unchanged and, if all is settled, intermediate parties have their initial credits"""
    paid: int
    """orders paid according to at least one member"""
    messages: int


Delivery = tuple[float, str, Item]
"""time, recipient, message"""


def deliver(first: Iterable[Delivery[Item]], receive: Callable[[float, str, Item], Iterable[Delivery[Item]]]) -> int:
    """Deliver in order of time, with all deliveries that ``receive`` causes; return the number of deliveries."""
    ticket = itertools.count()
    queue = [(due, next(ticket), name, item) for due, name, item in first]
    heapq.heapify(queue)
    while queue:
        now, _, to, received = heapq.heappop(queue)
        for due, name, item in receive(now, to, received):
            heapq.heappush(queue, (due, next(ticket), name, item))
    return next(ticket)


def simulate(scene: PaymentScene, seed: int) -> PaymentOutcome:
    """Run one simulation; the seed determines delays and Byzantine behaviour."""
    keys = StandIn()
    chance = random.Random(seed)
    committees = scene.committees()
    operator, channels = keys.signer(OPERATOR), scene.channels()
    honest: list[CommitteeMember] = []
    nodes: dict[str, CommitteeMember | Silent] = {}
    for name, members in committees.items():
        byzantine = set(chance.sample(members, scene.byzantine))
        for one in members:
            member = CommitteeMember(keys.signer(one), channels[name], committees, OPERATOR, keys.verify, scene.relay)
            if one in byzantine:
                nodes[one] = chance.choice(BYZANTINE)(member, keys.signer(one), chance)
            else:
                nodes[one] = member
                honest.append(member)
    orders = [scene.route(number).with_signature(operator) for number in range(scene.orders)]

    def send(letters: Iterable[Letter], now: float) -> Iterator[Delivery[Message]]:
        for letter in letters:
            for name in letter.to:
                # Delays differ by a factor of up to 100.
                yield now + chance.expovariate(1.0) * chance.choice((0.1, 1.0, 10.0)), name, letter.message

    def receive(now: float, name: str, message: Message) -> Iterator[Delivery[Message]]:
        return send(nodes[name].receive(message), now)

    count = deliver(send([Letter(o.channels[0], committees[o.channels[0]], o) for o in orders], 0.0), receive)
    if scene.relay and not _all_settled(honest, scene):  # the relaying member may be silent
        count += deliver(send([letter for node in nodes.values() for letter in node.prompt()], 0.0), receive)
    return _outcome(scene, honest, channels, orders, count)


def _all_settled(honest: Sequence[CommitteeMember], scene: PaymentScene) -> bool:
    return all(len(member.settled) == scene.orders for member in honest)


def _outcome(
    scene: PaymentScene,
    honest: Sequence[CommitteeMember],
    before: Mapping[str, CreditChannel],
    orders: Sequence[CreditOrder],
    count: int,
) -> PaymentOutcome:
    results = [{member.settled[n] for member in honest if n in member.settled} for n in range(scene.orders)]
    ended, mixed = _all_settled(honest, scene), any(len(result) > 1 for result in results)
    conserved = all(member.channel.total == before[member.channel.name].total for member in honest)
    if ended and not mixed:
        paid = [order for order, result in zip(orders, results, strict=True) if result == {True}]
        conserved = conserved and all(
            _is_balanced(paid, member.channel, before[member.channel.name]) for member in honest
        )
    return PaymentOutcome(ended, mixed, conserved, sum(True in result for result in results), count)


def _is_balanced(paid: Sequence[CreditOrder], now: CreditChannel, before: CreditChannel) -> bool:
    """Return whether each end has its initial credits plus receipts minus payments."""
    expected = dict(zip(before.ends, before.has, strict=True))
    for order in paid:
        hop = order.channels.index(now.name)
        expected[order.parties[hop]] -= order.amount
        expected[order.parties[hop + 1]] += order.amount
    return now.has == tuple(expected[end] for end in now.ends)


class Silent:
    """A Byzantine member that sends nothing."""

    def __init__(self, inner: CommitteeMember, me: Signer, chance: random.Random) -> None:
        self.inner, self.me, self.chance = inner, me, chance

    def receive(self, message: Message) -> list[Letter]:
        return []

    def prompt(self) -> list[Letter]:
        return []


class Garbage(Silent):
    """Sends votes in other names, votes with invalid signatures, and certificates with only its signature."""

    def receive(self, message: Message) -> list[Letter]:
        return [
            Letter(letter.channel, letter.to, self._corrupt(letter.message)) for letter in self.inner.receive(message)
        ]

    def _corrupt(self, message: Message) -> Message:
        match message:
            case MemberVote():
                other = _inverted(message.statement)
                forged = MemberVote.of(other, self.me).signature
                return message.model_copy(
                    update={"member": self.chance.choice(["x", self.me.name]), "signature": forged}
                )
            case StatementCertificate():
                statement = _inverted(message.statement)
                own = MemberVote.of(statement, self.me).signature
                signers = tuple((name, own) for name, _ in message.votes)
                return message.model_copy(update={"statement": statement, "votes": signers})
            case CreditOrder():
                return message


class Equivocating(Silent):
    """Sends contradictory signed votes to two subsets, and other messages to a subset only."""

    def receive(self, message: Message) -> list[Letter]:
        return [sent for letter in self.inner.receive(message) for sent in self._split(letter)]

    def _split(self, letter: Letter) -> list[Letter]:
        to = list(letter.to)
        some = set(self.chance.sample(to, self.chance.randint(0, len(to))))
        sent = [Letter(letter.channel, tuple(name for name in to if name in some), letter.message)]
        if isinstance(letter.message, MemberVote):
            other = MemberVote.of(_inverted(letter.message.statement), self.me)
            sent.append(Letter(letter.channel, tuple(name for name in to if name not in some), other))
        return sent


def _inverted(statement: Statement) -> Statement:
    return statement.model_copy(update={"yes": not statement.yes})


BYZANTINE = (Silent, Garbage, Equivocating)


@dataclass(frozen=True)
class SyncScene:
    """One payment along a route."""

    hops: int = 4
    tolerated: int = 1
    """f: number of silent members of 3f+1 in each committee if ``faulty``"""
    faulty: bool = True
    """whether one party, drawn by the seed, omits an action"""
    longest: float = 1.0
    """maximum message delay in units of Δ; above 1 the promise is broken"""

    def __post_init__(self) -> None:
        if not 1 <= self.hops <= MAX_HOPS or not 0 <= self.tolerated <= 20 or not self.longest > 0:
            raise UserError(f"{self}: use 1 to {MAX_HOPS} hops, 0 to 20 faulty members, and delays above 0")


@dataclass(frozen=True)
class SyncOutcome:
    """Result of a payment."""

    paid: bool
    """whether the payee holds a certificate that the last channel paid"""
    losers: int
    """honest parties that paid and were not paid"""


def simulate_sync(scene: SyncScene, seed: int) -> SyncOutcome:
    """Run one payment; the seed determines delays in 0..``longest``·Δ and failures."""
    chance = random.Random(seed)
    secret = chance.randbytes(32)
    terms = PaymentTerms(scene.hops, 3 * scene.tolerated + 1, 1.0, hashlib.sha256(secret).digest())
    parties = [Party(terms, index, secret if index == scene.hops else b"") for index in range(scene.hops + 1)]
    nodes: dict[str, Party | Arbiter] = {party.name: party for party in parties}
    silent: set[str] = set()
    for hop in range(scene.hops):
        nodes |= {name: Arbiter(terms, hop, name) for name in terms.committee(hop)}
        silent |= set(chance.sample(terms.committee(hop), scene.tolerated)) if scene.faulty else set()
    if scene.faulty:
        chance.choice(parties).fault = chance.choice(FAULTS)

    def send(sendings: Iterable[Sending], now: float) -> Iterator[Delivery[ReceiverEvent]]:
        for to, event, due in sendings:
            yield due if due >= 0 else now + scene.longest * chance.random(), to, event

    def receive(now: float, name: str, event: ReceiverEvent) -> Iterator[Delivery[ReceiverEvent]]:
        return send(() if name in silent else nodes[name].receive(now, event), now)

    deliver(send(parties[0].begin(), 0.0), receive)
    honest = [party for party in parties if not party.fault]
    return SyncOutcome(parties[-1].settled.get(scene.hops - 1) == "paid", sum(party.has_lost() for party in honest))
