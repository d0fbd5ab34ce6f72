"""The synchronous protocol in a simulated network whose messages take as long as promised, or longer."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

from planaria.common.errors import UserError
from planaria.swarm.credits.messages import MOST_HOPS
from planaria.swarm.credits.sync import FAULTS, Arbiter, Party, Said, Sending, Terms


@dataclass(frozen=True)
class SyncScene:
    """One payment along a route."""

    hops: int = 4
    tolerated: int = 1
    """f: of 3f+1 members of each committee so many are silent, if ``faulty``"""
    faulty: bool = True
    """does one party, drawn by the seed, not do what it is to do?"""
    longest: float = 1.0
    """Δ's that a message may take: above 1 the promise is broken"""

    def __post_init__(self) -> None:
        if not 1 <= self.hops <= MOST_HOPS or not 0 <= self.tolerated <= 20 or not self.longest > 0:
            raise UserError(f"{self}: give 1 to {MOST_HOPS} hops, 0 to 20 faulty members, and delays above 0")


@dataclass(frozen=True)
class SyncOutcome:
    """What came of it."""

    paid: bool
    """is the last channel certified as paid, for its payee?"""
    losers: int
    """honest parties that paid and were not paid"""


def simulate_sync(scene: SyncScene, seed: int) -> SyncOutcome:
    """One run: a seed draws delays, from 0 to ``longest``·Δ, and who fails how."""
    chance = random.Random(seed)
    secret = chance.randbytes(32)
    terms = Terms(scene.hops, 3 * scene.tolerated + 1, 1.0, hashlib.sha256(secret).digest())
    parties = [Party(terms, place, secret if place == scene.hops else b"") for place in range(scene.hops + 1)]
    nodes: dict[str, Party | Arbiter] = {party.name: party for party in parties}
    silent: set[str] = set()
    for hop in range(scene.hops):
        nodes |= {name: Arbiter(terms, hop, name) for name in terms.committee(hop)}
        silent |= set(chance.sample(terms.committee(hop), scene.tolerated)) if scene.faulty else set()
    if scene.faulty:
        chance.choice(parties).fault = chance.choice(FAULTS)
    _run(nodes, silent, parties[0].begin(), chance, scene.longest)
    honest = [party for party in parties if not party.fault]
    return SyncOutcome(parties[-1].settled.get(scene.hops - 1) == "paid", sum(party.lost() for party in honest))


def _run(
    nodes: dict[str, Party | Arbiter], silent: set[str], first: list[Sending], chance: random.Random, longest: float
) -> None:
    """Until nothing is under way and no alarm is set."""
    queue: list[tuple[float, int, str, Said]] = []
    ticket = itertools.count()

    def put(now: float, sendings: Iterable[Sending]) -> None:
        for to, said, at in sendings:
            when = at if at >= 0 else now + longest * chance.random()
            heapq.heappush(queue, (when, next(ticket), to, said))

    put(0.0, first)
    while queue:
        now, _, name, said = heapq.heappop(queue)
        if name not in silent:
            put(now, nodes[name].receive(now, said))
