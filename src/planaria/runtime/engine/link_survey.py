"""Measurement of the links between nodes, pair by pair, with one process per node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from pydantic import ValidationError

from planaria.common.documents import first_error
from planaria.common.errors import RunStopped
from planaria.config.schema import FleetConfig
from planaria.control.facts.events import Fact, Heartbeat
from planaria.control.facts.orders import ExitWorker
from planaria.pipeline.network.measurement import (
    CAPACITY,
    MeasuredLink,
    NodePair,
    NodeSamples,
    estimate_link,
    pair_batches,
)
from planaria.runtime.engine import link_survey_node
from planaria.runtime.engine.link_survey_node import (
    REPORT,
    CloseLink,
    LinkFailed,
    LinkMeasured,
    LinkOpened,
    NodeReady,
    NodeReport,
    NodeSetup,
    OpenLink,
    Probe,
)
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet.base import Fleet, Reported, WorkerEnded
from planaria.runtime.fleet.local import LocalFleet
from planaria.runtime.transport.secure import new_key

GRACE_S = 0.5
"""seconds to wait for a node's exit after an edge breaks, before the edge itself is blamed"""
_ADVICE = "nothing was written, measure again"

EmulatedLinks = Mapping[NodePair, tuple[float, float | None]]
"""(from, to), in both orders → latency (s) and bandwidth (bytes/s) to emulate"""
OnPair = Callable[[NodePair, MeasuredLink, MeasuredLink], None]
"""called with each measured pair and its links in both directions"""


def survey(
    config: FleetConfig, names: Sequence[str], links: EmulatedLinks, on_pair: OnPair
) -> dict[NodePair, MeasuredLink]:
    """Measure the links between local processes, one for each of ``names``, in both directions.

    Pairs are measured concurrently only if emulated links leave this machine idle, since real links would share it.

    :raises RunStopped: if a node exits or two nodes cannot connect; it names them.
    """
    demand = {(a, b): max(_capacity(links[a, b]), _capacity(links[b, a])) for a, b in links}
    setup = NodeSetup(config.host, new_key(), config.heartbeat_s, config.timeout_s)
    entry = partial(link_survey_node.main, setup)
    fleet = LocalFleet(entry, PRELOAD, config)
    try:
        leader = SurveyLeader(fleet, names, links, on_pair)
        leader.gather()
        for batch in pair_batches(len(names), demand, CAPACITY):
            leader.measure(batch)
        return leader.found
    finally:
        for name in names:
            fleet.send(name, ExitWorker().model_dump_json().encode())
        fleet.close()


class SurveyLeader:
    """Sends orders to the nodes and collects their reports."""

    def __init__(self, fleet: Fleet, names: Sequence[str], links: EmulatedLinks, on_pair: OnPair) -> None:
        self.found: dict[NodePair, MeasuredLink] = {}
        self._fleet = fleet
        self._names = names
        self._links = links
        self._on_pair = on_pair
        self._node_of = {name: n for n, name in enumerate(names)}
        self._busy: dict[int, NodePair] = {}
        """node → the pair that is being measured"""
        self._addresses: dict[int, str] = {}
        """node → its address"""
        self._opened: set[int] = set()
        self._samples: dict[int, NodeSamples] = {}

    def gather(self) -> None:
        """Start every node, and wait until it is ready."""
        for name in self._names:
            self._fleet.spawn(name, 0)
        while len(self._addresses) < len(self._names):
            self._addresses |= {node: report.at for node, report in self._reports() if isinstance(report, NodeReady)}

    def measure(self, batch: Sequence[NodePair]) -> None:
        """Measure these disjoint pairs concurrently."""
        self._busy = {node: pair for pair in batch for node in pair}
        self._opened.clear()
        self._samples.clear()
        for low, high in batch:
            self._open_link(low, high, "")
            self._open_link(high, low, self._addresses[low])
        while self._busy:
            for node, report in self._reports():
                self._follow(node, report)

    def _follow(self, node: int, report: NodeReport) -> None:
        """Advance a pair: both ends connect, the low one probes, then the high one, then the edge closes."""
        pair = self._busy.get(node)
        if (
            pair is None
            or not isinstance(report, LinkOpened | LinkMeasured | LinkFailed)
            or report.link != _link_id(pair)
        ):
            return  # a report of an earlier pair
        low, high = pair
        match report:
            case LinkOpened():
                self._opened.add(node)
                if self._opened.issuperset(pair):
                    self._order(low, Probe())
            case LinkMeasured(samples=samples):
                self._samples[node] = samples
                if node == low:
                    self._order(high, Probe())
                else:
                    self._finish_pair(pair)
            case LinkFailed(detail=detail):
                self._blame(pair, detail)

    def _open_link(self, node: int, peer: int, at: str) -> None:
        latency_s, bandwidth = self._links[peer, node]  # the receiving end holds frames back
        link = _link_id((min(node, peer), max(node, peer)))
        self._order(node, OpenLink(link=link, at=at, peer=peer, latency_s=latency_s, bandwidth=bandwidth))

    def _finish_pair(self, pair: NodePair) -> None:
        low, high = pair
        for node in pair:
            self._order(node, CloseLink())
            del self._busy[node]
        forward = estimate_link(self._samples[low], self._samples[high])
        backward = estimate_link(self._samples[high], self._samples[low])
        self.found |= {(low, high): forward, (high, low): backward}
        self._on_pair(pair, forward, backward)

    def _blame(self, pair: NodePair, detail: str) -> None:
        """Raise :class:`RunStopped` for a broken edge, or for a node's exit that is reported shortly after."""
        deadline = time.monotonic() + GRACE_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            list(self._reports(remaining_s))
        raise RunStopped(f"link {self._label(pair)}: {detail}; {_ADVICE}")

    def _reports(self, timeout_s: float = 1.0) -> Iterator[tuple[int, NodeReport]]:
        """Yield the nodes' reports; RunStopped if a node exits."""
        for notice in self._fleet.poll(timeout_s):
            assert isinstance(notice, Reported | WorkerEnded), "no machine joins or leaves a survey"
            node = self._node_of[notice.worker]
            if isinstance(notice, WorkerEnded):
                where = f"link {self._label(self._busy[node])}: " if node in self._busy else ""
                raise RunStopped(f"{where}{notice.worker} exited ({notice.cause}, {notice.detail}); {_ADVICE}")
            try:
                report = REPORT.validate_json(notice.text)
            except ValidationError as error:
                reason = f"{notice.worker} sent an invalid report ({first_error(error)})"
                raise RunStopped(f"{reason}; {_ADVICE}") from None
            if not isinstance(report, Heartbeat):
                yield node, report

    def _label(self, pair: NodePair) -> str:
        return " – ".join(self._names[node] for node in pair)

    def _order(self, node: int, order: Fact) -> None:
        self._fleet.send(self._names[node], order.model_dump_json().encode())


def _capacity(link: tuple[float, float | None]) -> float:
    return float("inf") if link[1] is None else link[1]


def _link_id(pair: NodePair) -> str:
    return f"survey:{pair[0]}-{pair[1]}"
