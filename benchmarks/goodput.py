"""How much training is left when workers keep failing: steps done in the same wall time, with faults and without.

Three arms, one after the other: no faults; a SIGKILL every so often; SIGKILL and SIGSTOP in turn (the frozen worker is
thawed later and must be ignored). Victims are random middle stages at random moments, one at a time, struck from
outside the run as ``planaria chaos`` does. Time counts from the first step. The claims: at least 95 % and 90 % of the
fault-free arm's steps, and every sample used exactly once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.fleet_run import (
    StopAfter,
    add_model_flags,
    ending,
    first_step_t,
    real_stages,
    run_fleet,
    step_seconds,
    thaw_later,
)
from planaria.common.errors import UserError
from planaria.control import decisions as d

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord
    from planaria.control.protocols import Observer

NAME = "goodput"
ARMS: dict[str, tuple[str, ...]] = {"fault-free": (), "kills": ("kill",), "kills and freezes": ("kill", "stop")}
CLAIMS = {"kills": Claim(low=0.95), "kills and freezes": Claim(low=0.90)}
THAW_S = 3.0
ENDLESS = 1_000_000


class Striker(threading.Thread):
    """Strikes a random middle stage once in every interval, at a random time of the interval's middle half."""

    def __init__(self, folder: Path, actions: Sequence[str], stages: int, seconds: float, every: float) -> None:
        super().__init__(name="striker", daemon=True)
        self._folder, self._actions, self._stages = folder, actions, stages
        self._seconds, self._every = seconds, every
        self._random = random.Random(f"{NAME} {'/'.join(actions)}")

    def run(self) -> None:
        """Strike until the time is up; called when the first step begins."""
        began = time.monotonic()
        for number in range(int(self._seconds / self._every) if self._actions else 0):
            due = began + (number + self._random.uniform(0.25, 0.75)) * self._every
            time.sleep(max(0.0, due - time.monotonic()))
            action, stage = self._actions[number % len(self._actions)], self._random.randrange(2, self._stages)
            while not self._strike(action, stage) and time.monotonic() < began + self._seconds:
                time.sleep(0.2)

    def _strike(self, action: str, stage: int) -> bool:
        """One blow; False when nobody holds the stage just now."""
        from planaria.cli.commands.chaos import strike
        from planaria.control.statefile import read_state

        held = next((w for w in read_state(self._folder).workers if w.stage == stage), None)
        try:
            strike(self._folder, action, f"stage={stage}")
        except UserError:
            return False
        if action == "stop" and held is not None:
            thaw_later(held, THAW_S)
        return True


def run_arm(arm: str, given: argparse.Namespace) -> RunRecord:
    """One arm's run, stopped when its time is up."""
    seconds = given.minutes * 60

    def around(observer: Observer, folder: Path) -> Observer:
        return StopAfter(observer, seconds, Striker(folder, ARMS[arm], given.stages, seconds, given.every).start)

    config = real_stages(given, f"{NAME}-{arm.replace(' ', '-')}", ENDLESS, spares=1, save_every=100)
    return run_fleet(config, around=around)


def steps_in(record: RunRecord, seconds: float) -> int:
    """Steps committed within ``seconds`` of the first step's order."""
    end = first_step_t(record) + seconds
    return max((f.step + 1 for t, f in record.history if isinstance(f, d.Commit) and t <= end), default=0)


def rows_of(arm: str, given: argparse.Namespace, records: Sequence[RunRecord], free: Sequence[int]) -> list[Row]:
    """The verdicts on one arm: its steps beside the fault-free arm's ``free``, and its ledger."""
    from planaria.report.run.ledger import prove_exactly_once
    from planaria.report.run.recovery_timeline import faults_summary, recoveries

    seconds, record = given.minutes * 60, records[-1]
    steps = [steps_in(r, seconds) for r in records]
    timings, summary = recoveries(record), faults_summary(record)
    stood_still = [t.total for t in timings if t.total is not None]
    problems = [problem for r in records for problem in prove_exactly_once(r)]
    samples = sum(1 for _, f in record.history if isinstance(f, d.Commit)) * record.config.pipeline.samples
    return [
        Row(
            what=f"{arm}: steps / fault-free steps",
            values=[mine / other for mine, other in zip(steps, free, strict=True)],
            limit=f"1 - time lost = {1 - least_lost(arm, given, record) / seconds:.3f}",
            claim=CLAIMS.get(arm),
            beside={
                "steps": steps[-1],
                "faults": summary.injected,
                "outcomes": ", ".join(f"{n} {outcome}" for outcome, n in summary.outcomes.items()),
                "zombies": summary.zombies,
                "stood still s": sum(stood_still),
            },
        ),
        Row(
            f"{arm}: what is wrong with its ledger",
            [len(problems)],
            f"0: {samples} samples, run {ending(record)}",
            Claim(high=0),
        ),
    ]


def least_lost(arm: str, given: argparse.Namespace, record: RunRecord) -> float:
    """Seconds that an arm's faults must cost at least: each a recovery's physical limit, and half a step done again.

    A freeze costs the heartbeats that have to be missed instead of the notice of a death.
    """
    from benchmarks.recovery_bound import parts
    from planaria.report.run.recovery_timeline import recoveries

    timings = recoveries(record)
    if not timings:
        return 0.0
    bound = parts(record, max(timing.transfer_bytes for timing in timings) // 2)
    frozen = sum("heartbeat" in timing.causes for timing in timings)
    silence = record.config.fleet.heartbeat_s * record.config.fleet.missed
    each = sum(bound.values()) + statistics.median(step_seconds(record, 1)) / 2
    return len(timings) * each + frozen * (silence - bound["detect"])


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--minutes", type=float, default=10.0, help="of each arm, from its first step")
    flags.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds from fault to fault")
    flags.add_argument("--repeats", type=int, default=1, help="of the three arms")
    add_model_flags(flags)
    given = flags.parse_args()
    records: dict[str, list[RunRecord]] = {arm: [] for arm in ARMS}
    for _ in range(given.repeats):
        for arm in ARMS:
            records[arm].append(run_arm(arm, given))
            print(f"{arm}: {steps_in(records[arm][-1], given.minutes * 60)} steps", flush=True)
    free = [steps_in(record, given.minutes * 60) for record in records["fault-free"]]
    rows = [row for arm in ARMS for row in rows_of(arm, given, records[arm], free)]
    return conclude(NAME, given, rows, [f"{given.minutes:g} minutes an arm, a fault every {given.every:g} s"])


if __name__ == "__main__":
    start(main)
