"""An edge's round trips beside the best that the same two processes reach without it, message size by message size.

A payload goes there and eight bytes come back: over raw gloo, over a raw Python socket, over an edge; and over the
standard library's TLS 1.3 and over an edge between machines, which is inside TLS. The claims: on one machine an edge
keeps at least 95 % of the better of gloo and the socket, and between machines 80 % of raw TLS. All sides take turns.

Between stages on GPUs a frame is already in host memory when it is sent, because the device has copied it there: into
a ring that both ends have mapped (``ring``), in place of memory of the sender (``edge``). From then until the other end
has it, a ring carries at least three times what an edge does, with at most half of the processor time of both ends, of
the largest message. ``filled ring`` adds what a sender without a device would do: copy it into the ring.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start
from benchmarks.pair import SIDES, Side, opened

NAME = "edge"
HERE, BEYOND = Claim(low=0.95), Claim(low=0.8)
RING, RING_CPU = Claim(low=3.0), Claim(high=0.5)
KB = 1024


def rows(size: int, took: Mapping[Side, Sequence[float]]) -> list[Row]:
    """The verdicts on messages of ``size`` bytes: seconds of a round trip, by side and repeat."""
    what = f"{size // KB} KB" if size < KB * KB else f"{size // KB // KB} MB"
    usual = {side: statistics.median(times) for side, times in took.items()}
    best: Side = "gloo" if usual["gloo"] < usual["socket"] else "socket"
    found = []
    compared: list[tuple[str, Side, Side, Claim]] = [
        (what, best, "edge", HERE),
        (f"{what}, TLS", "raw tls", "edge tls", BEYOND),
    ]
    for name, raw, edge, claim in compared:
        found.append(
            Row(
                what=name,
                values=[one / other for one, other in zip(took[raw], took[edge], strict=True)],
                limit=f"{raw} itself: 1",
                claim=claim,
                beside={f"{side} ms": 1000 * usual[side] for side in SIDES if ("tls" in side) == ("tls" in edge)},
            )
        )
    return found


def ring_rows(size: int, took: Mapping[Side, Sequence[float]], spent: Sequence[Sequence[float]]) -> list[Row]:
    """The verdicts on the ring beside the edge's socket: seconds, and processor seconds of socket and ring."""
    what, socket_cpu, ring_cpu = f"{size // KB // KB} MB, ring / edge", *map(statistics.median, spent)
    plain, filled = (
        [edge / ring for edge, ring in zip(took["edge"], took[side], strict=True)] for side in ("ring", "filled ring")
    )
    cpu = [ring / edge for edge, ring in zip(*spent, strict=True)]
    return [
        Row(f"{what}: bandwidth", plain, "none: no copy", RING),
        Row(f"{what}: bandwidth, filled by a processor", filled, "none: one copy"),
        Row(f"{what}: CPU", cpu, "> 0", RING_CPU, {"edge ms": 1000 * socket_cpu, "ring ms": 1000 * ring_cpu}),
    ]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument(
        "--sizes", type=int, nargs="+", default=[64, 1024, 4096, 32768], metavar="KB", help="message sizes"
    )
    flags.add_argument("--volume", type=int, default=64, metavar="MB", help="sent in one repeat; at most 256 messages")
    flags.add_argument("--repeats", type=int, default=15, help="of each side and size")
    given = flags.parse_args()
    found: list[Row] = []
    with opened(max(given.sizes) * KB) as pair:
        for size in (kilobytes * KB for kilobytes in given.sizes):
            count = min(256, max(4, given.volume * KB * KB // size))
            sides = [lambda n=count, s=size, side=side: pair.transfer(side, s, n) for side in SIDES]
            interleaved(sides, 1)  # first touches of buffers and sockets
            took = dict(zip(SIDES, interleaved(sides, given.repeats), strict=True))
            found += rows(size, took)
            if size == max(given.sizes) * KB:
                both = [lambda n=count, s=size, side=side: pair.spent(side, s, n) for side in ("edge", "ring")]
                found += ring_rows(size, took, interleaved(both, given.repeats))
    return conclude(NAME, given, found, ["measured: the raw side's round trip over the edge's, in the same repeat"])


if __name__ == "__main__":
    start(main)
