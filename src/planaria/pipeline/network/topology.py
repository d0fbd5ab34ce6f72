"""Topologies: sites, links and nodes, from a TOML file or the built-in ``twelve_cities``.

``twelve_cities`` has measured links between twelve regions of one cloud (SkipPipe and CheckFree): one-way latency in
milliseconds, bandwidth in the published unit, a thousandth of 8 GiB/s, about 1.07 Mbit/s.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from planaria.common import documents
from planaria.common.errors import UserError, suggestion
from planaria.config import bounds
from planaria.config.bounds import Positive, Seconds
from planaria.config.schema import Section
from planaria.pipeline.network.costs import MBIT
from planaria.pipeline.network.multipath import MAX_ENTRIES, LinkEntry, Links, PathNetwork, path_network

CITIES = (
    "Belgium",
    "Canada",
    "Germany",
    "Iowa",
    "Japan",
    "Los Angeles",
    "Netherlands",
    "Oregon",
    "Singapore",
    "Taiwan",
    "London",
    "Australia",
)
UNIT_BYTES = 2**30 / 8000
"""bytes per second of one unit of bandwidth"""

# Row i: from site i to sites i+1, i+2, …
# Netherlands-London is published as 1.9, ten thousandth of what all other pairs of north-western Europe have as a
# thousandth (1510 to 1940): a slip of the decimal point, by which one message would take 132 s. A later publication
# of the same matrix has 189, again a tenth; 1940 is what the neighbours have.
_LINKS = """
41/159 4/1940 49/227 112/94 70/155 3/1940 66/167 83/129 105/100 3.5/1940 129/79
44/255 14/605 74/145 35/244 42/200 30.5/377 107/96 89/118 38.5/291 98/105
53.5/213 112/89 73/146 3.5/1940 68/119 80/100 102/101 6.6/1510 125.5/84
72.5/112 23.4/492 51/219 19.3/723 101.5/101 88/102 48.1/175 84/90
50/222 108.5/91 46.2/244 35.6/312 19.2/614 107/71 58/110
71.5/114 12.4/948 79.5/135 64/130 68/119 69/117
67/163 81.5/131 105.5/96 4.8/1940 128/76
78.5/134 59.5/187 64/170 68/117
23.2/495 85/125 48/238
109.5/72 67/168
132/75
"""
MAX_BYTES = 64 << 20
MAX_NODES = 1 << 12
MAX_SITES = 1 << 10
MIN_MBIT = 1e-3
"""slowest link that delivers a message within a run"""


def twelve_cities() -> dict[tuple[str, str], tuple[float, float]]:
    """Return (site, later site) → (latency in seconds, bandwidth in bytes per second)."""
    links = {}
    for i, row in enumerate(_LINKS.split("\n")[1:-1]):
        for later, cell in zip(CITIES[i + 1 :], row.split(), strict=True):
            latency, bandwidth = map(float, cell.split("/"))
            links[CITIES[i], later] = (latency / 1000, bandwidth * UNIT_BYTES)
    return links


MATRICES = {"twelve_cities": twelve_cities}


class SameSite(Section):
    """The link between two nodes of one site."""

    latency_ms: Annotated[float, Field(ge=0), bounds.at_most(1e9, "longer latencies are not supported")] = 1.0
    bandwidth_mbit: bounds.Mbits = 16000.0


class MatrixFiles(Section):
    """Two CSV files beside the topology: site names in the first row and column, a number per pair."""

    latency_ms: str
    bandwidth_mbit: str


class RelayedSites(Section):
    """Sites whose nodes cannot connect to each other, and the controller's site, which relays their bytes."""

    site: str
    """the controller's"""
    hidden: list[str]
    """sites behind routers that only allow outgoing connections"""


class NodeGroup(Section):
    """Equal nodes at one site."""

    site: str
    count: bounds.Hosts = 1
    speed: bounds.Speed = 1.0
    """factor on the speed in [network]"""
    memory: Positive = 3
    """microbatches that a node can hold between forward and backward"""
    role: Literal["any", "data", "worker"] = "any"
    """data nodes are origins of microbatches and hold embedding and head; workers never do; the planner assigns the
    others"""
    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """memory of its device, for advice; unknown by default"""
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """cost of an hour, in any currency, for advice"""


