"""Two processes that each have one replica's stage and meet over planaria edges: what exchanges are measured on.

Bytes are what the kernel has sent on a process's TCP sockets (TCP_INFO): headers of frames and
whatever was sent twice included, headers of IP and TCP not. Unlike an interface's counters they see nobody else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planaria.config.schema import ModelConfig
from planaria.exchange import message
from planaria.exchange.aggregate import equal, mean
from planaria.exchange.base import Offer, Outer, Weights
from planaria.exchange.diloco import pseudo_gradient
from planaria.exchange.lab import Replica, replicas
from planaria.exchange.noloco import NoLoCo
from planaria.models.families import build_stage
from planaria.runtime.transport.edge import Arrived, Edge, EdgeSpec, Opened
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.secure import new_key
from planaria.runtime.transport.wire import Content, OfferPart

TIMEOUT_S = 60.0


class TwoTensors(NoLoCo):
    """NoLoCo as released: every member sends φ and Δ when its inner steps are done."""

    half: bool = False
    """in bf16, else in fp32"""

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        parts = (message.pack(outer["slow"]), message.pack(pseudo_gradient(outer["slow"], fast)))
        return Offer(torch.cat(parts).to(torch.bfloat16 if self.half else torch.float32))

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        """Equation (1) of docs/noloco.md as it is printed, then (2)."""
        said = {member: offer.blocking for member, offer in offers.items() if offer.blocking is not None}
        halves = {member: blocking.float().chunk(2) for member, blocking in said.items()}
        slows, drifts = (
            mean({member: message.unpack(half[part], outer["slow"]) for member, half in halves.items()}, equal(halves))
            for part in (0, 1)
        )
        before = outer["momentum"]
        momentum = {
            name: self.alpha * before.get(name, torch.zeros_like(slow))
            - self.beta * drifts[name]
            - self.gamma * (slow - slows[name])
            for name, slow in outer["slow"].items()
        }
        slow = {name: tensor + momentum[name] for name, tensor in outer["slow"].items()}
        return message.fast_copy(slow, fast), outer.settled(slow=slow, momentum=momentum)


FULL, HALF, ONE, EIGHT, FOUR = "two in fp32", "two in bf16", "one", "8 bits", "4 bits"
ARMS: dict[str, NoLoCo] = {
    FULL: TwoTensors(),
    HALF: TwoTensors(half=True),
    ONE: NoLoCo(),
    "φ ahead": NoLoCo(prefetch=True),
    "16 bits": NoLoCo(bits=16),
    EIGHT: NoLoCo(bits=8),
    FOUR: NoLoCo(bits=4),
}
"""below 32 bits, φ always goes ahead"""
LOOPBACK = "loopback"
LINKS: dict[str, tuple[float, float | None]] = {
    LOOPBACK: (0.0, None),
    "1 Gb/s, 5 ms": (0.005, 1e9 / 8),
    "100 Mb/s, 20 ms": (0.020, 1e8 / 8),
}
"""name → latency in seconds, bytes a second"""


@dataclass(frozen=True)
class OpenRound:
    """One round, as one member or both together saw it: bytes sent, by the kernel's count and the edge's; seconds."""

    prefetched: int
    blocking: int
    stated_prefetched: int
    stated_blocking: int
    ahead_s: float
    """until the other's prefetched part was in"""
    waited_s: float
    """from the last inner step to new weights"""
    computed_s: float
    """of these, for making and reading messages"""

    @property
    def sent(self) -> int:
        """All bytes, by the kernel's count."""
        return self.prefetched + self.blocking

    @property
    def payload(self) -> int:
        """All bytes, by the edges' count."""
        return self.stated_prefetched + self.stated_blocking

    def with_other(self, other: OpenRound) -> OpenRound:
        """Bytes of both; the time of whoever took longer."""
        ours, theirs = vars(self), vars(other)
        return OpenRound(**{key: (max if key.endswith("_s") else sum)((ours[key], theirs[key])) for key in ours})


