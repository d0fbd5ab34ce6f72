"""Max-min fair rates: how flows share links when none may have more at the cost of one that has less. Pure.

Progressive filling: all rates grow alike until a link is full; the flows over it keep what they have, the others grow
on (Bertsekas and Gallager, Data Networks, section 6.5.2). Many TCP connections that share a network come near this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence


def max_min_rates(routes: Sequence[Sequence[str]], capacity: Mapping[str, float]) -> list[float]:
    """[flows]: the max-min fair rate of each.

    ``routes`` has the links that each flow goes over, ``capacity`` what each of them carries: bytes a second, 0 where
    it is dead, infinite where it does not count. A flow over no finite link has an infinite rate.
    """
    links = [frozenset(route) for route in routes]
    left = {link: float(capacity[link]) for route in links for link in route}
    growing = Counter(link for route in links for link in route)
    rates = [math.inf] * len(links)
    waiting = set(range(len(links)))
    while waiting:
        share, full = min(((left[link] / count, link) for link, count in growing.items() if count), default=(0.0, ""))
        if not full or share == math.inf:
            break
        for flow in [flow for flow in waiting if full in links[flow]]:
            rates[flow] = share
            waiting.remove(flow)
            for link in links[flow]:
                left[link] = max(0.0, left[link] - share)
                growing[link] -= 1
    return rates


def completion_times(
    sizes: Sequence[float], routes: Sequence[Sequence[str]], capacity: Mapping[str, float]
) -> list[float]:
    """[flows]: seconds until each is through, when all begin at once and rates are max-min fair at every moment.

    ``sizes`` are bytes; a flow over a dead link is never through (infinite).
    """
    times = [0.0 if size == 0 else math.inf for size in sizes]
    left = {flow: float(size) for flow, size in enumerate(sizes) if size}
    now = 0.0
    while left:
        flows = list(left)
        rates = dict(zip(flows, max_min_rates([routes[flow] for flow in flows], capacity), strict=True))
        moving = [flow for flow in flows if rates[flow] > 0]
        if not moving:
            break
        span = min(left[flow] / rates[flow] for flow in moving)
        now += span
        for flow in moving:
            if left[flow] / rates[flow] <= span * (1 + 1e-12):
                times[flow] = now
                del left[flow]
            else:
                left[flow] -= rates[flow] * span
    return times