class TopologyFile(Section):
    matrix: str | MatrixFiles | None = None
    """the name of a built-in matrix, or files; optional if ``link`` joins all sites"""
    link: Annotated[list[LinkEntry], Field(max_length=MAX_ENTRIES)] = Field(default_factory=list)
    """several paths between sites"""
    overhead_s: Seconds = 0.0
    """seconds that every message takes besides its path"""
    queueing: bool = True
    """whether messages between two nodes queue for bandwidth"""
    same_site: SameSite = SameSite()
    relay: RelayedSites | None = None
    nodes: list[NodeGroup]


@dataclass(frozen=True)
class Node:
    """A machine. Nodes are numbered in file order."""

    name: str
    site: str
    speed: float
    memory: int
    role: str
    memory_bytes: float | None = None
    """memory of its device, or None if unknown"""
    price_per_hour: float = 0.0


@dataclass(frozen=True)
class Topology:
    nodes: tuple[Node, ...]
    links: Links
    overhead_s: float = 0.0
    queueing: bool = True
    scale: float = 1.0
    """factor on all link times"""
    path_network: PathNetwork | None = None
    """paths between all sites, over links that all nodes share, if ``[[link]]`` lists several"""

    def latency_s(self, a: str, b: str) -> float:
        """Return the seconds before the first byte sent from site ``a`` is at site ``b``."""
        return self.scale * (self.link(a, b)[0] + self.overhead_s)

    def transmit_s(self, a: str, b: str, size: int) -> float:
        """Return the seconds that a message of ``size`` bytes occupies the link between two nodes at these sites."""
        return self.scale * size / self.link(a, b, size)[1]

    def carry_s(self, a: str, b: str, size: int) -> float:
        """Return the seconds from sending a message of ``size`` bytes over an idle link until it has arrived."""
        latency, bandwidth = self.link(a, b, size)
        return self.scale * (latency + self.overhead_s) + self.scale * size / bandwidth

    def link(self, a: str, b: str, size: int = 0) -> tuple[float, float]:
        """Return latency in seconds and bandwidth in bytes per second from site ``a`` to site ``b``.

        Of several paths, take the one on which a message of ``size`` bytes arrives first, without other traffic.
        """
        if self.path_network is not None and a != b:
            known = self.path_network
            candidates = ((path.latency_s, known.bandwidth(path)) for path in known.living(a, b))
            return min(candidates, key=lambda path: (path[0] + size / path[1], -path[1]))
        return self.links[a, b] if (a, b) in self.links else self.links[b, a]


def read(path: Path, scale: float = 1.0) -> Topology:
    """Return the topology in the file ``path``.

    :raises UserError: naming the file, the key or the pair of sites, and the fix.
    """
    parsed = _parse(path)
    links: Links = {}
    if parsed.matrix is None:
        if not parsed.link:
            raise UserError(f"{path}: matrix: missing; set one, or join all sites by [[link]] entries")
    elif isinstance(parsed.matrix, MatrixFiles):
        links = _read_links(path, parsed.matrix)
    elif parsed.matrix in MATRICES:
        links = MATRICES[parsed.matrix]()
    else:
        raise UserError(f"{path}: matrix = {parsed.matrix!r}: no such matrix; {suggestion(parsed.matrix, MATRICES)}")
    sites = {site for pair in links for site in pair} or {group.site for group in parsed.nodes}
    sites |= {site for entry in parsed.link for site in entry.sites}
    if parsed.relay is not None and parsed.matrix is not None:
        links |= _links_via_relay(path, links, parsed.relay, sites)
    same = (parsed.same_site.latency_ms / 1000, parsed.same_site.bandwidth_mbit * MBIT)
    for site in sites:
        links.setdefault((site, site), same)
    if (total := sum(group.count for group in parsed.nodes)) > MAX_NODES:
        raise UserError(f"{path}: nodes: {total} in all; at most {MAX_NODES}, as the planner weighs every pair of them")
    nodes, seen = [], Counter[str]()
    for group in parsed.nodes:
        if group.site not in sites:
            raise UserError(f"{path}: nodes: site {group.site!r} is not in the matrix; {suggestion(group.site, sites)}")
        for _ in range(group.count):
            seen[group.site] += 1
            name = f"{group.site} {seen[group.site]}"
            device = None if group.memory_gb is None else 1e9 * group.memory_gb
            nodes.append(Node(name, group.site, group.speed, group.memory, group.role, device, group.price_per_hour))
    several = _paths_between_sites(path, parsed, links) if parsed.link else None
    return Topology(tuple(nodes), links, parsed.overhead_s, parsed.queueing, scale, several)


