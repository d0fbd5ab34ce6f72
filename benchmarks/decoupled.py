"""Decoupled DiLoCo with a replica three times slower than the others, alone and killed again and again."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from statistics import fmean, median
from typing import Any

from benchmarks.fleet_run import bytes_data, finished
from benchmarks.harness import Claim, Flag, Measurement, Row, benchmark, ratios, run_config, start
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault

FAST = (0, 1)  # replicas
SLOW = 2
STAGES = 2  # of a replica, with the ends
SKIP = 10  # first steps
LAST = 20  # steps whose training loss is averaged
ARMS = ("lone", "decoupled", "killed", "all due", "noloco")


def exchange_of(args: Namespace, arm: str) -> dict[str, Any]:
    """Return an arm's exchange; all have a round of the same weights every sixteen steps."""
    if arm == "noloco":
        return {"kind": "noloco", "options": {"every": 16}}
    everyone = {"min_due": 3} if arm == "all due" else {}
    return {"kind": "decoupled", "options": {"every": 16, "fragments": 2, "delay": args.delay, **everyone}}


def recipe(args: Namespace, arm: str, seed: int) -> RunConfig:
    """Replicas of two stages that learn bytes; their links determine the duration of a step."""
    replicas = len(FAST) + (arm != "lone")
    return run_config(
        f"decoupled-{arm.replace(' ', '-')}-{seed}",
        seed=seed,
        model={"vocab": 260, "dim": 32, "layers": 1, "heads": 4, "hidden": 88, "context": 32},
        pipeline={"stages": STAGES - 1, "microbatches": 1, "microbatch_size": 4},
        data=bytes_data(),
        optim={"lr": 2e-3, "warmup": 10, "schedule": "constant"},
        train={"steps": args.steps, "eval_every": 0},
        exchange={"replicas": replicas, "patience_s": 1000.0, **exchange_of(args, arm)},
        fleet={"spares": 1 if arm == "killed" else 0},
        checkpoint={"every": 0},
        network={"emulate": "links", "latency_s": args.step_s / 4},
    )


def faults(args: Namespace, arm: str) -> tuple[Fault, ...]:
    """Slow the third replica's batches down; in the arm "killed", also kill its stage every few of its steps."""
    if arm == "lone":
        return ()
    ends, block = SLOW * STAGES, SLOW * STAGES + 1  # its nodes
    slow = Fault(step=0, stage=ends, signal="slow_data", strength=2 * args.step_s)
    kills = range(args.kill_every, args.steps, args.kill_every) if arm == "killed" else ()
    return (slow, *(Fault(step=step, stage=block) for step in kills))


def step_seconds(record: RunRecord) -> float:
    """Return the mean seconds of the fast replicas' steps that belong to them, without the first ten."""
    times: dict[int, list[float]] = {replica: [] for replica in FAST}
    steps = record.starts[0][1].steps
    for t, fact in record.history:
        if isinstance(fact, d.Commit) and fact.replica in times and fact.step < steps:
            times[fact.replica].append(t)
    return fmean((of[-1] - of[SKIP]) / (len(of) - 1 - SKIP) for of in times.values())


def losses(record: RunRecord) -> dict[int, float]:
    """Return replica → mean training loss of its last steps."""
    of: dict[int, list[float]] = defaultdict(list)
    for metric in record.trained:
        for replica, loss in metric.losses.items():
            of[replica].append(loss)
    return {replica: fmean(values[-LAST:]) for replica, values in of.items()}


def contributions(record: RunRecord) -> float:
    """Return the share of rounds in which the slow replica's update counted."""
    members = {
        fact.round: fact.contributors or fact.members for _, fact in record.history if isinstance(fact, d.Settle)
    }
    return fmean(SLOW in of for of in members.values())


@benchmark(
    "decoupled_slow",
    steps=Flag(60, "of each replica, if each uses its own samples"),
    step_s=Flag(0.2, "of a step, all of it on the links", metavar="S"),
    delay=Flag(4, "steps before a round is settled; the fast ones make three in one of the slow one"),
    kill_every=Flag(6, "steps of the slow replica from one SIGKILL to the next"),
    seeds=3,
)
def run_slow(args: Namespace) -> Measurement:
    """Train two fast replicas and one that is three times slower, as processes, with several exchanges.

    The first arm has the fast ones alone. Claims: with a decoupled exchange the fast ones keep >= 0.95 of their speed,
    also if the slow one is killed every few steps. Rounds that wait for all are shown, with the losses of each
    replica's last steps and the share of rounds in which the slow one's update counted.
    """
    took: dict[str, list[float]] = defaultdict(list)
    columns: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(1, args.seeds + 1):
        for arm in ARMS:
            config = recipe(args, arm, seed)
            record = finished(config, faults(args, arm))
            took[arm].append(step_seconds(record))
            by_replica = losses(record)
            columns[arm]["loss, fast"].append(fmean(by_replica[replica] for replica in FAST))
            if arm != "lone":
                columns[arm]["loss, slow"].append(by_replica[SLOW])
                columns[arm]["slow contributed"].append(contributions(record))
    claims = {"decoupled": Claim(low=0.95), "killed": Claim(low=0.95)}
    return [
        Row(
            f"speed of the fast ones: {arm} / lone",
            ratios(took["lone"], took[arm]),
            "1",
            claims.get(arm),
            {name: f"{median(values):.3f}" for name, values in columns[arm].items()},
        )
        for arm in ARMS
        if arm != "lone"
    ]


if __name__ == "__main__":
    start(slow=run_slow)
