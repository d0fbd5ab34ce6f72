"""Whether the simulator tells the truth: its step against the fleet's, over pipelines of several kinds.

Stages sleep and links delay what the recipe's network section says; the simulator is asked about the same section. The
claim: each measured step is within 10 % of the simulated one.
"""

from __future__ import annotations

from benchmarks.common import Claim, Row, conclude, milliseconds, parser, start
from benchmarks.emulated import MESSAGE_BYTES, Case, even, measure

NAME = "simulator"
CLAIM = Claim(low=0.9, high=1.1)

UNEVEN_F, UNEVEN_B = (0.006, 0.012, 0.009, 0.015), (0.012, 0.024, 0.018, 0.030)
CASES = (
    even(4, 8, "1f1b", 0.010, 0.020),
    even(8, 16, "gpipe", 0.010, 0.020),
    Case(4, 8, "1f1b", UNEVEN_F, UNEVEN_B),
    Case(4, 12, "gpipe", UNEVEN_F, UNEVEN_B),
    Case(4, 8, "1f1b", (0.010,) * 4, (0.020,) * 4, latency_s=0.015),
    Case(4, 8, "gpipe", (0.010,) * 4, (0.020,) * 4, bandwidth=MESSAGE_BYTES / 0.008),
    Case(4, 8, "1f1b", (0.005,) * 4, (0.010,) * 4, bandwidth=MESSAGE_BYTES / 0.020),
    Case(6, 12, "1f1b", (0.008,) * 6, (0.016,) * 6, latency_s=0.010, bandwidth=MESSAGE_BYTES / 0.005),
)
"""Even and uneven stages, slow links, and (last but one) a link that is busier than any stage."""


def row(case: Case, steps: int) -> Row:
    """The verdict on one pipeline."""
    outcome = measure(case, f"{NAME}-{case.stages}x{case.microbatches}-{case.order}", steps)
    return Row(
        what=str(case),
        values=[seconds / outcome.simulated for seconds in outcome.measured],
        limit=f"lower bound {outcome.bound * 1e3:.0f} ms: {outcome.bound / outcome.simulated:.3f}",
        claim=CLAIM,
        beside={
            "stages": "even" if len(set(case.forward_s)) == 1 else "uneven",
            "link": _link(case),
            "fleet": milliseconds(outcome.measured),
            "simulated": milliseconds([outcome.simulated]),
        },
    )


def _link(case: Case) -> str:
    """What a message costs on its way."""
    delays = [f"{case.latency_s * 1e3:g} ms late"] if case.latency_s else []
    if case.bandwidth:
        delays.append(f"busy {MESSAGE_BYTES / case.bandwidth * 1e3:g} ms")
    return ", ".join(delays) or "free"


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--steps", type=int, default=12, help="of each pipeline, warm-up apart")
    flags.add_argument("--cases", type=int, default=len(CASES), help="only the first so many pipelines")
    given = flags.parse_args()
    rows = [row(case, given.steps) for case in CASES[: given.cases]]
    return conclude(NAME, given, rows, ["measured: fleet's step / simulated step"])


if __name__ == "__main__":
    start(main)
