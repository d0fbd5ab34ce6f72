"""Slow workers and links: whether the controller names them, and what its actions gain."""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.fleet_run import finished, first_step_t, last_commit_t, small_run
from benchmarks.harness import (
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    in_processes,
    interleaved,
    ratios,
    start,
)
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.replay import replay
from planaria.faults.trace import Fault

STAGES = 4
WITHIN = 12  # steps within which a fault must be named
TAIL = 14  # steps of a run after the fault's onset


class Episode(NamedTuple):
    """One run. ``faults`` are fields of :class:`planaria.faults.trace.Fault`."""

    number: int
    onset: int
    blamed: dict[str, tuple[int, ...]]  # expected fault and nodes; empty: no fault
    faults: tuple[dict[str, Any], ...]
    tail: int  # steps after the onset


class Outcome(NamedTuple):
    right: int
    wrong: tuple[str, ...]
    after: float  # steps from the onset until all faults are named correctly, or infinity
    deeds: int
    replayed: bool


def episodes(count: int, seed: int) -> list[Episode]:
    """Draw episodes, two thirds with a fault, all kinds equally often."""
    draw = random.Random(seed)
    kinds = ["slow worker", "slow link", "slow sender", "slow receiver", "flaky link"]
    found = []
    for number in range(count):
        onset, node = draw.randrange(14, 19), draw.randrange(1, STAGES + 1)
        what = "" if number % 3 == 2 else kinds[number // 3 * 2 % 5 if number % 3 == 0 else (number // 3 * 2 + 1) % 5]
        nodes, faults = _faults(what, onset, node, draw)
        found.append(Episode(number, onset, {what: nodes} if what else {}, faults, TAIL))
    return found


def pairs(count: int, seed: int) -> list[Episode]:
    """Draw episodes in which a worker and a link elsewhere become slow at once."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        onset, node = draw.randrange(14, 19), draw.randrange(1, STAGES + 1)
        slow, faults = _faults("slow worker", onset, node, draw)
        elsewhere = [n for n in range(STAGES + 1) if node not in (n, (n + 1) % (STAGES + 1))]
        source = draw.choice(elsewhere)
        link = (source, (source + 1) % (STAGES + 1))
        delay = {"signal": "delay", "strength": draw.choice([0.02, 0.1]), "step": onset}
        both = (*faults, {**delay, "stage": link[1], "peer": link[0]})
        found.append(Episode(number, onset, {"slow worker": slow, "slow link": link}, both, 2 * TAIL))
    return found


def _faults(
    what: str, onset: int, node: int, draw: random.Random
) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
    """Return the expected nodes and the faults."""
    around = STAGES + 1
    before, behind = (node - 1) % around, (node + 1) % around
    delay = {"signal": "delay", "strength": draw.choice([0.02, 0.1]), "step": onset}
    match what:
        case "slow worker":
            return (node,), (
                {"signal": "slow", "strength": draw.choice([2.0, 3.0, 5.0]), "step": onset, "stage": node},
            )
        case "slow link":
            source, target = draw.choice([(before, node), (node, before)])
            return (source, target), ({**delay, "stage": target, "peer": source},)
        case "slow sender":
            return (node,), tuple({**delay, "stage": target, "peer": node} for target in (before, behind))
        case "slow receiver":
            return (node,), ({**delay, "stage": node},)
        case "flaky link":
            low, high = sorted((before, node))
            resets = ({"signal": "reset", "step": onset + 2 * k, "stage": node, "peer": before} for k in range(5))
            return (low, high), tuple(resets)
    return (), ()


def carry_out(episode: Episode) -> Outcome:
    """Train, and judge the controller's verdicts."""
    config = recipe(f"diagnosis-{episode.number}", episode.onset + episode.tail, "act", spares=1)
    record = finished(config, tuple(Fault.model_validate(fault) for fault in episode.faults))
    blamed = [fact for _, fact in record.history if isinstance(fact, d.SlowPartFound)]
    deeds = sum(isinstance(fact, d.HandOverSlowStage) for _, fact in record.history)
    real = {_place(*one) for one in episode.blamed.items()}
    right = [fact for fact in blamed if _place(fact.fault, fact.nodes) in real]
    others, expected = [fact for fact in blamed if fact not in right], episode.blamed or "nothing"
    wrong = tuple(f"{expected}: {fact.fault} {fact.nodes}, step {fact.step}" for fact in others)
    first: dict[str, float] = {fact.fault: fact.step - episode.onset for fact in reversed(right)}
    after = max((first.get(what, math.inf) for what in episode.blamed), default=math.inf)
    replayed = not replay(fact for _, fact in record.history).problems
    return Outcome(len(right), wrong, after, deeds, replayed)


def _place(what: str, nodes: Iterable[int]) -> tuple[str, tuple[int, ...]]:
    """Normalise a verdict: a flaky link has no direction."""
    return what, tuple(sorted(nodes) if what == "flaky link" else nodes)


def recipe(name: str, steps: int, diagnose: str, spares: int, microbatches: int = 4) -> RunConfig:
    """A pipeline with passes of 8 and 16 ms."""
    prices = {"forward_s": [0.0] + [0.008] * STAGES, "backward_s": [0.0] + [0.016] * STAGES}
    return small_run(
        name,
        steps,
        STAGES,
        model={"context": 64},
        pipeline={"microbatches": microbatches},
        fleet={"spares": spares, "missed_heartbeats": 40, "diagnose": diagnose},
        network={**prices, "emulate": True},
    )


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Run this many busy loops."""
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=_burn, daemon=True) for _ in range(loops)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def _burn() -> None:
    while True:
        pass


@benchmark(
    "diagnosis",
    episodes=60,
    at_once=Flag(2, "concurrent runs"),
    seed=1,
    busy=Flag(0, "concurrent busy loops", metavar="LOOPS"),
    two=Flag(False, "two faults in each: a slow worker, and a slow link elsewhere"),
)
def run_diagnosis(args: Namespace) -> Measurement:
    """Measure how often and how soon the controller names the slow worker or link, in 60 real runs.

    Four block stages and the ends; passes sleep. From a random step on, a worker is slow (2, 3 or 5 times), or a link
    in one direction (20 or 100 ms), or all messages from or to a worker, or a link breaks repeatedly; twenty runs have
    no fault. Claims: at least 0.95 of verdicts are right by class and place (0.9 with ``--busy``); at least 0.9 of
    faults are named within 12 steps, half within 6; no verdict or relief without a fault; logs replay to the same
    verdicts.
    """
    drawn = (pairs if args.two else episodes)(args.episodes, args.seed)
    with busy(args.busy):
        outcomes = list(in_processes(args.at_once, carry_out, drawn))
    name = "diagnosis_two" if args.two else "diagnosis_busy" if args.busy else "diagnosis"
    rows = both_named(outcomes) if args.two else table(args, drawn, outcomes)
    return Result(rows, [f"wrong: {text}" for outcome in outcomes for text in outcome.wrong], name)


def both_named(outcomes: list[Outcome]) -> list[Row]:
    found = [o.after for o in outcomes if o.after <= 2 * WITHIN]
    right, wrong = sum(o.right for o in outcomes), sum(len(o.wrong) for o in outcomes)
    return [
        Row(f"runs with both named within {2 * WITHIN} steps", [len(found) / len(outcomes)], "1", Claim(low=0.8)),
        Row("of what is blamed, right", [right / max(1, right + wrong)], "1"),
        Row("steps until both are named", found, "reports of every second step"),
    ]


def table(args: Namespace, drawn: list[Episode], outcomes: list[Outcome]) -> list[Row]:
    right, wrong = sum(o.right for o in outcomes), sum(len(o.wrong) for o in outcomes)
    afters = [o.after for e, o in zip(drawn, outcomes, strict=True) if e.blamed]
    found = [after for after in afters if after <= WITHIN]
    calm = [o for e, o in zip(drawn, outcomes, strict=True) if not e.blamed]
    few, soon, none = (None, None, None) if args.busy else (Claim(low=0.9), Claim(high=6), Claim(high=0))
    least = Claim(low=0.9 if args.busy else 0.95)
    blamed, deeds = [float(len(o.wrong)) for o in calm], [float(o.deeds) for o in calm]
    rows = [
        Row("of what is blamed, right", [right / max(1, right + wrong)], "1", least),
        Row(f"faults named within {WITHIN} steps", [len(found) / len(afters)], "1", few),
        Row("steps until they are named", found, "reports of every second step", soon),
        Row("verdicts in runs without a fault", blamed, "0", none, judged="worst"),
        Row("deeds in runs without a fault", deeds, "0", Claim(high=0), judged="worst"),
        Row("logs that lead to the same", [sum(o.replayed for o in outcomes) / len(outcomes)], "1", Claim(low=1)),
    ]
    for kind in sorted({what for e in drawn for what in e.blamed}):
        own = [o.after for e, o in zip(drawn, outcomes, strict=True) if kind in e.blamed]
        rows.append(Row(f"{kind}: named", [sum(a <= WITHIN for a in own) / len(own)], "1", columns={"runs": len(own)}))
    return rows


PERIOD = 214  # steps between onsets: 20 s of slow and 20 s of normal steps without action


def run(diagnose: str, repeat: int, args: Namespace) -> tuple[float, int]:
    """Return the seconds from first order to last commit, and the most reliefs of one worker."""
    onsets = range(20, args.steps, PERIOD)
    faults = [Fault(step=step, stage=2, signal="slow", strength=3.0, resume_after_s=20.0) for step in onsets]
    record = finished(recipe(f"flapping-{diagnose}-{repeat}", args.steps, diagnose, spares=1), tuple(faults))
    relieved = Counter(fact.worker for _, fact in record.history if isinstance(fact, d.HandOverSlowStage))
    return last_commit_t(record) - first_step_t(record), max(relieved.values(), default=0)


@benchmark("flapping", steps=1500, repeats=3)
def run_flapping(args: Namespace) -> Measurement:
    """Measure needless reassignments when a stage is slow for 20 s and normal for 20 s in turn.

    Four stages whose passes sleep, and one spare, for about five minutes. The fault follows stage 2, so reassigning it
    gains nothing for long. One arm reports, the other acts, side by side. Claims: no worker is replaced more than
    twice; acting makes at least 0.98 of the steps per second of reporting.
    """
    jobs = [(diagnose, repeat, args) for repeat in range(args.repeats) for diagnose in ("report", "act")]
    found = list(in_processes(2, run, *zip(*jobs, strict=True)))
    pairs = list(zip(found[::2], found[1::2], strict=True))
    return [
        Row("steps a second: act over report", [report[0] / act[0] for report, act in pairs], "1", Claim(low=0.98)),
        Row("handovers of one worker", [float(act[1]) for _, act in pairs], "", Claim(high=2), judged="worst"),
        Row("seconds with report", [report[0] for report, _ in pairs], ""),
    ]


ARMS = {"nothing slow": ("off", False), "off": ("off", True), "report": ("report", True), "act": ("act", True)}
CALM = {"measured": "report", "not measured": "off"}


def seconds(args: Namespace, name: str, diagnose: str, slow: bool) -> float:
    config = recipe(f"steering-{name.replace(' ', '-')}", args.steps, diagnose, 1, args.microbatches)
    fault = Fault(step=args.onset, stage=2, signal="slow", strength=args.times)
    record = finished(config, (fault,) if slow else ())
    return last_commit_t(record) - first_step_t(record)


@benchmark(
    "steering",
    steps=300,
    onset=50,
    times=3.0,
    microbatches=Flag(8, "with few of them a slow stage does not fill a step"),
    repeats=3,
)
def run_steering(args: Namespace) -> Measurement:
    """Measure the gain of reassigning a slow worker's stage to a spare.

    Passes sleep. Arms, in turn with the same faults, spares and steps: nothing slow; slow without diagnosis; slow and
    reported; slow and acted upon. Claims: acting makes at least 1.8 times the steps per second of no diagnosis, and at
    least 0.90 of those without a fault; measuring costs at most 1 %.
    """
    sides = [lambda n=name, a=arm: seconds(args, n, *a) for name, arm in ARMS.items()]  # type: ignore[misc]
    sides += [lambda n=name, a=arm: seconds(args, n, a, False) for name, arm in CALM.items()]  # type: ignore[misc]
    took = dict(zip([*ARMS, *CALM], interleaved(sides, args.repeats), strict=True))

    def over(one: str, other: str) -> list[float]:
        return ratios(took[one], took[other])

    most = f"{statistics.median(over('off', 'nothing slow')):.2f}: nothing slow"
    return [
        Row("steps a second: act over off", over("off", "act"), most, Claim(low=1.8)),
        Row("steps a second: act over nothing slow", over("nothing slow", "act"), "1", Claim(low=0.9)),
        Row("seconds: report over off", over("report", "off"), "1"),
        Row("seconds of a run without faults: measured", over("measured", "not measured"), "1", Claim(high=1.01)),
    ]


if __name__ == "__main__":
    start(diagnosis=run_diagnosis, flapping=run_flapping, steering=run_steering)