def sent_on_tcp() -> int:
    """Bytes that this process's open TCP sockets have sent, by the kernel's count; without TCP's and IP's headers."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        if not (link.is_symlink() and str(link.readlink()).startswith("socket:")):
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent, Linux 4.19 and newer
    return int(total)


class Member:
    """One of the two processes: a replica for each arm, an edge for each link."""

    def __init__(self, given: argparse.Namespace, key: bytes, me: int, other: Connection) -> None:
        torch.set_num_threads(1)
        self._given, self._me, self._other = given, me, other
        self._inbox = Inbox()
        self._port = Port("127.0.0.1", key)
        other.send(self._port.address)
        self._there = other.recv() if me else (other.recv() and "")
        config = ModelConfig(vocab=260, dim=given.dim, layers=given.layers, hidden=given.dim * 11 // 4)
        module = build_stage(config, 1, 1, 0)
        self._weights = {name: tensor.detach() for name, tensor in module.named_parameters()}
        self.shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        self._edges = {link: self._open(link, 2 * message.packed_bytes(self.shapes)) for link in LINKS}
        self._edge = self._edges[LOOPBACK]
        self._of: dict[str, Replica] = {}

    def _open(self, link: str, max_bytes: int) -> Edge:
        spec = EdgeSpec(link, self._there, 1 - self._me, max_bytes, TIMEOUT_S, *LINKS[link])
        edge = Edge(spec, self._port, self._inbox)
        self._expect(Opened)
        return edge

    def begin(self, link: str) -> None:
        """All arms start again, over this link."""
        self._edge = self._edges[link]
        self._of = {arm: replicas(made, self._weights, 1)[0] for arm, made in ARMS.items()}

    def meet(self, arm: str) -> OpenRound:
        """An inner phase and the round after it, together with the other process."""
        made, replica, clock = ARMS[arm], self._of[arm], time.monotonic
        marks = [self._together()]
        began = clock()
        theirs_prefetched = self._swap(made.prefetched(replica.outer))
        ahead = clock() - began
        marks.append(self._together())
        self._drift(replica)
        self._together()
        began = clock()
        ours = made.offer(replica.outer, replica.fast)
        offered = clock()
        theirs_blocking = self._swap(ours.blocking)
        arrived = clock()
        offers = {self._me: ours, 1 - self._me: Offer(theirs_blocking, theirs_prefetched)}
        replica.fast, replica.outer = made.settle(replica.outer, replica.fast, offers, self._me)
        waited, computed = clock() - began, clock() - arrived + offered - began
        marks.append(self._together())
        tcp, edge = zip(*marks, strict=True)
        return OpenRound(
            tcp[1] - tcp[0], tcp[2] - tcp[1], edge[1] - edge[0], edge[2] - edge[1], ahead, waited, computed
        )

    def difference(self, arm: str) -> float:
        """The largest between a weight of this arm and the same weight of two tensors in fp32."""
        exact, found = self._of[FULL].fast, self._of[arm].fast
        return max(float((tensor - exact[name]).abs().max()) for name, tensor in found.items())

    def _together(self) -> tuple[int, int]:
        """When both are here and have all that was sent: bytes sent so far, by the kernel's count and the edge's."""
        self._other.send(None)
        self._other.recv()
        return sent_on_tcp(), self._edge.sent_bytes

    def _drift(self, replica: Replica) -> None:
        """The inner phase: the same for every arm, another for every member and round."""
        generator = torch.Generator().manual_seed(2 * replica.outer.rounds + self._me)
        for tensor in replica.fast.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=self._given.drift)

    def _swap(self, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        self._edge.send(OfferPart(1, Content.BLOCKING), part)
        payload: Tensor = self._expect(Arrived).payload
        return payload

    def _expect(self, kind: type) -> Any:
        item = self._inbox.get(timeout=TIMEOUT_S)
        if not isinstance(item, kind):
            raise RuntimeError(f"{kind.__name__} was expected of the edge, which said {item}")
        return item


class Pair:
    """This process's member, and the other process, which is told to do the same."""

    def __init__(self, member: Member, orders: Connection) -> None:
        self.member, self._orders = member, orders

    def begin(self, link: str) -> None:
        self._orders.send(("begin", link))
        self.member.begin(link)

    def meet(self, arm: str) -> OpenRound:
        self._orders.send(("meet", arm))
        ours = self.member.meet(arm)
        return ours.with_other(self._orders.recv())

    def difference(self, arm: str) -> float:
        self._orders.send(("difference", arm))
        return max(self.member.difference(arm), self._orders.recv())


@contextmanager
def opened(given: argparse.Namespace) -> Iterator[Pair]:
    key = new_key()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_other, args=(given, key, theirs), daemon=True)
    process.start()
    try:
        yield Pair(Member(given, key, 0, ours), ours)
    finally:
        ours.send(("end", ""))
        process.join(5)


def _other(given: argparse.Namespace, key: bytes, orders: Connection) -> None:
    """The other process: does what it is told, and answers, until the orders end."""
    member = Member(given, key, 1, orders)
    while (order := orders.recv())[0] != "end":
        what, name = order
        if what == "begin":
            member.begin(name)
        else:
            orders.send(member.meet(name) if what == "meet" else member.difference(name))
