"""Ways to choose paths without a plan, which planned paths are held against: hashing, taking turns, the better of two.

What they know is a connection and its paths, never how much anybody sends; the last also knows how many flows go over
each link (Mitzenmacher 2001, "The power of two choices in randomized load balancing").
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from planaria.pipeline.network.multipath import Ways
from planaria.planner.paths import Assignment, Flow


def hashed(flows: Sequence[Flow], ways: Ways, seed: int) -> Assignment:
    """A path at random for each, as ECMP takes one by a hash of addresses and ports."""
    chance = random.Random(seed)
    return tuple(chance.choice(ways.living(flow.source, flow.target)) for flow in flows)


def in_turn(flows: Sequence[Flow], ways: Ways) -> Assignment:
    """Round robin: every source takes one path after the other for its flows, from the first, to whichever target."""
    seen: Counter[str] = Counter()
    chosen = []
    for flow in flows:
        living = ways.living(flow.source, flow.target)
        chosen.append(living[seen[flow.source] % len(living)])
        seen[flow.source] += 1
    return tuple(chosen)


def better_of_two(flows: Sequence[Flow], ways: Ways, seed: int) -> Assignment:
    """Of two paths at random the one whose busiest link has fewer flows, flow by flow."""
    chance, there = random.Random(seed), Counter[str]()
    chosen = []
    for flow in flows:
        living = ways.living(flow.source, flow.target)
        two = chance.sample(living, min(2, len(living)))
        path = min(two, key=lambda path: max(there[link] for link in path.links))
        there.update(path.links)
        chosen.append(path)
    return tuple(chosen)
