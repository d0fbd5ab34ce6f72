"""Recovery: seconds from a kill to the next microbatch, and steps made under regular faults."""

from __future__ import annotations

import random
import statistics
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Literal

from benchmarks.edge import opened
from benchmarks.fleet_run import (
    MODEL_FLAGS,
    StopAfter,
    ending,
    first_step_t,
    real_stages,
    run_fleet,
    step_seconds,
    thaw_later,
)
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, ratios, start
from planaria.cli.fault_injection import send_signal
from planaria.common.errors import UserError
from planaria.config.schema import FleetConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.control.log.state_file import read_state
from planaria.control.protocols import Observer
from planaria.faults.trace import Fault
from planaria.report.run.recoveries import faults_summary, recoveries
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.fleet.base import Reported, WorkerConnection, WorkerEnded
from planaria.runtime.fleet.local import LocalFleet

_PASSES = 5


def parts(record: RunRecord, state_bytes: int) -> dict[str, float]:
    """Return the seconds of each part of the physical limit, for stages of ``state_bytes``."""
    with opened(state_bytes) as both:
        relink = min(both("link", f"again {n}")[0] for n in range(_PASSES))
        both("trip", "gloo", state_bytes, 1)  # first touches
        transfer = min(both("trip", "gloo", state_bytes, 2)[0] for _ in range(_PASSES))
    return {"detect": detect_s(), "relink": relink, "2S/B": transfer, "redo": redo_s(record)}


def redo_s(record: RunRecord) -> float:
    """Return the seconds of one microbatch through all stages and back, each pass at its fastest."""
    fastest: dict[tuple[int, str, int], float] = {}
    for _, work in record.worked:
        for span in work.spans:
            if span.action in ("forward", "backward"):
                key = work.stage, span.action, span.hop
                fastest[key] = min(span.end - span.start, fastest.get(key, float("inf")))
    return sum(fastest.values())


def worker_start_s(record: RunRecord) -> float:
    """Return the fastest start of a worker during the run, from its Spawn decision to its WorkerJoined event."""
    spawned_at = {}
    took: list[float] = []
    begun = False
    for t, fact in record.history:
        begun = begun or isinstance(fact, d.RunStep)
        if isinstance(fact, d.Spawn):
            spawned_at[fact.worker] = t
        elif isinstance(fact, e.WorkerJoined) and begun:
            took.append(t - spawned_at[fact.worker])
    return min(took)


# The least time of a recovery: T >= detect + decide + relink + 2 S / B + redo of one microbatch.
# detect: until an idle, killed worker is reported; decide: arithmetic, taken as 0; relink: one new edge; 2 S / B: both
# donors' state through one gloo pair; redo: each pass of one microbatch at the fastest that the run did it.
def detect_s() -> float:
    """Return the minimum time from SIGKILL of an idle worker to its fleet's notice."""
    import signal

    from benchmarks.recovery_time import idle
    from planaria.runtime.worker import process

    fleet = LocalFleet(idle, [process.__name__], FleetConfig(heartbeat_s=10.0))
    took = []
    for number in range(_PASSES):
        fleet.spawn(f"w{number}", 1)
        while not any(isinstance(notice, Reported) for notice in fleet.poll(0.1)):
            pass
        began = time.monotonic()
        fleet.signal(f"w{number}", 1, signal.SIGKILL)
        while not any(isinstance(notice, WorkerEnded) for notice in fleet.poll(0.1)):
            pass
        took.append(time.monotonic() - began)
    fleet.close()
    return min(took)


def idle(connection: WorkerConnection, worker: str, incarnation: int) -> None:
    """A worker that only announces itself."""
    connection.send_bytes(b"here")
    time.sleep(60.0)


FIRST = 4  # step of the first fault: a checkpoint has been made by then
THAW_S = 1.5
PARTS = ("notice", "decide", "relink", "transfer", "rebuild", "redo")

