"""What is skipping, and what is planning? The published instance with all links alike, where planning has little to do.

Three of five stages visited: nodes have 0.6 of the work, ways 0.67 of the length, so skipping alone should leave about
that much of a step. Both arms are planned alike. The claim, where memory is ample: 0.58 to 0.72. With the three slots
of the published nodes no claim is made: a full route holds more slots for longer, and memory limits the full pipeline
first.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.planner import PUBLISHED_DATA, published, with_data
from planaria.planner.search import Budget, search

NAME = "uniform"
LINKS_S = {"links of the published mean": None, "links of 0.35 s": 0.35, "free links": 0.0}
FULL = 5


def rows_of(given: argparse.Namespace) -> list[Row]:
    base = with_data(published(), PUBLISHED_DATA)
    mean_s = float(base.link.mean()) / 1e9
    rows = []
    for slots, claim in ((base.count, Claim(low=0.58, high=0.72)), (3, None)):
        for what, link_s in LINKS_S.items():
            ticks = round((mean_s if link_s is None else link_s) * 1e9)
            alike = replace(base, link=np.full_like(base.link, ticks), slots=np.full(base.nodes, slots))
            full = replace(alike, visits=FULL)
            steps = [[search(p, seed, Budget(moves=given.moves)).step_s for seed in given.seeds] for p in (alike, full)]
            beside = {"skipping": f"{min(steps[0]):.2f} s", "full": f"{min(steps[1]):.2f} s"}
            ratios = [one / other for one, other in zip(*steps, strict=True)]
            rows.append(Row(f"{what}, {slots} slots a node", ratios, "0.60 to 0.67", claim, beside))
    return rows


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--moves", type=int, default=150_000, help="of each search")
    given = flags.parse_args()
    return conclude(NAME, given, rows_of(given), ["measured: step with a third skipped ÷ step with nothing skipped"])


if __name__ == "__main__":
    start(main)