def _paths_between_sites(path: Path, parsed: TopologyFile, links: Links) -> PathNetwork:
    between = {pair: link for pair, link in links.items() if pair[0] != pair[1]}
    relay_site = None if parsed.relay is None else parsed.relay.site
    return path_network(path, parsed.link, between, relay_site, {group.site for group in parsed.nodes})


def _parse(path: Path) -> TopologyFile:
    if not path.is_file():
        raise UserError(f"{path}: no such topology; set network.topology to a TOML file")
    try:
        return TopologyFile.model_validate(documents.read_toml(path, MAX_BYTES))
    except ValidationError as error:
        reason = documents.first_error(error, TopologyFile, values=True)
        named = re.sub(r"^(link|nodes)\.(\d+)\.?", lambda at: f"[[{at[1]}]] {int(at[2]) + 1}: ", reason)
        raise UserError(f"{path}: {named}") from None


def _links_via_relay(path: Path, links: Links, relay: RelayedSites, sites: set[str]) -> Links:
    """Return the links between hidden sites: via the relay, at the speed of the slower link.

    Bytes are forwarded piece by piece (``runtime/transport/relay.py``).
    """
    for site in (relay.site, *relay.hidden):
        if site not in sites:
            raise UserError(f"{path}: relay: site {site!r} is not in the matrix; {suggestion(site, sites)}")
    known = Topology((), links)
    through: Links = {}
    for a, b in permutations([site for site in relay.hidden if site != relay.site], 2):
        (there_s, there), (back_s, back) = known.link(a, relay.site), known.link(relay.site, b)
        through[a, b] = there_s + back_s, min(there, back)
    return through


def _read_links(path: Path, files: MatrixFiles) -> Links:
    latency = _read_matrix(path.parent / files.latency_ms, lowest=0.0)
    bandwidth = _read_matrix(path.parent / files.bandwidth_mbit, lowest=MIN_MBIT)
    if latency.keys() != bandwidth.keys():
        invalid = sorted(latency.keys() ^ bandwidth.keys())[0]
        raise UserError(f"{path}: matrix: {invalid[0]} - {invalid[1]} is in one of the two files only")
    return {pair: (latency[pair] / 1000, bandwidth[pair] * MBIT) for pair in latency}


def _read_matrix(path: Path, lowest: float) -> dict[tuple[str, str], float]:
    """Return the numbers of a square table; an empty cell means the same link as from the other side."""
    if not path.is_file():
        raise UserError(f"{path}: no such file, but a topology's matrix refers to it")
    lines = documents.read_text(path, MAX_BYTES, "use a table of sites").splitlines()
    try:
        rows = [row for row in csv.reader(lines) if row]
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}; use a table of sites") from None
    sites = [name.strip() for name in rows[0][1:]] if rows else []
    if len(sites) > MAX_SITES or len(set(sites)) < len(sites) or "" in sites:
        raise UserError(f"{path}: its first row must name sites, each once and at most {MAX_SITES}")
    numbers: dict[tuple[str, str], float] = {}
    for row in rows[1:]:
        site, cells = row[0].strip(), row[1:]
        if site not in sites or len(cells) > len(sites):
            raise UserError(f"{path}: row {site!r} does not fit the first row's {len(sites)} sites")
        for target, cell in zip(sites, cells, strict=False):
            if cell.strip():
                numbers[site, target] = _parse_cell(path, site, target, cell, lowest)
    for a in sites:
        for b in sites:
            if a != b and (a, b) not in numbers and (b, a) not in numbers:
                raise UserError(f"{path}: {a} - {b}: this pair has no number")
    return numbers


def _parse_cell(path: Path, site: str, target: str, cell: str, lowest: float) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = float("nan")
    if not lowest <= number < float("inf"):
        raise UserError(f"{path}: {site} - {target}: {cell.strip()!r} is not a number of at least {lowest:g}")
    return number