Moment = Literal["forward", "backward", "commit", "transfer"]
MOMENTS: tuple[Moment, ...] = ("forward", "backward", "commit", "transfer")


def kills(incidents: int, gap: int, stages: int, moments: Sequence[Moment]) -> tuple[Fault, ...]:
    """Return one incident every ``gap`` steps, with middle stages and moments in turn.

    Moment 'transfer' means two kills: of a stage, and of one of its donors during the transfer.
    """
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
    """Like :func:`kills`, with SIGSTOP at any time of the step and SIGCONT later."""
    middle = cycle(range(2, stages))
    return tuple(
        Fault(step=step, stage=next(middle), signal="stop", offset=(n * 0.37) % 1.0, resume_after_s=THAW_S)
        for n, step in zip(range(incidents), count(FIRST, gap), strict=False)
    )


def recipe(args: Namespace, arm: str, incidents: int, spares: int) -> RunConfig:
    """A run long enough for all incidents and the last thaw."""
    steps = FIRST + (incidents + 1) * args.gap
    return real_stages(args, f"recovery_time-{arm}", steps, spares, save_every=FIRST - 1)


def totals(timings: Sequence[RecoveryTiming]) -> list[float]:
    return [timing.total for timing in timings if timing.total is not None]


def columns(timings: Sequence[RecoveryTiming]) -> dict[str, int | str]:
    """Return the median milliseconds of every part of the recoveries."""
    cells = {}
    for part in PARTS:
        seconds = [s for timing in timings if (s := getattr(timing, part)) is not None]
        cells[part] = round(statistics.median(seconds) * 1e3) if seconds else ""
    return cells


def survival_row(what: str, incidents: int, timings: Sequence[RecoveryTiming], record: RunRecord) -> Row:
    """The share of incidents that training survived."""
    good = [t for t in timings if t.outcome in ("recovered", "rolled back", "relinked") and t.total is not None]
    expected = max(incidents, len(timings))
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in Counter(t.outcome for t in timings).items())
    limit = f"{outcomes}; run {ending(record)}"
    return Row(f"{what}: {len(good)}/{expected} continue", [len(good) / expected], limit, Claim(low=1))


def hot(args: Namespace) -> tuple[list[Row], dict[str, float]]:
    """Measure kills with two spares; also return the parts of the physical limit."""
    config = recipe(args, "hot", args.kills, spares=2)
    record = run_fleet(config, kills(args.kills, args.gap, args.stages, MOMENTS))
    timings = recoveries(record)
    state_bytes = max((t.transfer_bytes for t in timings if len(t.stages) == 1), default=8) // 2
    bound = parts(record, state_bytes)
    least = sum(bound.values())
    limit = f"≥ {least:.3f} s"
    rows = [
        Row("hot spare, s", totals(timings), limit, Claim(high=0.2), columns(timings)),
        Row("hot spare / limit", [total / least for total in totals(timings)], "1", Claim(high=5.0)),
        Row("hot spare, worst, s", totals(timings), limit, Claim(high=3.0), judged="worst"),
        survival_row("hot spare", args.kills, timings, record),
    ]
    return rows, bound


def cold(args: Namespace, bound: dict[str, float]) -> list[Row]:
    """Measure kills without a spare: a worker must start first."""
    faults = kills(args.cold, args.gap, args.stages, MOMENTS[:3])
    record = run_fleet(recipe(args, "cold", args.cold, spares=0), faults)
    timings, start_s = recoveries(record), worker_start_s(record)
    limit = f"≥ {sum(bound.values()) + start_s:.3f} s (a worker's start {start_s * 1e3:.0f} ms)"
    return [
        Row("no spare, worst, s", totals(timings), limit, Claim(high=6.0), columns(timings), judged="worst"),
        survival_row("no spare", args.cold, timings, record),
    ]


