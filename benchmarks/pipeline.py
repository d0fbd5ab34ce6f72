"""How close a real pipeline of processes comes to the least time its plan can take.

Stages sleep their cost, so that the schedule is measured and not the number of cores. The claim: from the order to run
a step to the order to commit it, control plane and transport included, a step takes at most 1.10 of its plan's lower
bound.
"""

from __future__ import annotations

import statistics
from typing import Literal

from benchmarks.common import Claim, Row, conclude, milliseconds, parser, start
from benchmarks.emulated import Case, even, measure

NAME = "pipeline"
CLAIM = Claim(high=1.10)


def row(case: Case, steps: int) -> Row:
    """The verdict on one pipeline."""
    outcome = measure(case, f"{NAME}-{case.stages}x{case.microbatches}-{case.order}", steps)
    each = case.forward_s[0] + case.backward_s[0]
    ideal = (case.microbatches + case.stages - 1) * each
    bubble = (case.stages - 1) / (case.microbatches + case.stages - 1)
    return Row(
        what=str(case),
        values=[seconds / outcome.bound for seconds in outcome.measured],
        limit=f"bound 1 ({outcome.binds}); (M + S - 1)(f + b) = {ideal * 1e3:g} ms, bubble {bubble:.0%}",
        claim=CLAIM,
        beside={
            "step": milliseconds(outcome.measured),
            "bound": milliseconds([outcome.bound]),
            "idle": 1 - case.microbatches * each / statistics.median(outcome.measured),
        },
    )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--steps", type=int, default=20, help="of each pipeline, warm-up apart")
    flags.add_argument(
        "--forward", type=float, default=0.010, metavar="S", help="seconds of a microbatch's forward pass"
    )
    flags.add_argument("--backward", type=float, default=0.020, metavar="S", help="seconds of its backward pass")
    flags.add_argument("--pipelines", nargs="+", default=["4x8", "8x16"], metavar="SxM", help="stages x microbatches")
    given = flags.parse_args()
    orders: tuple[Literal["1f1b", "gpipe"], ...] = ("1f1b", "gpipe")
    rows = []
    for shape in given.pipelines:
        stages, microbatches = (int(number) for number in shape.split("x"))
        rows += [row(even(stages, microbatches, o, given.forward, given.backward), given.steps) for o in orders]
    return conclude(NAME, given, rows, ["measured: step / lower bound"])


if __name__ == "__main__":
    start(main)
