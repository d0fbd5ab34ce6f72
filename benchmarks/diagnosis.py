"""Slow workers and links: whether the controller names them, and what its actions gain."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, parser, start

DIAGNOSIS_NAME = "diagnosis"
STAGES = 4
WITHIN = 12
"""steps after which a fault is to be named"""
TAIL = 14
"""steps that a run goes on after a fault begins"""


class Episode(NamedTuple):
    """One run. ``faults`` are fields of :class:`planaria.faults.trace.Fault`."""

    number: int
    onset: int
    blamed: dict[str, tuple[int, ...]]
    """what is to be named, and where; empty: nothing happens"""
    faults: tuple[dict[str, Any], ...]
    tail: int
    """steps that the run goes on after the onset"""


class Outcome(NamedTuple):
    """What came of it."""

    right: int
    wrong: tuple[str, ...]
    after: float
    """steps from the onset until all is named rightly; infinite if it was not"""
    deeds: int
    replayed: bool


def episodes(count: int, seed: int) -> list[Episode]:
    """Two thirds of them with a fault; all kinds as often as one another."""
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
    """In each, a worker becomes slow, and at once a link that does not touch it."""
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
    """What is to be blamed, and what is to happen."""
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
    """Train, and look at what was blamed."""
    from benchmarks.fleet_run import require_finished, run_fleet
    from planaria.control import decisions as d
    from planaria.control.replay import replay
    from planaria.faults.trace import Fault

    config = recipe(f"{DIAGNOSIS_NAME}-{episode.number}", episode.onset + episode.tail, "act", spares=1)
    record = run_fleet(config, tuple(Fault.model_validate(fault) for fault in episode.faults))
    require_finished(record)
    blamed = [fact for _, fact in record.history if isinstance(fact, d.Blamed)]
    deeds = sum(isinstance(fact, d.Relieve) for _, fact in record.history)
    right = [
        fact for fact in blamed if _place(fact.fault, fact.nodes) in {_place(*one) for one in episode.blamed.items()}
    ]
    wrong = tuple(f"{episode.blamed or 'nothing'}: {fact.fault} {fact.nodes}, step {fact.step}"
                  for fact in blamed if fact not in right)  # fmt: skip
    first: dict[str, float] = {fact.fault: fact.step - episode.onset for fact in reversed(right)}
    after = max((first.get(what, math.inf) for what in episode.blamed), default=math.inf)
    replayed = not replay(fact for _, fact in record.history).problems
    return Outcome(len(right), wrong, after, deeds, replayed)


def _place(what: str, nodes: Iterable[int]) -> tuple[str, tuple[int, ...]]:
    """A flaky link has no direction; others have."""
    return what, tuple(sorted(nodes) if what == "flaky link" else nodes)


def recipe(name: str, steps: int, diagnose: str, spares: int, microbatches: int = 4) -> Any:
    """Passes of 8 and 16 ms."""
    from benchmarks.fleet_run import VOCAB, bytes_data
    from planaria.config.schema import RunConfig

    prices = {"forward_s": [0.0] + [0.008] * STAGES, "backward_s": [0.0] + [0.016] * STAGES}
    return RunConfig.model_validate(
        {
            "name": name,
            "out": str(RUNS),
            "model": {"vocab": VOCAB, "dim": 32, "layers": STAGES, "heads": 2, "hidden": 64, "context": 64},
            "pipeline": {"stages": STAGES, "microbatches": microbatches, "microbatch_size": 1},
            "train": {"steps": steps, "eval_every": 0},
            "fleet": {"spares": spares, "missed": 40, "diagnose": diagnose},
            "checkpoint": {"every": 0},
            "network": {**prices, "emulate": True},
        }
    ).model_copy(update={"data": bytes_data()})


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
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


def run_diagnosis() -> int:
    """Measure how often and how soon the controller names the slow worker or link, in 60 real runs.

    Four block stages and the ends, whose passes sleep. From a step drawn for each run on, one of them is slow (2, 3 or
    5 times), or a link in one direction (20 or 100 ms), or all that a worker sends, or that reaches it, or a link
    breaks again and again; in twenty runs nothing happens. The claims: of what is blamed at least 0.95 is right, by
    class and place; of the faults at least 0.9 are found, at most 12 steps after they began, half of them after at most
    6; in runs without a fault, where a spare is at hand as in all, nobody is blamed or relieved. And every log leads to
    the same verdicts when it is replayed.

    ``--busy`` runs so many busy loops beside: at least 0.9 of what is blamed is right.
    """
    flags = parser(DIAGNOSIS_NAME, run_diagnosis.__doc__)
    flags.add_argument("--episodes", type=int, default=60)
    flags.add_argument("--at-once", type=int, default=2, help="runs beside each other")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--busy", type=int, default=0, metavar="LOOPS", help="busy loops beside")
    flags.add_argument(
        "--two", action="store_true", help="two faults in each: a slow worker, and a slow link elsewhere"
    )
    given = flags.parse_args()
    drawn = (pairs if given.two else episodes)(given.episodes, given.seed)
    context = multiprocessing.get_context("spawn")
    with busy(given.busy), ProcessPoolExecutor(given.at_once, mp_context=context) as pool:
        outcomes = list(pool.map(carry_out, drawn))
    name = f"{DIAGNOSIS_NAME}_two" if given.two else f"{DIAGNOSIS_NAME}_busy" if given.busy else DIAGNOSIS_NAME
    rows = both_named(outcomes) if given.two else table(given, drawn, outcomes)
    return conclude(name, given, rows, [f"wrong: {text}" for outcome in outcomes for text in outcome.wrong])


def both_named(outcomes: list[Outcome]) -> list[Row]:
    found = [o.after for o in outcomes if o.after <= 2 * WITHIN]
    right, wrong = sum(o.right for o in outcomes), sum(len(o.wrong) for o in outcomes)
    return [
        Row(f"runs with both named within {2 * WITHIN} steps", [len(found) / len(outcomes)], "1", Claim(low=0.8)),
        Row("of what is blamed, right", [right / max(1, right + wrong)], "1"),
        Row("steps until both are named", found, "reports of every second step"),
    ]


def table(given: argparse.Namespace, drawn: list[Episode], outcomes: list[Outcome]) -> list[Row]:
    right, wrong = sum(o.right for o in outcomes), sum(len(o.wrong) for o in outcomes)
    afters = [o.after for e, o in zip(drawn, outcomes, strict=True) if e.blamed]
    found = [after for after in afters if after <= WITHIN]
    calm = [o for e, o in zip(drawn, outcomes, strict=True) if not e.blamed]
    least = 0.9 if given.busy else 0.95
    rows = [
        Row("of what is blamed, right", [right / max(1, right + wrong)], "1", Claim(low=least)),
        Row(
            f"faults named within {WITHIN} steps",
            [len(found) / len(afters)],
            "1",
            None if given.busy else Claim(low=0.9),
        ),
        Row("steps until they are named", found, "reports of every second step", None if given.busy else Claim(high=6)),
        Row(
            "verdicts in runs without a fault",
            [float(len(o.wrong)) for o in calm],
            "0",
            None if given.busy else Claim(high=0),
            judged="worst",
        ),
        Row("deeds in runs without a fault", [float(o.deeds) for o in calm], "0", Claim(high=0), judged="worst"),
        Row("logs that lead to the same", [sum(o.replayed for o in outcomes) / len(outcomes)], "1", Claim(low=1)),
    ]
    for kind in sorted({what for e in drawn for what in e.blamed}):
        own = [o.after for e, o in zip(drawn, outcomes, strict=True) if kind in e.blamed]
        rows.append(Row(f"{kind}: named", [sum(a <= WITHIN for a in own) / len(own)], "1", beside={"runs": len(own)}))
    return rows


FLAPPING_NAME = "flapping"
PERIOD = 214
"""steps from one onset to the next: 20 s of slow ones and as many seconds of usual ones, as long as nothing is done"""


def run(diagnose: str, repeat: int, given: argparse.Namespace) -> tuple[float, int]:
    """Seconds from the first order to the last commit; how often one worker was relieved at most."""
    from benchmarks.fleet_run import first_step_t, require_finished, run_fleet
    from planaria.control import decisions as d
    from planaria.faults.trace import Fault

    onsets = range(20, given.steps, PERIOD)
    faults = [Fault(step=step, stage=2, signal="slow", strength=3.0, resume_after_s=20.0) for step in onsets]
    record = run_fleet(recipe(f"{FLAPPING_NAME}-{diagnose}-{repeat}", given.steps, diagnose, spares=1), tuple(faults))
    require_finished(record)
    relieved = Counter(fact.worker for _, fact in record.history if isinstance(fact, d.Relieve))
    last = max(t for t, fact in record.history if isinstance(fact, d.Commit))
    return last - first_step_t(record), max(relieved.values(), default=0)


def run_flapping() -> int:
    """Measure needless reassignments when a stage is slow for 20 s and normal for 20 s by turns.

    Four stages on real processes whose passes sleep, and one spare; for about five minutes stage 2 is slow by turns,
    whoever holds it: the fault follows the stage, so that handing it over gains nothing for long. One arm tells, the
    other acts, beside each other. The claims: no worker is relieved more than twice, and who acts makes at least 0.98
    of the steps a second of who only tells.
    """
    flags = parser(FLAPPING_NAME, run_flapping.__doc__)
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
    return conclude(FLAPPING_NAME, given, rows)


STEERING_NAME = "steering"
ARMS = {"nothing slow": ("off", False), "off": ("off", True), "tell": ("tell", True), "act": ("act", True)}
CALM = {"measured": "tell", "not measured": "off"}


def seconds(given: argparse.Namespace, name: str, diagnose: str, slow: bool) -> float:
    """From the first order to the last commit."""
    from benchmarks.fleet_run import first_step_t, require_finished, run_fleet
    from planaria.control import decisions as d
    from planaria.faults.trace import Fault

    config = recipe(f"{STEERING_NAME}-{name.replace(' ', '-')}", given.steps, diagnose, 1, given.microbatches)
    fault = Fault(step=given.onset, stage=2, signal="slow", strength=given.times)
    record = run_fleet(config, (fault,) if slow else ())
    require_finished(record)
    return max(t for t, fact in record.history if isinstance(fact, d.Commit)) - first_step_t(record)


def run_steering() -> int:
    """Measure what handing a slow worker's stage to a spare gains.

    Passes sleep what the recipe says, on real processes. Arms: nothing slow; slow and not diagnosed; slow and told;
    slow and acted upon. All have the same faults, spares and steps, and take turns. The claims: who acts makes at least
    1.8 times as many steps a second as who does not look, from the first step to the last, and at least 0.90 of those
    where nothing is slow; telling and measuring cost at most 1 %.
    """
    flags = parser(STEERING_NAME, run_steering.__doc__)
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
    return conclude(STEERING_NAME, given, rows)


if __name__ == "__main__":
    start(diagnosis=run_diagnosis, flapping=run_flapping, steering=run_steering)
