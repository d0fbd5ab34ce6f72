"""An edge's round trips beside the best that the same two processes reach without it, message size by message size.

A payload goes there and eight bytes come back: over raw gloo, over a raw Python socket, over an edge; and over the
standard library's TLS 1.3 and over an edge between machines, which is inside TLS. The claims: on one machine an edge
keeps at least 95 % of the better of gloo and the socket, and between machines 80 % of raw TLS. All sides take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start
from benchmarks.pair import SIDES, opened

NAME = "edge"
HERE, BEYOND = Claim(low=0.95), Claim(low=0.8)
KB = 1024


def rows(size: int, took: Mapping[str, Sequence[float]]) -> list[Row]:
    """The verdicts on messages of ``size`` bytes: seconds of a round trip, by side and repeat."""
    what = f"{size // KB} KB" if size < KB * KB else f"{size // KB // KB} MB"
    usual = {side: statistics.median(times) for side, times in took.items()}
    best = min(("gloo", "socket"), key=usual.__getitem__)
    found = []
    for name, raw, edge, claim in ((what, best, "edge", HERE), (f"{what}, TLS", "raw tls", "edge tls", BEYOND)):
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
            found += rows(size, dict(zip(SIDES, interleaved(sides, given.repeats), strict=True)))
    return conclude(NAME, given, found, ["measured: the raw side's round trip over the edge's, in the same repeat"])


if __name__ == "__main__":
    start(main)