def frozen(args: Namespace, bound: dict[str, float]) -> list[Row]:
    """Measure workers that freeze, are declared lost, and return."""
    config = recipe(args, "frozen", args.freezes, spares=1)
    record = run_fleet(config, freezes(args.freezes, args.gap, args.stages))
    timings, zombies = recoveries(record), faults_summary(record).zombies
    silence = config.fleet.heartbeat_s * config.fleet.missed_heartbeats
    limit = f"≥ {sum(bound.values()) - bound['detect'] + silence:.3f} s (silent for {silence:g} s)"
    return [
        Row("frozen, worst, s", totals(timings), limit, Claim(high=2.5), columns(timings), judged="worst"),
        survival_row("frozen", args.freezes, timings, record),
        Row("zombies ignored / thawed", [zombies / args.freezes], f"thawed {THAW_S:g} s later", Claim(1.0, 1.0)),
    ]


@benchmark(
    "recovery_time",
    kills=Flag(24, "incidents with spares at hand, a quarter of each moment"),
    cold=Flag(6, "kills without a spare"),
    freezes=6,
    gap=Flag(12, "steps from one incident to the next"),
    **MODEL_FLAGS,
)
def run_recovery_time(args: Namespace) -> Measurement:
    """Measure the time from a fault to the end of the next microbatch.

    SIGKILLs hit middle stages in forward, backward and commit, and a donor while it transfers its state to a rebuilt
    stage (the two lost stages are adjacent, which CheckFree cannot rebuild: the run rolls back). Claims with a spare:
    median at most 0.2 s and at most 5 times the physical limit measured in the same run; maximum 3 s; every run
    continues. Without a spare: at most 6 s. Frozen (SIGSTOP) and thawed later: at most 2.5 s; the zombie is ignored.
    """
    rows, bound = hot(args)
    rows += cold(args, bound) + frozen(args, bound)
    least = " + ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in bound.items())
    notes = [
        "seconds from the signal to the end of the next microbatch; columns of parts: median milliseconds",
        f"physical limit with a spare: {least} = {sum(bound.values()) * 1e3:.1f} ms, each part measured separately",
    ]
    return Result(rows, notes)


ARMS: dict[str, tuple[str, ...]] = {"fault-free": (), "kills": ("kill",), "kills and freezes": ("kill", "stop")}
CLAIMS = {"kills": Claim(low=0.95), "kills and freezes": Claim(low=0.90)}
GOODPUT_THAW_S = 3.0
ENDLESS = 1_000_000


class Striker(threading.Thread):
    """Hits a random middle stage once per interval, at a random time of its middle half."""

    def __init__(self, folder: Path, actions: Sequence[str], stages: int, seconds: float, every: float) -> None:
        super().__init__(name="striker", daemon=True)
        self._folder, self._actions, self._stages = folder, actions, stages
        self._seconds, self._every = seconds, every
        self._random = random.Random(f"goodput {'/'.join(actions)}")

    def run(self) -> None:
        began = time.monotonic()
        for number in range(int(self._seconds / self._every) if self._actions else 0):
            due = began + (number + self._random.uniform(0.25, 0.75)) * self._every
            time.sleep(max(0.0, due - time.monotonic()))
            action, stage = self._actions[number % len(self._actions)], self._random.randrange(2, self._stages)
            while not self._strike(action, stage) and time.monotonic() < began + self._seconds:
                time.sleep(0.2)

    def _strike(self, action: str, stage: int) -> bool:
        """Inject one fault; return False if no worker holds the stage."""
        held = next((w for w in read_state(self._folder).workers if w.stage == stage), None)
        try:
            send_signal(self._folder, action, f"stage={stage}")
        except UserError:
            return False
        if action == "stop" and held is not None:
            thaw_later(held, GOODPUT_THAW_S)
        return True


