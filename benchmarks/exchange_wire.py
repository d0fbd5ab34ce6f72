"""What a meeting of two replicas puts on the wire, and how long they wait for it: two processes, real sockets.

Each process has one replica's stage, and they meet round after round over a planaria edge on loopback, also with a
slower link emulated. The exchanges are those that training uses. Beside them stands the form of arXiv 2506.10911's
released code: two tensors, the slow weights and the drifts, are sent while somebody waits. (That code also gathers them
at one of the two and sends the mean back; here they are swapped at once, which is kinder to it.) The others send one
tensor, or the slow weights ahead while the inner steps run and then the drifts, in 32 bits or fewer. All arms see the
same inner phases, which are random drifts.

The claims, by the kernel's count: one tensor in place of two sends 0.50 ± 0.02 of all bytes and ends with the same
weights to 1e-5. With slow weights sent ahead, somebody waits for at most 0.27 (8 bits) and 0.14 (4 bits) of the bytes
of two tensors in bf16. What exchanges state (``cost``) is what was sent, to 1 %. There is none on time.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.common import Cell, Claim, Row, conclude, parser, start
from benchmarks.meeting import ARMS, EIGHT, FOUR, FULL, HALF, LINKS, ONE, OpenRound, Pair, TwoTensors, opened
from planaria.common.errors import UserError
from planaria.runtime.transport.wire import HEADER_BYTES

if TYPE_CHECKING:
    import torch

NAME = "exchange_wire"
Found = dict[str, dict[str, list[OpenRound]]]
"""link → arm → its rounds"""


def measure(given: argparse.Namespace, pair: Pair) -> tuple[Found, dict[str, list[float]]]:
    """The rounds after a first one, and how far each arm's weights ended from those of two tensors in fp32, by link."""
    found: Found = {}
    apart: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for link in LINKS:
        pair.begin(link)
        found[link] = {arm: [] for arm in ARMS}
        for repeat in range(given.repeats + 1):
            for arm in ARMS if repeat % 2 else reversed(ARMS):
                meeting = pair.meet(arm)
                if repeat:  # the first touches buffers and sockets
                    found[link][arm].append(meeting)
        for arm in ARMS:
            apart[arm].append(pair.difference(arm))
        print(f"{link}: {given.repeats + 1} rounds of {len(ARMS)} arms", flush=True)
    return found, apart


def byte_rows(rounds: Mapping[str, list[OpenRound]], weights: int) -> list[Row]:
    """Ratios of bytes that the kernel counted; beside them the payload that one member sends."""
    both = zip(rounds[ONE], rounds[FULL], strict=True)
    rows = [Row(f"all bytes: {ONE} / {FULL}", [a.sent / b.sent for a, b in both], "0.5", Claim(0.48, 0.52))]
    claims = {EIGHT: Claim(high=0.27), FOUR: Claim(high=0.14)}
    for late in (True, False):
        for arm in ARMS:
            if arm == HALF:
                continue
            both = zip(rounds[arm], rounds[HALF], strict=True)
            ratios = [a.blocking / b.blocking if late else a.sent / b.sent for a, b in both]
            payload, reference = (m.stated_blocking if late else m.payload for m in (rounds[arm][0], rounds[HALF][0]))
            beside: dict[str, Cell] = {"bytes a weight": f"{payload / 2 / weights:.3f}"}
            what = f"{'waited for' if late else 'all bytes'}: {arm} / {HALF}"
            limit = f"{payload / reference:.3f}: payload"
            rows.append(Row(what, ratios, limit, claims.get(arm) if late else None, beside))
    return rows


def count_rows(rounds: Mapping[str, list[OpenRound]], shapes: Mapping[str, torch.Size]) -> list[Row]:
    """The kernel's count against the edges', and against what the exchanges state."""
    meetings = [meeting for arm in ARMS for meeting in rounds[arm]]
    framed = [m.sent / m.payload for m in meetings]
    headers = [(m.sent - m.payload) / (4 if m.prefetched else 2) for m in meetings]
    stated = []
    for arm, made in ARMS.items():
        if not isinstance(made, TwoTensors):
            cost = made.cost(shapes, 2)
            stated += [m.sent / (2 * cost.total) for m in rounds[arm]]
            stated += [m.blocking / (2 * cost.critical) for m in rounds[arm]]
    return [
        Row("the kernel's count / the edges'", framed, "1: payload alone"),
        Row("bytes a frame beside its payload", headers, f"{HEADER_BYTES}: planaria's header"),
        Row("the kernel's count / what exchanges state", stated, "1", Claim(0.99, 1.01)),
    ]


def weight_rows(apart: Mapping[str, list[float]]) -> list[Row]:
    """Largest differences of weights, in 1e-5."""
    return [
        Row(
            f"weights: {arm} − {FULL}, in 1e-5",
            [1e5 * difference for difference in apart[arm]],
            "0",
            Claim(high=1.0) if arm == ONE else None,
            {},
            "worst",
        )
        for arm in ARMS
        if arm != FULL
    ]


def time_rows(found: Found) -> list[Row]:
    """Waits as parts of that for one tensor in the same round."""
    rows = []
    for link, (latency, bandwidth) in LINKS.items():
        for arm, meetings in found[link].items():
            ratios = [a.waited_s / b.waited_s for a, b in zip(meetings, found[link][ONE], strict=True)]
            line = meetings[0].stated_blocking / 2 / bandwidth + latency if bandwidth else 0.0
            waits = [1e3 * m.waited_s for m in meetings]
            beside: dict[str, Cell] = {
                "wait ms": f"{median(waits):.0f}",
                "from … to": f"{min(waits):.0f} … {max(waits):.0f}",
                "computing": f"{median(1e3 * m.computed_s for m in meetings):.0f}",
                "φ ahead": f"{median(1e3 * m.ahead_s for m in meetings):.0f}" if meetings[0].prefetched else "",
            }
            rows.append(Row(f"{link}: {arm} / {ONE}", ratios, f"the line: {1e3 * line:.0f} ms", None, beside))
    return rows


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--repeats", type=int, default=7, help="rounds of each arm and link, after a first")
    flags.add_argument("--dim", type=int, default=256, help="width of the stage")
    flags.add_argument("--layers", type=int, default=4, help="of the stage")
    flags.add_argument("--drift", type=float, default=1e-3, help="standard deviation of what an inner phase adds")
    given = flags.parse_args()
    if not hasattr(socket, "TCP_INFO") or not Path("/proc/self/fd").is_dir():
        raise UserError("bytes are counted by Linux' TCP_INFO, which is not here; run this benchmark on Linux")
    with opened(given) as pair:
        found, apart = measure(given, pair)
        shapes = pair.member.shapes
    weights = sum(shape.numel() for shape in shapes.values())
    rounds = {arm: [meeting for link in found.values() for meeting in link[arm]] for arm in ARMS}
    rows = [*byte_rows(rounds, weights), *count_rows(rounds, shapes), *weight_rows(apart), *time_rows(found)]
    notes = [
        f"{weights / 1e6:.2f} million weights a stage; bytes a weight: what one member sends, payload alone",
        "wait: from the last inner step to new weights, of the member that took longer; computing: making and reading "
        "messages, part of it",
        "what is beside payload above the median was sent twice by TCP; weights: the largest, of norms, are near 1",
        "φ ahead: ms that the inner steps must last for nobody to wait for it",
    ]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
