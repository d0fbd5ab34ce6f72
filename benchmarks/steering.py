"""What does it gain to hand a slow worker's stage to a spare? One of four stages is three times slower from step 50 on.

Passes sleep what the recipe says, on real processes. Arms: nothing slow; slow and not diagnosed; slow and told; slow
and acted upon. All have the same faults, spares and steps, and take turns. The claims: who acts makes at least 1.8
times as many steps a second as who does not look, from the first step to the last, and at least 0.90 of those where
nothing is slow; telling and measuring cost at most 1 %.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start

NAME = "steering"
ARMS = {"nothing slow": ("off", False), "off": ("off", True), "tell": ("tell", True), "act": ("act", True)}
CALM = {"measured": "tell", "not measured": "off"}


def seconds(given: argparse.Namespace, name: str, diagnose: str, slow: bool) -> float:
    """From the first order to the last commit."""
    from benchmarks.diagnosis import recipe
    from benchmarks.fleet_run import first_step_t, require_finished, run_fleet
    from planaria.control import decisions as d
    from planaria.faults.trace import Fault

    config = recipe(f"{NAME}-{name.replace(' ', '-')}", given.steps, diagnose, 1, given.microbatches)
    fault = Fault(step=given.onset, stage=2, signal="slow", strength=given.times)
    record = run_fleet(config, (fault,) if slow else ())
    require_finished(record)
    return max(t for t, fact in record.history if isinstance(fact, d.Commit)) - first_step_t(record)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--onset", type=int, default=50)
    flags.add_argument("--times", type=float, default=3.0)
    flags.add_argument("--microbatches", type=int, default=8, help="with few of them a slow stage does not fill a step")
    flags.add_argument("--repeats", type=int, default=3)
    given = flags.parse_args()
    sides = [lambda n=name, a=arm: seconds(given, n, *a) for name, arm in ARMS.items()]  # type: ignore[misc]
    sides += [lambda n=name, a=arm: seconds(given, n, a, False) for name, arm in CALM.items()]  # type: ignore[misc]
    took = dict(zip([*ARMS, *CALM], interleaved(sides, given.repeats), strict=True))

    def over(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(took[one], took[other], strict=True)]

    most = f"{statistics.median(over('off', 'nothing slow')):.2f}: nothing slow"
    rows = [
        Row("steps a second: act over off", over("off", "act"), most, Claim(low=1.8)),
        Row("steps a second: act over nothing slow", over("nothing slow", "act"), "1", Claim(low=0.9)),
        Row("seconds: tell over off", over("tell", "off"), "1"),
        Row("seconds of a run without faults: measured", over("measured", "not measured"), "1", Claim(high=1.01)),
    ]
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
