"""Bytes and waiting time of an exchange between two processes over real sockets.

Each process has one replica's stage. They exchange round after round over an edge on loopback, also with emulated
slower links. The baseline is the released code of arXiv 2506.10911: two tensors, the slow weights and the drifts, are
sent while a replica waits (here swapped at once instead of gathered). The other arms send one tensor, or the slow
weights during the inner steps and then the drifts, in 32 bits or fewer. All arms see the same random drifts.

Claims, by the kernel's count: one tensor takes 0.50 ± 0.02 of the bytes of two and ends with the same weights to 1e-5;
with slow weights sent ahead, a replica waits for at most 0.27 (8 bits) and 0.14 (4 bits) of the bytes of two in bf16.
Times have no claim.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.exchange_in_process import Replica, replicas
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, start
from benchmarks.processes import Both, two_ends
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.exchange import weight_message
from planaria.exchange.aggregate import equal_weights, mean
from planaria.exchange.base import StageOuterState, Update, Weights
from planaria.exchange.diloco import pseudo_gradient
from planaria.exchange.noloco import NoLoCo
from planaria.models.families import build_stage
from planaria.runtime.transport.edge import Edge, EdgeOpened, EdgeSpec, FrameArrived
from planaria.runtime.transport.emulated_link import EmulatedLink
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.secure import new_key
from planaria.runtime.transport.wire import FrameContent, UpdatePart

TIMEOUT_S = 60.0


class TwoTensors(NoLoCo):
    """NoLoCo as released: every member sends φ and Δ after its inner steps."""

    half: bool = False  # in bf16, else in fp32

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        parts = (weight_message.pack(outer["slow"]), weight_message.pack(pseudo_gradient(outer["slow"], fast)))
        return Update(torch.cat(parts).to(torch.bfloat16 if self.half else torch.float32))

    def settle(
        self, outer: StageOuterState, fast: Weights, updates: Mapping[int, Update], me: int
    ) -> tuple[dict[str, Tensor], StageOuterState]:
        """Apply equations (1) and (2) of docs/systems.md."""
        said = {member: update.blocking for member, update in updates.items() if update.blocking is not None}
        halves = {member: blocking.float().chunk(2) for member, blocking in said.items()}
        slows, drifts = (
            mean(
                {member: weight_message.unpack(half[part], outer["slow"]) for member, half in halves.items()},
                equal_weights(halves),
            )
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
        return weight_message.fast_copy(slow, fast), outer.settled(slow=slow, momentum=momentum)


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
    """One round of one member or both: bytes by the kernel's and the edge's count, and seconds."""

    prefetched: int
    blocking: int
    stated_prefetched: int
    stated_blocking: int
    ahead_s: float  # until the other's prefetched part has arrived
    waited_s: float  # from the last inner step to new weights
    computed_s: float  # of these, for encoding and decoding messages

    @property
    def sent(self) -> int:
        return self.prefetched + self.blocking

    @property
    def payload(self) -> int:
        return self.stated_prefetched + self.stated_blocking

    def with_other(self, other: OpenRound) -> OpenRound:
        """Return the bytes of both, and the longer times."""
        ours, theirs = vars(self), vars(other)
        return OpenRound(**{key: (max if key.endswith("_s") else sum)((ours[key], theirs[key])) for key in ours})


def sent_on_tcp() -> int:
    """Return the bytes that this process's TCP sockets sent (TCP_INFO).

    Frame headers and retransmissions count, TCP and IP headers do not. Other processes are not included.
    """
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
    """One of the two processes, with a replica per arm and an edge per link."""

    def __init__(self, me: int, other: Connection, args: Namespace, key: bytes) -> None:
        torch.set_num_threads(1)
        self._args, self._me, self._other = args, me, other
        self._inbox = Inbox()
        self._port = Port("127.0.0.1", key)
        other.send(self._port.address)
        self._there = other.recv() if me else (other.recv() and "")
        config = ModelConfig(vocab=260, dim=args.dim, layers=args.layers, hidden=args.dim * 11 // 4)
        module = build_stage(config, 1, 1, 0)
        self._weights = {name: tensor.detach() for name, tensor in module.named_parameters()}
        self.shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        self._edges = {link: self._open(link, 2 * weight_message.packed_bytes(self.shapes)) for link in LINKS}
        self._edge = self._edges[LOOPBACK]
        self._of: dict[str, Replica] = {}

    def _open(self, link: str, max_bytes: int) -> Edge:
        spec = EdgeSpec(link, self._there, 1 - self._me, max_bytes, TIMEOUT_S, EmulatedLink(*LINKS[link]))
        edge = Edge(spec, self._port, self._inbox)
        self._expect(EdgeOpened)
        return edge

    def begin(self, link: str) -> None:
        self._edge = self._edges[link]
        self._of = {arm: replicas(made, self._weights, 1)[0] for arm, made in ARMS.items()}

    def meet(self, arm: str) -> OpenRound:
        """Run an inner phase and its round with the other process."""
        made, replica, clock = ARMS[arm], self._of[arm], time.monotonic
        marks = [self._together()]
        began = clock()
        theirs_prefetched = self._swap(made.prefetched(replica.outer))
        ahead = clock() - began
        marks.append(self._together())
        self._drift(replica)
        self._together()
        began = clock()
        ours = made.update(replica.outer, replica.fast)
        offered = clock()
        theirs_blocking = self._swap(ours.blocking)
        arrived = clock()
        updates = {self._me: ours, 1 - self._me: Update(theirs_blocking, theirs_prefetched)}
        replica.fast, replica.outer = made.settle(replica.outer, replica.fast, updates, self._me)
        waited, computed = clock() - began, clock() - arrived + offered - began
        marks.append(self._together())
        tcp, edge = zip(*marks, strict=True)
        sent = tcp[1] - tcp[0], tcp[2] - tcp[1], edge[1] - edge[0], edge[2] - edge[1]
        return OpenRound(*sent, ahead, waited, computed)

    def difference(self, arm: str) -> float:
        exact, found = self._of[FULL].fast, self._of[arm].fast
        return max(float((tensor - exact[name]).abs().max()) for name, tensor in found.items())

    def _together(self) -> tuple[int, int]:
        """Synchronise; return the bytes sent so far by the kernel's and the edge's count."""
        self._other.send(None)
        self._other.recv()
        return sent_on_tcp(), self._edge.sent_bytes

    def _drift(self, replica: Replica) -> None:
        """Apply the inner phase, equal for all arms, different by member and round."""
        generator = torch.Generator().manual_seed(2 * replica.outer.rounds + self._me)
        for tensor in replica.fast.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=self._args.drift)

    def _swap(self, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        self._edge.send(UpdatePart(1, FrameContent.BLOCKING), part)
        payload: Tensor = self._expect(FrameArrived).payload
        return payload

    def _expect(self, kind: type) -> Any:
        item = self._inbox.get(timeout=TIMEOUT_S)
        if not isinstance(item, kind):
            raise RuntimeError(f"expected {kind.__name__} from the edge, got {item}")
        return item


Found = dict[str, dict[str, list[OpenRound]]]  # link → arm → its rounds


def measure(args: Namespace, both: Both) -> tuple[Found, dict[str, list[float]]]:
    """Return the rounds after the first, and the distance of each arm's final weights from two tensors in fp32."""
    found: Found = {}
    apart: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for link in LINKS:
        both("begin", link)
        found[link] = {arm: [] for arm in ARMS}
        for repeat in range(args.repeats + 1):
            for arm in ARMS if repeat % 2 else reversed(ARMS):
                ours, theirs = both("meet", arm)
                if repeat:  # the first round warms up buffers and sockets
                    found[link][arm].append(ours.with_other(theirs))
        for arm in ARMS:
            apart[arm].append(max(both("difference", arm)))
        print(f"{link}: {args.repeats + 1} rounds of {len(ARMS)} arms", flush=True)
    return found, apart


