"""How long training stands still when a worker dies: from the signal to the next microbatch that is through.

SIGKILLs strike middle stages in their forward pass, their backward pass, during a commit, and strike a donor while it
gives its state to a stage that is being rebuilt (what is lost then is adjacent, which CheckFree cannot repair, so the
run rolls back to its last checkpoint). The claims, with a spare at hand: median at most 0.2 s and at most 5 times the
physical limit that the same run measures; worst at most 3 s; and every one of them goes on. Without a spare: at most
6 s. Frozen by SIGSTOP and thawed later: at most 2.5 s, and what the zombie says is ignored.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import count, cycle
from typing import TYPE_CHECKING, Literal

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.fleet_run import add_model_flags, ending, real_stages, run_fleet

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.control.logs import RunRecord
    from planaria.faults.trace import Fault
    from planaria.report.run.recovery_timeline import RecoveryTiming

NAME = "recovery_time"
FIRST = 4
"""step of the first fault: a checkpoint has been made by then"""
THAW_S = 1.5
NEW_EDGES = 4
"""of the worker that takes a lost middle stage's place: to two neighbours, and from two donors"""
PARTS = ("notice", "decide", "relink", "transfer", "rebuild", "redo")

Moment = Literal["forward", "backward", "commit", "transfer"]
MOMENTS: tuple[Moment, ...] = ("forward", "backward", "commit", "transfer")


def kills(incidents: int, gap: int, stages: int, moments: Sequence[Moment]) -> tuple[Fault, ...]:
    """One incident every ``gap`` steps, its middle stage and moment taken in turn.

    An incident of moment 'transfer' is two kills: of a stage, and of one of its donors while that donates.
    """
    from planaria.faults.trace import Fault

    faults: list[Fault] = []
    middle = cycle(range(2, stages))
    for number, step in zip(range(incidents), count(FIRST, gap), strict=False):
        stage, moment = next(middle), moments[number % len(moments)]
        offset = (number * 0.37) % 1.0
        if moment == "transfer":
            donor = stage + (1 if number % 8 < 4 else -1)
            faults.append(Fault(step=step, stage=stage, moment="forward", offset=offset))
            faults.append(Fault(step=step, stage=donor, moment="transfer", offset=offset))
        else:
            faults.append(Fault(step=step, stage=stage, moment=moment, offset=offset))
    return tuple(faults)


def freezes(incidents: int, gap: int, stages: int) -> tuple[Fault, ...]:
    """Like :func:`kills`, with SIGSTOP at any time of the step, and SIGCONT later."""
    from planaria.faults.trace import Fault

    middle = cycle(range(2, stages))
    return tuple(
        Fault(step=step, stage=next(middle), signal="stop", offset=(n * 0.37) % 1.0, resume_after_s=THAW_S)
        for n, step in zip(range(incidents), count(FIRST, gap), strict=False)
    )


def recipe(given: argparse.Namespace, arm: str, incidents: int, spares: int) -> RunConfig:
    """A run that is long enough for all its incidents, and for the last thaw."""
    return real_stages(given, f"{NAME}-{arm}", FIRST + (incidents + 1) * given.gap, spares, save_every=FIRST - 1)


def totals(timings: Sequence[RecoveryTiming]) -> list[float]:
    return [timing.total for timing in timings if timing.total is not None]


def beside(timings: Sequence[RecoveryTiming]) -> dict[str, int | str]:
    """Median milliseconds of every part of the recoveries."""
    cells: dict[str, int | str] = {}
    for part in PARTS:
        seconds = [s for timing in timings if (s := getattr(timing, part)) is not None]
        cells[part] = round(statistics.median(seconds) * 1e3) if seconds else ""
    return cells


def went_on(what: str, incidents: int, timings: Sequence[RecoveryTiming], record: RunRecord) -> Row:
    """How many incidents training survived, as a fraction."""
    good = [t for t in timings if t.outcome in ("recovered", "rolled back", "relinked") and t.total is not None]
    asked = max(incidents, len(timings))
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in Counter(t.outcome for t in timings).items())
    return Row(
        f"{what}: {len(good)}/{asked} go on", [len(good) / asked], f"{outcomes}; run {ending(record)}", Claim(low=1)
    )


