"""An edge's throughput against raw gloo's, between the same two processes, message size by message size.

The claim: planaria's frames (checked headers, own threads, an inbox) keep at least 60 % of what gloo's own send and
receive reach. Both sides meet in groups made by the same function, and take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start
from benchmarks.pair import opened

NAME = "edge"
CLAIM = Claim(low=0.6)
KB = 1024


def row(size: int, count: int, gloo: Sequence[float], edge: Sequence[float]) -> Row:
    """The verdict on ``count`` messages of ``size`` bytes: seconds through ``gloo`` and ``edge``, by repeat."""
    volume = size * count / 1e9
    extra = (statistics.median(edge) - statistics.median(gloo)) / count
    return Row(
        what=f"{size // KB} KB × {count}" if size < KB * KB else f"{size // KB // KB} MB × {count}",
        values=[raw / through for raw, through in zip(gloo, edge, strict=True)],
        limit=f"gloo itself: 1 ({volume / min(gloo):.2f} GB/s at best)",
        claim=CLAIM,
        beside={
            "gloo GB/s": volume / statistics.median(gloo),
            "edge GB/s": volume / statistics.median(edge),
            "extra µs a frame": extra * 1e6,
            "best / best": min(gloo) / min(edge),
        },
    )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument(
        "--sizes", type=int, nargs="+", default=[64, 1024, 4096, 32768], metavar="KB", help="message sizes"
    )
    flags.add_argument("--volume", type=int, default=64, metavar="MB", help="sent in one repeat; at most 256 messages")
    flags.add_argument("--repeats", type=int, default=15, help="of each side and size")
    given = flags.parse_args()
    rows = []
    with opened(max(given.sizes) * KB) as pair:
        for size in (kilobytes * KB for kilobytes in given.sizes):
            count = min(256, max(4, given.volume * KB * KB // size))
            sides = [
                lambda n=count, s=size: pair.transfer("gloo", s, n),
                lambda n=count, s=size: pair.transfer("edge", s, n),
            ]
            interleaved(sides, 1)  # first touches of buffers and sockets
            rows.append(row(size, count, *interleaved(sides, given.repeats)))
    return conclude(NAME, given, rows, ["measured: the edge's throughput as a part of gloo's in the same repeat"])


if __name__ == "__main__":
    start(main)
