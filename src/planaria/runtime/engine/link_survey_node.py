"""A node of a network survey: connects to a peer over an edge, as training does, and times messages."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import torch
from pydantic import Field, TypeAdapter

from planaria.control.facts.events import Fact, Heartbeat
from planaria.control.facts.orders import ExitWorker
from planaria.pipeline.network.measurement import FIRST_BYTES, MAX_BYTES, SMALL_SHARE, NodeSamples, next_size
from planaria.runtime.fleet.base import WorkerConnection
from planaria.runtime.transport.edge import Edge, EdgeFailed, EdgeOpened, EdgeSpec, FrameArrived
from planaria.runtime.transport.emulated_link import EmulatedLink
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.wire import FrameContent, Ping, TensorHeader
from planaria.runtime.worker.control_link import ControlLink, Superseded

T = TypeVar("T")


class OpenLink(Fact):
    """Open an edge that emulates this latency (s) and bandwidth (bytes/s) for received messages."""

    kind: Literal["open_link"] = "open_link"
    link: str
    at: str
    """address of the other end; empty if the other end connects"""
    peer: int
    latency_s: float
    bandwidth: float | None


class Probe(Fact):
    """Time the edge; the other end acknowledges."""

    kind: Literal["probe"] = "probe"


class CloseLink(Fact):
    """Close the edge."""

    kind: Literal["close_link"] = "close_link"


class NodeReady(Fact):
    """The node waits for orders."""

    kind: Literal["ready"] = "ready"
    at: str
    """its address"""


class LinkOpened(Fact):
    """The edge is open at this end."""

    kind: Literal["link_opened"] = "link_opened"
    link: str


class LinkMeasured(Fact):
    """The measured samples."""

    kind: Literal["probe_result"] = "probe_result"
    link: str
    samples: NodeSamples


class LinkFailed(Fact):
    """The edge failed."""

    kind: Literal["link_failed"] = "link_failed"
    link: str
    detail: Annotated[str, Field(max_length=400)]


NodeOrder = Annotated[OpenLink | Probe | CloseLink | ExitWorker, Field(discriminator="kind")]
NodeReport = Annotated[NodeReady | LinkOpened | LinkMeasured | LinkFailed | Heartbeat, Field(discriminator="kind")]
ORDER: TypeAdapter[NodeOrder] = TypeAdapter(NodeOrder)
REPORT: TypeAdapter[NodeReport] = TypeAdapter(NodeReport)


@dataclass(frozen=True)
class NodeSetup:
    """Configuration of a node: address, key and time-outs."""

    host: str
    key: bytes = field(repr=False)
    heartbeat_s: float
    timeout_s: float


class _Lost(Exception):
    """The other end does not answer."""


def main(setup: NodeSetup, connection: WorkerConnection, node: str, incarnation: int) -> NoReturn:
    """Entry point of a node's process."""
    torch.set_num_threads(1)
    Surveyor(setup, connection).run()


class Surveyor:
    """One node's process. It has one edge at a time."""

    def __init__(self, setup: NodeSetup, connection: WorkerConnection) -> None:
        self._setup = setup
        self._inbox = Inbox()
        self._control_link = ControlLink(connection, setup.heartbeat_s, ORDER, self._inbox)
        self._port = Port(setup.host, setup.key)
        self._edge: Edge | None = None
        self._number = 0
        self._noise = torch.empty(0, dtype=torch.uint8)

    def run(self) -> NoReturn:
        """Report the address, then follow orders until the leader sends the order to leave."""
        self._control_link.open()
        self._control_link.report(NodeReady(at=self._port.address))
        while True:
            try:
                self._process(self._control_link.next())
            except Superseded:
                os._exit(0)
            except _Lost as lost:
                assert self._edge is not None
                self._control_link.report(LinkFailed(link=self._edge.spec.link_id, detail=str(lost)[:400]))

    def _process(self, item: Any) -> None:
        match item:
            case OpenLink():
                self._edge = Edge(self._spec(item), self._port, self._inbox)
            case Probe() if self._edge is not None:
                self._control_link.report(LinkMeasured(link=self._edge.spec.link_id, samples=self._probe(self._edge)))
            case CloseLink() if self._edge is not None:
                self._edge.abandon()
                self._edge = None
            case EdgeOpened(edge=edge) if edge is self._edge:
                self._control_link.report(LinkOpened(link=edge.spec.link_id))
            case EdgeFailed(edge=edge, detail=detail) if edge is self._edge:
                raise _Lost(detail)
            case FrameArrived(edge=edge, header=TensorHeader(label=Ping(number, FrameContent.PING))) if (
                edge is self._edge
            ):
                edge.send(Ping(number, FrameContent.PONG), torch.empty(0, dtype=torch.uint8))

    def _spec(self, order: OpenLink) -> EdgeSpec:
        return EdgeSpec(
            link_id=order.link,
            at=order.at,
            peer=order.peer,
            max_bytes=MAX_BYTES,
            open_timeout_s=self._setup.timeout_s,
            link=EmulatedLink(order.latency_s, order.bandwidth),
        )

    def _probe(self, edge: Edge) -> NodeSamples:
        """Return round trips, and transfer times of two message sizes that suit the link."""
        self._transfer(edge, 0)  # the first message starts threads
        round_trips = _repeat(lambda: self._transfer(edge, 0), least=3, most=15, seconds=0.5)
        usual, size = statistics.median(round_trips), FIRST_BYTES
        while (large := next_size(size, self._transfer(edge, size), usual)) > 2 * size:
            size = large
        small = large // SMALL_SHARE
        passages = _repeat(lambda: (self._transfer(edge, small), self._transfer(edge, large)), 3, 7, 1.0)
        return NodeSamples(round_trips=round_trips, small=small, large=large, passages=passages)

    def _transfer(self, edge: Edge, size: int) -> float:
        """Return the seconds from sending ``size`` bytes until the acknowledgement arrives."""
        if len(self._noise) < size:
            self._noise = torch.empty(size, dtype=torch.uint8).random_()  # links may compress what they carry
        self._number += 1
        start = time.monotonic()
        edge.send(Ping(self._number, FrameContent.PING), self._noise[:size])
        while True:
            item = self._control_link.next(start + self._setup.timeout_s)
            match item:
                case None:
                    raise _Lost(f"no answer to a message of {size} bytes within {self._setup.timeout_s:g} s")
                case FrameArrived(header=TensorHeader(label=Ping(number, FrameContent.PONG))) if item.edge is edge:
                    if number == self._number:
                        return time.monotonic() - start
                case _:
                    self._process(item)


def _repeat(measure: Callable[[], T], least: int, most: int, seconds: float) -> list[T]:
    """Measure ``most`` times, or at least ``least`` times if that takes ``seconds``."""
    end, measurements = time.monotonic() + seconds, [measure()]
    while len(measurements) < least or (len(measurements) < most and time.monotonic() < end):
        measurements.append(measure())
    return measurements