def hot(given: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    """Kills with spares at hand (two: an incident may take two lives); also the parts of the physical bound."""
    from benchmarks.recovery_bound import parts
    from planaria.report.run.recovery_timeline import recoveries

    config = recipe(given, "hot", given.kills, spares=2)
    record = run_fleet(config, kills(given.kills, given.gap, given.stages, MOMENTS))
    timings = recoveries(record)
    state_bytes = max((t.transfer_bytes for t in timings if len(t.stages) == 1), default=8) // 2
    bound = parts(record, state_bytes)
    least = sum(bound.values())
    limit = f"≥ {least:.3f} s"
    rows = [
        Row("hot spare, s", totals(timings), limit, Claim(high=0.2), beside(timings)),
        Row("hot spare / limit", [total / least for total in totals(timings)], "1", Claim(high=5.0)),
        Row("hot spare, worst, s", totals(timings), limit, Claim(high=3.0), judged="worst"),
        *by_moment(record, timings, limit),
        went_on("hot spare", given.kills, timings, record),
    ]
    return rows, bound


def by_moment(record: RunRecord, timings: Sequence[RecoveryTiming], limit: str) -> list[Row]:
    """The recoveries sorted by what the first victim was doing."""
    moments = {t: fact.moment for t, fact in record.history if fact.kind == "fault_injected"}
    groups: dict[str, list[RecoveryTiming]] = {}
    for timing in timings:
        moment = moments.get(timing.fault_t or 0.0, "another moment")
        what = f"  killed in {moment}" if len(timing.stages) == 1 else "  and a donor in the transfer"
        groups.setdefault(what, []).append(timing)
    return [Row(what, totals(group), limit, None, beside(group)) for what, group in groups.items()]


def cold(given: argparse.Namespace, bound: dict[str, float]) -> list[Row]:
    """Kills without a spare: a worker must be born first."""
    from benchmarks.recovery_bound import birth_s
    from planaria.report.run.recovery_timeline import recoveries

    faults = kills(given.cold, given.gap, given.stages, MOMENTS[:3])
    record = run_fleet(recipe(given, "cold", given.cold, spares=0), faults)
    timings, birth = recoveries(record), birth_s(record)
    limit = f"≥ {sum(bound.values()) + birth:.3f} s (a birth {birth * 1e3:.0f} ms)"
    return [
        Row("no spare, worst, s", totals(timings), limit, Claim(high=6.0), beside(timings), judged="worst"),
        went_on("no spare", given.cold, timings, record),
    ]


def frozen(given: argparse.Namespace, bound: dict[str, float]) -> list[Row]:
    """Workers that freeze, are given up, and come back."""
    from planaria.report.run.recovery_timeline import faults_summary, recoveries

    config = recipe(given, "frozen", given.freezes, spares=1)
    record = run_fleet(config, freezes(given.freezes, given.gap, given.stages))
    timings, zombies = recoveries(record), faults_summary(record).zombies
    silence = config.fleet.heartbeat_s * config.fleet.missed
    limit = f"≥ {sum(bound.values()) - bound['detect'] + silence:.3f} s (silent for {silence:g} s)"
    return [
        Row("frozen, worst, s", totals(timings), limit, Claim(high=2.5), beside(timings), judged="worst"),
        went_on("frozen", given.freezes, timings, record),
        Row("zombies ignored / thawed", [zombies / given.freezes], f"thawed {THAW_S:g} s later", Claim(1.0, 1.0)),
    ]


def proofs(recovered: Sequence[float]) -> Row:
    """Upper bound of what TLS takes of a recovery: as if the heir's new edges were opened one after the other."""
    from benchmarks.recovery_bound import proof_s

    proof = proof_s()
    shares = [NEW_EDGES * proof / seconds for seconds in recovered]
    return Row(f"proofs of the key, as a part: {NEW_EDGES} edges", shares, f"one proof: {proof * 1e3:.1f} ms")


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--kills", type=int, default=24, help="incidents with spares at hand, a quarter of each moment")
    flags.add_argument("--cold", type=int, default=6, help="kills without a spare")
    flags.add_argument("--freezes", type=int, default=6)
    flags.add_argument("--gap", type=int, default=12, help="steps from one incident to the next")
    add_model_flags(flags)
    given = flags.parse_args()
    rows, bound = hot(given)
    rows += cold(given, bound) + frozen(given, bound)
    rows.append(proofs(rows[0].values))
    least = " + ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in bound.items())
    notes = [
        "seconds from the signal to the end of the next microbatch; columns of parts: median milliseconds",
        f"physical limit with a spare: {least} = {sum(bound.values()) * 1e3:.1f} ms, each part measured by itself",
    ]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