def run_arm(arm: str, args: Namespace) -> RunRecord:
    seconds = args.minutes * 60

    def around(observer: Observer, folder: Path) -> Observer:
        striker = Striker(folder, ARMS[arm], args.stages, seconds, args.every)
        return StopAfter(seconds, striker.start).attach(observer, folder)

    config = real_stages(args, f"goodput-{arm.replace(' ', '-')}", ENDLESS, spares=1, save_every=100)
    return run_fleet(config, around=around)


def steps_in(record: RunRecord, seconds: float) -> int:
    end = first_step_t(record) + seconds
    return max((f.step + 1 for t, f in record.history if isinstance(f, d.Commit) and t <= end), default=0)


def rows_of(arm: str, args: Namespace, records: Sequence[RunRecord], free: Sequence[int]) -> list[Row]:
    seconds, record = args.minutes * 60, records[-1]
    steps = [steps_in(r, seconds) for r in records]
    timings, summary = recoveries(record), faults_summary(record)
    stood_still = [t.total for t in timings if t.total is not None]
    problems = [problem for r in records for problem in prove_exactly_once(r)]
    samples = sum(1 for _, f in record.history if isinstance(f, d.Commit)) * record.config.pipeline.samples
    columns = {
        "steps": steps[-1],
        "faults": summary.injected,
        "outcomes": ", ".join(f"{n} {outcome}" for outcome, n in summary.outcomes.items()),
        "zombies": summary.zombies,
        "stood still s": sum(stood_still),
    }
    limit = f"1 - time lost = {1 - least_lost(arm, args, record) / seconds:.3f}"
    ledger = f"0: {samples} samples, run {ending(record)}"
    return [
        Row(f"{arm}: steps / fault-free steps", ratios(steps, free), limit, CLAIMS.get(arm), columns),
        Row(f"{arm}: errors in its ledger", [len(problems)], ledger, Claim(high=0)),
    ]


def least_lost(arm: str, args: Namespace, record: RunRecord) -> float:
    """Return the least seconds that an arm's faults cost: physical limits, and half a step repeated per fault.

    A freeze costs the missed heartbeats instead of the detection of a death.
    """
    timings = recoveries(record)
    if not timings:
        return 0.0
    bound = parts(record, max(timing.transfer_bytes for timing in timings) // 2)
    frozen = sum("heartbeat" in timing.causes for timing in timings)
    silence = record.config.fleet.heartbeat_s * record.config.fleet.missed_heartbeats
    each = sum(bound.values()) + statistics.median(step_seconds(record, 1)) / 2
    return len(timings) * each + frozen * (silence - bound["detect"])


@benchmark(
    "goodput",
    minutes=Flag(10.0, "of each arm, from its first step"),
    every=Flag(20.0, "seconds from fault to fault", metavar="S"),
    repeats=Flag(1, "of the three arms"),
    **MODEL_FLAGS,
)
def run_goodput(args: Namespace) -> Measurement:
    """Measure the steps made under regular faults over those without, in the same wall time.

    Three arms in sequence: no faults; regular SIGKILLs; SIGKILL and SIGSTOP in turn, with the frozen worker thawed
    later. Victims are random middle stages at random moments, hit as by ``planaria run chaos``. Time counts
    from the first step. Claims: at least 95 % and 90 % of the fault-free steps; every sample used exactly once.
    """
    records: dict[str, list[RunRecord]] = {arm: [] for arm in ARMS}
    for _ in range(args.repeats):
        for arm in ARMS:
            records[arm].append(run_arm(arm, args))
            print(f"{arm}: {steps_in(records[arm][-1], args.minutes * 60)} steps", flush=True)
    free = [steps_in(record, args.minutes * 60) for record in records["fault-free"]]
    rows = [row for arm in ARMS for row in rows_of(arm, args, records[arm], free)]
    return Result(rows, [f"{args.minutes:g} minutes an arm, a fault every {args.every:g} s"])


if __name__ == "__main__":
    start(recovery_time=run_recovery_time, goodput=run_goodput)