def byte_rows(rounds: Mapping[str, list[OpenRound]], weights: int) -> list[Row]:
    """Ratios of the kernel's bytes, with the payload of one member."""
    both = zip(rounds[ONE], rounds[FULL], strict=True)
    rows = [Row(f"all bytes: {ONE} / {FULL}", [a.sent / b.sent for a, b in both], "0.5", Claim(0.48, 0.52))]
    claims = {EIGHT: Claim(high=0.27), FOUR: Claim(high=0.14)}
    for late in (True, False):
        for arm in ARMS:
            if arm == HALF:
                continue
            both = zip(rounds[arm], rounds[HALF], strict=True)
            over = [a.blocking / b.blocking if late else a.sent / b.sent for a, b in both]
            payload, reference = (m.stated_blocking if late else m.payload for m in (rounds[arm][0], rounds[HALF][0]))
            columns = {"bytes a weight": f"{payload / 2 / weights:.3f}"}
            what = f"{'waited for' if late else 'all bytes'}: {arm} / {HALF}"
            limit = f"{payload / reference:.3f}: payload"
            rows.append(Row(what, over, limit, claims.get(arm) if late else None, columns))
    return rows


def weight_rows(apart: Mapping[str, list[float]]) -> list[Row]:
    rows = []
    for arm in (arm for arm in ARMS if arm != FULL):
        claim = Claim(high=1.0) if arm == ONE else None
        rows.append(Row(f"weights: {arm} − {FULL}, in 1e-5", [1e5 * x for x in apart[arm]], "0", claim, {}, "worst"))
    return rows


