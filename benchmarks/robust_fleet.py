"""A liar of each kind among replicas that are processes: the run ends by itself, and what is learned stays the same.

Six replicas of two stages train a small LLaMA of bytes and agree by DiLoCo every tenth step. From step 50 on one of
them lies in every round, in each of the ways that ship. Reference is the run of five replicas that nobody lies to. The
rule is multi-Krum with one liar; the mean is shown for the attacks that are sound messages.

Claims: every run ends by itself, no worker fails, only the liar is refused; the validation loss is at most 1.03 of the
reference's. Six replicas of whom none lies stand beside it: what one replica more makes of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start

NAME = "robust_fleet"
LIAR, BEGINS, EVERY = 1, 50, 10
MEANS = ("own_flip", "random", "alie", "ipm")
"""attacks that are shown with the mean"""


def recipe(given: argparse.Namespace, name: str, seed: int, replicas: int, robust: str, stages: int = 1) -> Any:
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
            "exchange": {"replicas": replicas, "kind": "diloco", "robust": robust, "options": {"every": EVERY}},
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


def ended(config: Any, faults: tuple[Any, ...], liar: int | None) -> tuple[float, Any]:
    """Validation loss at the end, mean of the honest replicas; the run's record."""
    from benchmarks.fleet_run import require_finished, run_fleet
    from planaria.record import events as e

    record = run_fleet(config, faults)
    require_finished(record)
    facts = [fact for _, fact in record.history]
    failed = [fact for fact in facts if isinstance(fact, e.WorkerFailed)]
    refused = {fact.replica for fact in facts if isinstance(fact, e.OfferRefused)}
    assert not failed and refused <= {liar}, (failed, refused)
    last = {f.replica: f.loss for f in facts if isinstance(f, e.StageReady) and f.mode == "evaluate" and f.loss}
    return fmean(loss for replica, loss in last.items() if replica != liar), record


def whole_replicas(given: argparse.Namespace) -> list[Row]:
    from planaria.exchange.attacks import ATTACKS

    clean = {seed: ended(recipe(given, "clean", seed, 5, "multikrum"), (), None)[0] for seed in given.seeds}
    honest = [ended(recipe(given, "six", seed, 6, "multikrum"), (), None)[0] / clean[seed] for seed in given.seeds]
    rows = [Row("six, none lies: loss over five's", honest, f"{median(clean.values()):.3f} nats")]
    for rule, attacks in (("multikrum", given.attacks or [*ATTACKS]), ("", MEANS)):
        for attack in attacks:
            over = []
            for seed in given.seeds:
                config = recipe(given, f"{rule or 'mean'}-{attack}", seed, 6, rule)
                over.append(ended(config, lies(attack, (2 * LIAR, 2 * LIAR + 1), given.steps), LIAR)[0] / clean[seed])
            name = f"{rule or 'mean'}, {attack}: loss over five's"
            rows.append(Row(name, over, "1", Claim(high=1.03) if rule else None, judged="worst"))
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
