"""Several paths between two sites over shared links, and max-min fair rates of flows over them. Pure.

The ``[[link]]`` entries of a topology define the paths. Rates come from progressive filling: all grow equally until a
link is full; its flows keep their rate, the others grow on (Bertsekas and Gallager, Data Networks, section 6.5.2). This
approximates many TCP connections that share a network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path as File
from typing import Annotated, NamedTuple

from pydantic import Field

from planaria.common.errors import UserError, suggestion
from planaria.config import bounds
from planaria.config.schema import Section
from planaria.pipeline.network.costs import MBIT

MAX_ENTRIES = 1 << 10
MAX_PATHS = 1 << 8
"""maximum between two sites: each is tried for each flow"""
MAX_IN_ALL = 1 << 16
"""maximum between all sites"""
RELAY = "relay"
"""stands for the site of the topology's ``[relay]``"""

Links = dict[tuple[str, str], tuple[float, float]]
"""(site, other site), in either order → (latency in seconds, bandwidth in bytes per second)"""


class LinkEntry(Section):
    """A path between sites. Sites that are listed together have the listed paths only."""

    id: Annotated[str, Field(min_length=1, max_length=100)]
    sites: Annotated[list[str], Field(min_length=2, max_length=100)]
    """two; for a relay all those that it joins, pairwise"""
    via: str | None = None
    """the site of a relay: bytes use the links to it and from it; ``relay`` is the site of ``[relay]``"""
    latency_ms: Annotated[float, Field(ge=0), bounds.at_most(1e9, "longer latencies are not supported")] | None = None
    """default: the matrix's; for a relay, its own latency"""
    bandwidth_mbit: bounds.Mbits | None = None
    """each way, shared by all its traffic; default: the matrix's; for a relay, of all that it carries"""


class Path(NamedTuple):
    """A path from one site to another."""

    id: str
    source: str
    target: str
    links: tuple[str, ...]
    """names of its links; each is shared by all paths that have it"""
    latency_s: float = 0.0


@dataclass(frozen=True)
class PathNetwork:
    """All paths, and the capacities of their links."""

    paths: Mapping[tuple[str, str], tuple[Path, ...]]
    """(source, target) → the paths between them"""
    capacity: Mapping[str, float]
    """link → bytes per second, 0 if it is dead"""

    def living(self, source: str, target: str) -> tuple[Path, ...]:
        """Return the usable paths.

        :raises UserError: if there is none.
        """
        usable = tuple(path for path in self.paths.get((source, target), ()) if self.bandwidth(path) > 0)
        if not usable:
            raise UserError(f"{source} – {target}: no path is left between them; add a link, or wait for one")
        return usable

    def bandwidth(self, path: Path) -> float:
        """Return the bytes per second of a path without other traffic."""
        return min((self.capacity[link] for link in path.links), default=math.inf)


def path_network(
    file: File, entries: Sequence[LinkEntry], matrix: Links, relay: str | None, sites: set[str]
) -> PathNetwork:
    """Return the paths between every two of ``sites``: those of entries, else the link of the ``matrix``.

    :raises UserError: naming the file, the entry and the fix.
    """
    _require_known(file, entries, matrix, relay, sites)
    made = _PathBuilder(file, entries, matrix, relay)
    for entry in entries:
        for a, b in combinations(entry.sites, 2):
            made.add(entry, a, b)
            made.add(entry, b, a)
    for a, b in product(sorted(sites), repeat=2):
        if a != b and (a, b) not in made.paths:
            made.add_direct(a, b)
    return PathNetwork({pair: tuple(paths) for pair, paths in made.paths.items()}, made.capacity)


