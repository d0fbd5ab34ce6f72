"""Is the right worker or link found to be slow, soon, and nobody else? Sixty real runs, each with one fault or none.

Four block stages and the ends, whose passes sleep. From a step drawn for each run on, one of them is slow (2, 3 or 5
times), or a link in one direction (20 or 100 ms), or all that a worker sends, or that reaches it, or a link breaks
again and again; in twenty runs nothing happens. The claims: of what is blamed at least 0.95 is right, by class and
place; of the faults at least 0.9 are found, at most 12 steps after they began, half of them after at most 6; in runs
without a fault, where a spare is at hand as in all, nobody is blamed or relieved. And every log leads to the same
verdicts when it is replayed.

``--busy`` runs so many busy loops beside: at least 0.9 of what is blamed is right.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start

NAME = "diagnosis"
STAGES = 4
WITHIN = 12
"""steps after which a fault is to be named"""
TAIL = 14
"""steps that a run goes on after a fault begins"""


class Episode(NamedTuple):
    """One run. ``faults`` are fields of :class:`planaria.chaos.trace.Fault`."""

    number: int
    onset: int
    what: str
    nodes: tuple[int, ...]
    faults: tuple[dict[str, Any], ...]


class Outcome(NamedTuple):
    """What came of it."""

    right: int
    wrong: tuple[str, ...]
    after: float
    """steps from the onset to the right verdict; infinite if there was none"""
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
        found.append(Episode(number, onset, what, *_faults(what, onset, node, draw)))
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
    from planaria.chaos.trace import Fault
    from planaria.control.replay import replay
    from planaria.record import decisions as d

    config = recipe(f"{NAME}-{episode.number}", episode.onset + TAIL, "act", spares=1)
    record = run_fleet(config, tuple(Fault.model_validate(fault) for fault in episode.faults))
    require_finished(record)
    blamed = [fact for _, fact in record.history if isinstance(fact, d.Blamed)]
    deeds = sum(isinstance(fact, d.Relieve) for _, fact in record.history)
    right = [fact for fact in blamed if (fact.fault, tuple(sorted(fact.nodes))) == _place(episode)]
    wrong = tuple(f"{episode.what or 'nothing'} {episode.nodes}: {fact.fault} {fact.nodes}, step {fact.step}"
                  for fact in blamed if fact not in right)  # fmt: skip
    after = min((fact.step - episode.onset for fact in right), default=math.inf)
    replayed = not replay(fact for _, fact in record.history).problems
    return Outcome(len(right), wrong, after, deeds, replayed)


def _place(episode: Episode) -> tuple[str, tuple[int, ...]]:
    return episode.what, tuple(sorted(episode.nodes))


def recipe(name: str, steps: int, diagnose: str, spares: int) -> Any:
    """Passes of 8 and 16 ms."""
    from benchmarks.fleet_run import VOCAB, bytes_data
    from planaria.config import RunConfig

    prices = {"forward_s": [0.0] + [0.008] * STAGES, "backward_s": [0.0] + [0.016] * STAGES}
    return RunConfig.model_validate(
        {
            "name": name,
            "out": str(RUNS),
            "model": {"vocab": VOCAB, "dim": 32, "layers": STAGES, "heads": 2, "hidden": 64, "context": 64},
            "pipeline": {"stages": STAGES, "microbatches": 4, "microbatch_size": 1},
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


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--episodes", type=int, default=60)
    flags.add_argument("--at-once", type=int, default=2, help="runs beside each other")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--busy", type=int, default=0, metavar="LOOPS", help="busy loops beside")
    given = flags.parse_args()
    drawn = episodes(given.episodes, given.seed)
    context = multiprocessing.get_context("spawn")
    with busy(given.busy), ProcessPoolExecutor(given.at_once, mp_context=context) as pool:
        outcomes = list(pool.map(carry_out, drawn))
    return conclude(f"{NAME}_busy" if given.busy else NAME, given, *table(given, drawn, outcomes))


def table(given: argparse.Namespace, drawn: list[Episode], outcomes: list[Outcome]) -> tuple[list[Row], list[str]]:
    right, wrong = sum(o.right for o in outcomes), [text for o in outcomes for text in o.wrong]
    afters = [o.after for e, o in zip(drawn, outcomes, strict=True) if e.what]
    found = [after for after in afters if after <= WITHIN]
    calm = [o for e, o in zip(drawn, outcomes, strict=True) if not e.what]
    least = 0.9 if given.busy else 0.95
    rows = [
        Row("of what is blamed, right", [right / max(1, right + len(wrong))], "1", Claim(low=least)),
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
    for kind in sorted({e.what for e in drawn if e.what}):
        own = [o.after for e, o in zip(drawn, outcomes, strict=True) if e.what == kind]
        rows.append(Row(f"{kind}: named", [sum(a <= WITHIN for a in own) / len(own)], "1", beside={"runs": len(own)}))
    return rows, [f"wrong: {text}" for text in wrong]


if __name__ == "__main__":
    start(main)