def time_rows(found: Found) -> list[Row]:
    """Waits over that for one tensor in the same round."""
    rows = []
    for link, (latency, bandwidth) in LINKS.items():
        for arm, meetings in found[link].items():
            over = [a.waited_s / b.waited_s for a, b in zip(meetings, found[link][ONE], strict=True)]
            line = meetings[0].stated_blocking / 2 / bandwidth + latency if bandwidth else 0.0
            waits = [1e3 * m.waited_s for m in meetings]
            columns = {
                "wait ms": f"{median(waits):.0f}",
                "from … to": f"{min(waits):.0f} … {max(waits):.0f}",
                "computing": f"{median(1e3 * m.computed_s for m in meetings):.0f}",
                "φ ahead": f"{median(1e3 * m.ahead_s for m in meetings):.0f}" if meetings[0].prefetched else "",
            }
            rows.append(Row(f"{link}: {arm} / {ONE}", over, f"the line: {1e3 * line:.0f} ms", None, columns))
    return rows


@benchmark(
    "exchange_wire",
    repeats=Flag(7, "rounds of each arm and link, after a first"),
    dim=Flag(256, "width of the stage"),
    layers=Flag(4, "of the stage"),
    drift=Flag(1e-3, "standard deviation of what an inner phase adds"),
)
def main(args: Namespace) -> Measurement:
    if not hasattr(socket, "TCP_INFO") or not Path("/proc/self/fd").is_dir():
        raise UserError("bytes are counted by Linux' TCP_INFO, which is not here; run this benchmark on Linux")
    with two_ends(Member, args, new_key()) as (member, both):
        found, apart = measure(args, both)
        weights = sum(shape.numel() for shape in member.shapes.values())
    rounds = {arm: [meeting for link in found.values() for meeting in link[arm]] for arm in ARMS}
    rows = [*byte_rows(rounds, weights), *weight_rows(apart), *time_rows(found)]
    notes = [
        f"{weights / 1e6:.2f} million weights a stage; bytes a weight: what one member sends, payload alone",
        "wait: from the last inner step to new weights, of the member that took longer; computing: making and reading "
        "messages, part of it",
        "φ ahead: minimum ms of inner steps for which no member waits for it",
    ]
    return Result(rows, notes)


if __name__ == "__main__":
    start(main)
