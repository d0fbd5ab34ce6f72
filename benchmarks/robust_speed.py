"""What robust rules cost beside the mean: sixteen replicas, ten million values each, of whom three may lie.

Both sides of a ratio are measured in the same run, in turns: the processor time of this process with one thread, and
its peak of memory above the values that are given. The mean is the one that replicas go by. Median and trimmed mean
take at most 2 times as long (with numba; torch, which does the same without it, takes longer), rules that go by inner
products at most 1.3 times; none makes a copy of all vectors. A rule of the second kind has to read all vectors twice;
what that takes by itself is shown beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarks.checkpoints import peak
from benchmarks.common import Claim, Row, conclude, interleaved, parser, start

NAME = "robust_speed"
PIECES = 10
RULES: Mapping[str, tuple[dict[str, Any], float | None]] = {
    "median": ({"rule": "median"}, 2.0),
    "trimmed mean": ({"rule": "trimmed_mean"}, 2.0),
    "Krum": ({"rule": "krum"}, 1.3),
    "multi-Krum": ({"rule": "multikrum"}, 1.3),
    "geometric median": ({"rule": "geometric_median", "rounds": 8}, 1.3),
    "Flag": ({"rule": "flag"}, 1.3),
    "bucketing, geometric median": ({"rule": "geometric_median", "rounds": 8, "mix": "bucketing"}, 1.3),
    "NNM, median": ({"rule": "median", "mix": "nnm"}, None),
}
"""exchange.robust, and how often as long as the mean it may take"""


def sides(given: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """By name, what each makes of the same values."""
    import torch

    from planaria.config.options import Options
    from planaria.config.schema import ExchangeConfig
    from planaria.exchange import exchange
    from planaria.exchange.aggregate import Averaging
    from planaria.exchange.base import Outer
    from planaria.exchange.robust.combining import weighted

    draw, size = torch.Generator().manual_seed(1), given.values // PIECES
    said = {
        member: {f"w{piece}": torch.randn(size, generator=draw) for piece in range(PIECES)}
        for member in range(given.replicas)
    }

    def side(robust: dict[str, Any] | None) -> Callable[[], object]:
        named = Options({**robust, "liars": given.liars}) if robust else ""
        made = exchange(ExchangeConfig(replicas=given.replicas, robust=named))
        assert isinstance(made, Averaging)
        return lambda: made.joined(Outer(), said)

    def read() -> None:
        from planaria.exchange.robust.products import chunks

        for _, rows in chunks([list(weights.values()) for weights in said.values()]):
            weighted(rows, [1.0] * len(rows))

    return {"mean": side(None), "read once": read, **{name: side(robust) for name, (robust, _) in RULES.items()}}


def seconds(side: Callable[[], object]) -> float:
    """Processor time, all threads of this process together."""
    begin = time.process_time()
    side()
    return time.process_time() - begin


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--values", type=int, default=10_000_000, help="of one replica")
    flags.add_argument("--replicas", type=int, default=16)
    flags.add_argument("--liars", type=int, default=3)
    flags.add_argument("--repeats", type=int, default=7)
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    all_sides = sides(given)
    used: dict[str, float] = {}
    for name, side in all_sides.items():
        found: list[float] = []
        side()  # what is compiled is compiled, or read, now
        with peak(found):
            side()
        used[name] = found[0] / (4 * given.values)
    took = interleaved([lambda side=side: seconds(side) for side in all_sides.values()], given.repeats)  # type: ignore[misc]
    by_name = dict(zip(all_sides, took, strict=True))
    rows = []
    for name in [*RULES, "read once"]:
        ratios = [own / mean for own, mean in zip(by_name[name], by_name["mean"], strict=True)]
        most = RULES[name][1] if name in RULES else None
        beside = {"seconds": round(median(by_name[name]), 3), "peak, values": round(used[name], 2)}
        twice = 2 * median(by_name["read once"]) / median(by_name["mean"])
        limit = f"reading twice: {twice:.2f}" if most == 1.3 else "1"
        rows.append(Row(f"{name}: time over the mean's", ratios, limit, Claim(high=most) if most else None, beside))
    notes = [f"mean: {median(by_name['mean']):.3f} s, peak {used['mean']:.2f} of one replica's values"]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
