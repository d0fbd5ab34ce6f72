"""A liar of each kind among replicas that are processes: the run ends by itself, and what is learned stays the same.

Six replicas of two stages train a small LLaMA of bytes and agree by DiLoCo every tenth step. From step 50 on one of
them lies in every round, in each of the ways that ship. The rule is multi-Krum with one liar; the mean is shown for the
attacks that are sound messages.

Reference is the same run by the mean in which that replica says nothing of use from step 50 on: what the five honest
ones make of theirs alone. All arms of a seed have the same beginning, steps and rounds, and the same samples at each
honest replica (steps on others are counted); they differ in what the sixth says and what the others make of it. The
loss is the mean of the honest ones'.

Claims: every run ends by itself, no worker fails, only the liar is refused; the loss is at most 1.03 of the
reference's. Six replicas of whom none lies stand beside it: what the sixth would have added.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start

NAME = "robust_fleet"
REPLICAS, LIAR, BEGINS, EVERY = 6, 1, 50, 10
MEANS = ("own_flip", "random", "alie", "ipm")
"""attacks that are shown with the mean"""
UNHEARD = "wrong_size"
"""an attack that every honest replica refuses, whatever the rule"""


def recipe(given: argparse.Namespace, name: str, seed: int, robust: str, stages: int = 1) -> Any:
    from benchmarks.fleet_run import VOCAB, bytes_data
    from planaria.config import RunConfig

    return RunConfig.model_validate(
        {
            "name": f"{NAME}-{name}-{seed}",
            "out": str(RUNS),
            "seed": seed,
            "data": bytes_data(),
            "model": {"vocab": VOCAB, "dim": 32, "layers": 2 * stages, "heads": 4, "hidden": 88, "context": 32},
            "pipeline": {"stages": stages, "microbatches": 1, "microbatch_size": 4},
            "optim": {"lr": 3e-3, "warmup": 10, "schedule": "constant"},
            "train": {"steps": given.steps, "eval_every": given.steps, "eval_microbatches": 16},
            "exchange": {"replicas": REPLICAS, "kind": "diloco", "robust": robust, "options": {"every": EVERY}},
            "fleet": {"spares": 0, "missed": 40},
            "checkpoint": {"every": 0},
        }
    )


def lies(attack: str, nodes: Sequence[int], last: int, strength: float | None = None) -> tuple[Any, ...]:
    from planaria.chaos.trace import Fault

    ends = nodes[:1] if attack == "label_flip" else nodes
    return tuple(
        Fault(step=BEGINS, stage=node, signal="lie", attack=attack, strength=strength, until=last) for node in ends
    )


def ended(config: Any, faults: tuple[Any, ...]) -> tuple[float, Mapping[tuple[int, int], int]]:
    """Validation loss at the end, mean of the honest replicas; (replica, step) → its block of samples.

    :raises AssertionError: when a worker has failed, or another than the liar was refused.
    """
    from benchmarks.fleet_run import require_finished, run_fleet
    from planaria.record import decisions as d
    from planaria.record import events as e

    record = run_fleet(config, faults)
    require_finished(record)
    facts = [fact for _, fact in record.history]
    failed = [fact for fact in facts if isinstance(fact, e.WorkerFailed)]
    refused = {fact.replica for fact in facts if isinstance(fact, e.OfferRefused)}
    assert not failed and refused <= ({LIAR} if faults else set()), (failed, refused)
    last = {f.replica: f.loss for f in facts if isinstance(f, e.StageReady) and f.mode == "evaluate" and f.loss}
    begun = (f for f in facts if isinstance(f, d.RunStep) and f.mode == "train" and f.replica != LIAR)
    samples = {(f.replica, f.step): f.block for f in begun}
    return fmean(loss for replica, loss in last.items() if replica != LIAR), samples


def whole_replicas(given: argparse.Namespace) -> list[Row]:
    from planaria.exchange.attacks import ATTACKS

    def run(seed: int, rule: str, attack: str) -> tuple[float, Mapping[tuple[int, int], int]]:
        faults = lies(attack, (2 * LIAR, 2 * LIAR + 1), given.steps) if attack else ()
        return ended(recipe(given, f"{rule or 'mean'}-{attack or 'honest'}", seed, rule), faults)

    reference = {seed: run(seed, "", UNHEARD) for seed in given.seeds}

    def row(rule: str, attack: str, claim: Claim | None = None) -> Row:
        over, others = [], 0
        for seed in given.seeds:
            loss, samples = run(seed, rule, attack)
            over.append(loss / reference[seed][0])
            others += len(samples.items() ^ reference[seed][1].items())
        name = f"{rule or 'mean'}, {attack or 'none lies'}: loss over the honest five's"
        return Row(name, over, "1", claim, {"steps on other samples": others}, judged="worst")

    rows = [row("", ""), row("multikrum", "")]
    rows += [row("multikrum", attack, Claim(high=1.03)) for attack in given.attacks or ATTACKS]
    rows += [row("", attack) for attack in MEANS if attack in (given.attacks or MEANS)]
    rows[0] = replace(rows[0], limit=f"{median(loss for loss, _ in reference.values()):.3f} nats")
    return rows


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=120)
    flags.add_argument("--attacks", nargs="*", help="all that ship unless named")
    given = flags.parse_args()
    return conclude(NAME, given, whole_replicas(given))


if __name__ == "__main__":
    start(main)
