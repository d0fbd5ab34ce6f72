"""A worker that is three times slower for twenty seconds, and as before for the next twenty: is anything done in vain?

Four stages on real processes whose passes sleep, and one spare; for about five minutes stage 2 is slow by turns,
whoever holds it: the fault follows the stage, so that handing it over gains nothing for long. One arm tells, the other
acts, beside each other. The claims: no worker is relieved more than twice, and who acts makes at least 0.98 of the
steps a second of who only tells.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from benchmarks.common import Claim, Row, conclude, parser, start

NAME = "flapping"
PERIOD = 214
"""steps from one onset to the next: 20 s of slow ones and as many seconds of usual ones, as long as nothing is done"""


def run(diagnose: str, repeat: int, given: argparse.Namespace) -> tuple[float, int]:
    """Seconds from the first order to the last commit; how often one worker was relieved at most."""
    from benchmarks.diagnosis import recipe
    from benchmarks.fleet_run import first_step_t, require_finished, run_fleet
    from planaria.control import decisions as d
    from planaria.faults.trace import Fault

    onsets = range(20, given.steps, PERIOD)
    faults = [Fault(step=step, stage=2, signal="slow", strength=3.0, resume_after_s=20.0) for step in onsets]
    record = run_fleet(recipe(f"{NAME}-{diagnose}-{repeat}", given.steps, diagnose, spares=1), tuple(faults))
    require_finished(record)
    relieved = Counter(fact.worker for _, fact in record.history if isinstance(fact, d.Relieve))
    last = max(t for t, fact in record.history if isinstance(fact, d.Commit))
    return last - first_step_t(record), max(relieved.values(), default=0)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--steps", type=int, default=1500)
    flags.add_argument("--repeats", type=int, default=3)
    given = flags.parse_args()
    pairs = []
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for repeat in range(given.repeats):
            asked = [pool.submit(run, diagnose, repeat, given) for diagnose in ("tell", "act")]
            pairs.append(tuple(one.result() for one in asked))
    rows = [
        Row("steps a second: act over tell", [tell[0] / act[0] for tell, act in pairs], "1", Claim(low=0.98)),
        Row("deeds on one worker", [float(act[1]) for _, act in pairs], "", Claim(high=2), judged="worst"),
        Row("seconds of who tells", [tell[0] for tell, _ in pairs], ""),
    ]
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