class _PathBuilder:
    def __init__(self, file: File, entries: Sequence[LinkEntry], matrix: Links, relay: str | None) -> None:
        self.file, self.matrix, self.relay = file, matrix, relay
        self.direct: dict[frozenset[str], list[LinkEntry]] = {}
        for entry in entries:
            if entry.via is None:
                self.direct.setdefault(frozenset(entry.sites), []).append(entry)
        self.paths: dict[tuple[str, str], list[Path]] = {}
        self.capacity: dict[str, float] = {}
        self.count = 0

    def add(self, entry: LinkEntry, a: str, b: str) -> None:
        """Add the paths of an entry from ``a`` to ``b``: several if its relay is reached over several links."""
        paths = [self._link(entry, a, b)] if entry.via is None else self._relay_paths(entry, a, b)
        known = self.paths.setdefault((a, b), [])
        known += paths
        if len(known) > MAX_PATHS:
            raise UserError(f"{self.file}: link: {a} and {b} are joined by more than {MAX_PATHS} paths; list fewer")
        self._add_to_count(len(paths))

    def add_direct(self, a: str, b: str) -> None:
        """Add the only path between sites that no entry joins."""
        if (path := self._matrix_path(a, b)) is None:
            raise UserError(f"{self.file}: link: nothing joins {a} and {b}; add a [[link]] with sites = [{a!r}, {b!r}]")
        self.paths[a, b] = [path]
        self._add_to_count(1)

    def _matrix_path(self, a: str, b: str) -> Path | None:
        if (link := _link_between(self.matrix, a, b)) is None:
            return None
        name = f"{a} → {b}"
        self.capacity[name] = link[1]
        return Path("direct", a, b, (name,), link[0])

    def _add_to_count(self, more: int) -> None:
        self.count += more
        if self.count > MAX_IN_ALL:
            raise UserError(f"{self.file}: link: sites are joined by more than {MAX_IN_ALL} paths in all; list fewer")

    def _link(self, entry: LinkEntry, a: str, b: str) -> Path:
        latency, bandwidth = _link_between(self.matrix, a, b) or (None, None)
        if entry.latency_ms is not None:
            latency = entry.latency_ms / 1000
        if entry.bandwidth_mbit is not None:
            bandwidth = entry.bandwidth_mbit * MBIT
        if latency is None or bandwidth is None:
            key = "latency_ms" if latency is None else "bandwidth_mbit"
            raise UserError(f"{self.file}: link {entry.id!r}: set {key}, because no matrix has {a} – {b}")
        name = f"{entry.id}: {a} → {b}"
        self.capacity[name] = bandwidth
        return Path(entry.id, a, b, (name,), latency)

    def _relay_paths(self, entry: LinkEntry, a: str, b: str) -> list[Path]:
        """Return the paths through a relay. Bytes are forwarded piece by piece, without waiting for the whole
        message."""
        site = self.relay if entry.via == RELAY else entry.via
        assert site is not None
        own: tuple[str, ...] = ()
        if entry.bandwidth_mbit is not None:
            own = (f"relay {entry.id}",)
            self.capacity[own[0]] = entry.bandwidth_mbit * MBIT
        paths = []
        there, back = self._relay_legs(entry, a, site), self._relay_legs(entry, site, b)
        for first, second in product(there, back):
            which = [leg.id for leg, legs in ((first, there), (second, back)) if len(legs) > 1]
            name = f"{entry.id} ({', '.join(which)})" if which else entry.id
            latency = first.latency_s + (entry.latency_ms or 0.0) / 1000 + second.latency_s
            paths.append(Path(name, a, b, (*first.links, *own, *second.links), latency))
        return paths

    def _relay_legs(self, entry: LinkEntry, a: str, b: str) -> list[Path]:
        """Return the links between a site and a relay's."""
        if listed := self.direct.get(frozenset((a, b))):
            return [self._link(direct, a, b) for direct in listed]
        if (path := self._matrix_path(a, b)) is None:
            joined = " and ".join(entry.sites)
            raise UserError(
                f"{self.file}: link {entry.id!r}: via = {entry.via!r} does not join {joined}: there is no link "
                f"{a} – {b}; add one"
            )
        return [path]


def _require_known(file: File, entries: Sequence[LinkEntry], matrix: Links, relay: str | None, sites: set[str]) -> None:
    """Check the entries."""
    for name, times in Counter(entry.id for entry in entries).items():
        if times > 1:
            raise UserError(f"{file}: link: {times} entries have the id {name!r}; use a different id for each")
    known = (
        sites
        | {site for pair in matrix for site in pair}
        | {entry.via for entry in entries if entry.via and entry.via != RELAY}
    )
    known |= {relay} if relay else set()
    for entry in entries:
        where = f"{file}: link {entry.id!r}"
        for site in entry.sites:
            if site not in known:
                raise UserError(f"{where}: {site!r}: no node is there, and no matrix has it; {suggestion(site, known)}")
        if len(set(entry.sites)) < len(entry.sites):
            raise UserError(f"{where}: sites = {entry.sites}: a link joins different sites")
        if entry.via is None and len(entry.sites) > 2:
            raise UserError(f"{where}: sites = {entry.sites}: a link joins two; add one for each pair, or set via")
        if entry.via == RELAY and relay is None:
            raise UserError(f"{where}: via = 'relay': there is no [relay]; add it, or set via to the relay's site")
        relay_site = relay if entry.via == RELAY else entry.via
        if relay_site is not None and relay_site in entry.sites:
            raise UserError(f"{where}: via = {entry.via!r}: {relay_site} is one of the sites that it joins; remove via")


def _link_between(matrix: Links, a: str, b: str) -> tuple[float, float] | None:
    return matrix.get((a, b)) or matrix.get((b, a))


def max_min_rates(routes: Sequence[Sequence[str]], capacity: Mapping[str, float]) -> list[float]:
    """Return the max-min fair rate of each flow, [flows].

    ``routes`` has the links of each flow; ``capacity`` has each link's bytes per second, 0 if dead, infinite if
    unlimited. A flow without a finite link has an infinite rate.
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
