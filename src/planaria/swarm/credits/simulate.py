"""The asynchronous protocol in a simulated network: seeded delays, members that lie, and what came of it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planaria.common.errors import UserError
from planaria.swarm.credits.channel import Channel
from planaria.swarm.credits.liars import LIARS, Node
from planaria.swarm.credits.messages import MOST_HOPS, Letter, Message, Order, StandIn
from planaria.swarm.credits.psync import Member

OPERATOR = "operator"
EACH = 10
"""credits that each end of a channel has at first"""
AMOUNT = 3


@dataclass(frozen=True)
class Scene:
    """What is simulated: one route, orders along it and back, liars in each committee."""

    hops: int = 4
    tolerated: int = 1
    """f: a committee has 3f+1 members"""
    liars: int = 0
    """in each committee"""
    dry: int = -1
    """a hop whose payer has nothing; −1: none"""
    orders: int = 1
    """every second one goes the other way"""
    relay: bool = False

    def __post_init__(self) -> None:
        for what, value, least, most in (
            ("hops", self.hops, 1, MOST_HOPS),
            ("faulty members tolerated", self.tolerated, 0, 20),
            ("liars", self.liars, 0, 3 * self.tolerated + 1),
            ("orders", self.orders, 1, 100),
            ("dry hop", self.dry, -1, self.hops - 1),
        ):
            if not least <= value <= most:
                raise UserError(f"{what}: {value}; give {least} to {most}")

    @property
    def members(self) -> int:
        """n, of a committee."""
        return 3 * self.tolerated + 1

    def committees(self) -> dict[str, tuple[str, ...]]:
        return {f"c{hop}": tuple(f"c{hop}m{n}" for n in range(self.members)) for hop in range(self.hops)}

    def channels(self) -> dict[str, Channel]:
        return {
            f"c{hop}": Channel(f"c{hop}", (f"p{hop}", f"p{hop + 1}"), (0 if hop == self.dry else EACH, EACH))
            for hop in range(self.hops)
        }

    def route(self, number: int) -> Order:
        """The order with this number, not yet signed: it has the same in each channel."""
        parties = tuple(f"p{place}" for place in range(self.hops + 1))
        channels = tuple(f"c{hop}" for hop in range(self.hops))
        turn = -1 if number % 2 else 1
        numbers = (number,) * self.hops
        return Order(parties=parties[::turn], channels=channels[::turn], numbers=numbers, amount=AMOUNT)


@dataclass(frozen=True)
class Outcome:
    """What came of it, as honest members see it."""

    ended: bool
    """have all settled all orders?"""
    mixed: bool
    """is an order paid for some, and dropped for others?"""
    conserved: bool
    """has each channel as many credits as at first and, once all is settled, each party between two what it had?"""
    paid: int
    """orders that are paid for somebody"""
    messages: int


@dataclass
class Network:
    """Delivers letters in an order of its own; counts each copy."""

    chance: random.Random
    count: int = 0
    _queue: list[tuple[float, int, str, Message]] = field(default_factory=list)
    _ticket: itertools.count[int] = field(default_factory=itertools.count)

    def send(self, letters: Iterable[Letter], now: float) -> None:
        for letter in letters:
            for name in letter.to:
                # Some letters take a hundred times as long as others.
                late = now + self.chance.expovariate(1.0) * self.chance.choice((0.1, 1.0, 10.0))
                heapq.heappush(self._queue, (late, next(self._ticket), name, letter.message))
                self.count += 1

    def run(self, nodes: Mapping[str, Node]) -> None:
        """Until nothing is under way."""
        while self._queue:
            now, _, name, message = heapq.heappop(self._queue)
            self.send(nodes[name].receive(message), now)


def simulate(scene: Scene, seed: int) -> Outcome:
    """One run. Nothing depends on time: a seed draws delays, and who lies how."""
    keys, chance, committees = StandIn(), random.Random(seed), scene.committees()
    operator, channels = keys.signer(OPERATOR), scene.channels()
    honest: list[Member] = []
    nodes: dict[str, Node] = {}
    for name, members in committees.items():
        liars = set(chance.sample(members, scene.liars))
        for one in members:
            member = Member(keys.signer(one), channels[name], committees, OPERATOR, keys.verify, scene.relay)
            if one in liars:
                nodes[one] = chance.choice(LIARS)(member, keys.signer(one), chance)
            else:
                nodes[one] = member
                honest.append(member)
    orders = [scene.route(number).signed(operator) for number in range(scene.orders)]
    network = Network(chance)
    network.send([Letter(o.channels[0], committees[o.channels[0]], o) for o in orders], 0.0)
    network.run(nodes)
    if scene.relay and not _ended(honest, scene):  # who relays may be silent
        network.send([letter for node in nodes.values() for letter in node.prompt()], 0.0)
        network.run(nodes)
    return _outcome(scene, honest, channels, orders, network.count)


def _ended(honest: Sequence[Member], scene: Scene) -> bool:
    return all(len(member.settled) == scene.orders for member in honest)


def _outcome(
    scene: Scene, honest: Sequence[Member], before: Mapping[str, Channel], orders: Sequence[Order], count: int
) -> Outcome:
    said = [{member.settled[n] for member in honest if n in member.settled} for n in range(scene.orders)]
    ended, mixed = _ended(honest, scene), any(len(words) > 1 for words in said)
    kept = all(member.channel.total == before[member.channel.name].total for member in honest)
    if ended and not mixed:
        paid = [order for order, words in zip(orders, said, strict=True) if words == {True}]
        kept = kept and all(_as_paid(paid, member.channel, before[member.channel.name]) for member in honest)
    return Outcome(ended, mixed, kept, sum(True in words for words in said), count)


def _as_paid(paid: Sequence[Order], now: Channel, before: Channel) -> bool:
    """Has each end what it had and got, less what it gave? Then nobody between two channels has lost anything."""
    got = dict(zip(before.ends, before.has, strict=True))
    for order in paid:
        hop = order.channels.index(now.name)
        got[order.parties[hop]] -= order.amount
        got[order.parties[hop + 1]] += order.amount
    return now.has == tuple(got[end] for end in now.ends)


def expected(scene: Scene) -> int:
    """Messages of one order that is paid, without liars: n²(4h − 2) + n; where one member relays, n(6h − 1)."""
    n, h = scene.members, scene.hops
    return n * (6 * h - 1) if scene.relay else n * n * (4 * h - 2) + n
