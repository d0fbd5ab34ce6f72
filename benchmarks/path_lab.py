"""What ``benchmarks.paths`` and tests put flows on: leaf-spine networks, random small ones; an exhaustive search."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from planaria.pipeline.network.multipath import Path, Ways
from planaria.planner.paths import Flow


def leaf_spine(leaves: int, spines: int, link: float) -> Ways:
    """Between any two leaves a path over each spine; all links of one capacity, each direction by itself."""
    names = [f"leaf {n}" for n in range(leaves)]
    paths = {
        (a, b): tuple(Path(f"spine {s}", a, b, (f"{a} → spine {s}", f"spine {s} → {b}")) for s in range(spines))
        for a in names
        for b in names
        if a != b
    }
    return Ways(paths, {link_: link for found in paths.values() for path in found for link_ in path.links})


def ring(leaves: int, each: int, size: int) -> list[Flow]:
    """``each`` flows from every leaf to the next."""
    return [
        Flow(f"leaf {n}", f"leaf {(n + 1) % leaves}", size) for n in range(leaves) for _ in range(each)
    ]  # fmt: skip


def with_dead(ways: Ways, *links: str) -> Ways:
    return Ways(ways.paths, {**ways.capacity, **dict.fromkeys(links, 0.0)})


def small_instance(chance: random.Random, most_flows: int = 8, most_paths: int = 4) -> tuple[list[Flow], Ways]:
    """Two to four sites, flows of sizes up to tenfold apart, paths of one to three links that others may have too."""
    sites = [f"site {n}" for n in range(chance.randint(2, 4))]
    capacity = {f"link {n}": float(chance.randint(1, 10)) for n in range(chance.randint(2, 8))}
    pairs = [(a, b) for a in sites for b in sites if a != b]
    paths = {}
    for a, b in pairs:
        routes = [
            tuple(chance.sample(sorted(capacity), min(len(capacity), chance.randint(1, 3))))
            for _ in range(chance.randint(1, most_paths))
        ]
        paths[a, b] = tuple(Path(f"path {n}", a, b, route) for n, route in enumerate(dict.fromkeys(routes)))
    flows = [Flow(*chance.choice(pairs), chance.randint(1, 10)) for _ in range(chance.randint(1, most_flows))]
    return flows, Ways(paths, capacity)


def optimum(flows: Sequence[Flow], ways: Ways) -> float:
    """The least largest load of any choice of paths, by trying all that could be better than the best so far."""
    order = sorted(flows, key=lambda flow: -flow.size)
    carried: Counter[str] = Counter()
    best = float("inf")

    def place(n: int, largest: float) -> None:
        nonlocal best
        if largest >= best:
            return
        if n == len(order):
            best = largest
            return
        for path in ways.living(order[n].source, order[n].target):
            for link in path.links:
                carried[link] += order[n].size
            place(n + 1, max([largest, *(carried[link] / ways.capacity[link] for link in path.links)]))
            for link in path.links:
                carried[link] -= order[n].size

    place(0, 0.0)
    return best
