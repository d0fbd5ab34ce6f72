"""A liar of each kind among replicas that are processes: the run ends by itself, and what is learned stays the same.

Six replicas of two stages train a small LLaMA of bytes and agree by DiLoCo every tenth step. From step 50 on one of
them lies in every round, in each of the ways that ship. The rule is multi-Krum with one liar; the mean is shown for the
attacks that are sound messages.

What a lie costs is the loss over that of the same run, by the same rule, in which nobody lies. Multi-Krum goes by five
of six either way: five honest ones, or the five that do not lie (by four where an offer is refused). All runs of a seed
have the same beginning, steps and rounds, and the same samples at each honest replica (steps on others are counted).
The loss is the mean of the five that never lie. What the rule itself costs is told apart from that: its run without
lies over the mean's. So is what the sixth contributes: by the mean, the run in which it says nothing of use.

Claims: every run ends by itself, no worker fails, only the liar is refused; a lie costs at most 3 % of the loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start

NAME = "robust_fleet"
REPLICAS, LIAR, BEGINS, EVERY = 6, 1, 50, 10
RULE = "multikrum"
MEANS = ("own_flip", "random", "alie", "ipm")
"""attacks that are shown with the mean"""
UNHEARD = "wrong_size"
"""an attack that every honest replica refuses, whatever the rule"""


def recipe(given: argparse.Namespace, name: str, seed: int, robust: str, stages: int = 1) -> Any:
    from benchmarks.fleet_run import VOCAB, bytes_data
    from planaria.config.schema import RunConfig

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
    from planaria.faults.trace import Fault

    ends = nodes[:1] if attack == "label_flip" else nodes
    return tuple(
        Fault(step=BEGINS, stage=node, signal="lie", attack=attack, strength=strength, until=last) for node in ends
    )


class Ended(NamedTuple):
    """What a run came to, at the replicas that never lie."""

    loss: float
    """of validation, their mean"""
    samples: Mapping[tuple[int, int], int]
    """(replica, step) → its block"""


def ended(config: Any, faults: tuple[Any, ...]) -> Ended:
    """The run, to its end.

    :raises AssertionError: when a worker has failed, or another than the liar was refused.
    """
    from benchmarks.fleet_run import require_finished, run_fleet
    from planaria.control import decisions as d
    from planaria.control import events as e

    record = run_fleet(config, faults)
    require_finished(record)
    facts = [fact for _, fact in record.history]
    failed = [fact for fact in facts if isinstance(fact, e.WorkerFailed)]
    refused = {fact.replica for fact in facts if isinstance(fact, e.OfferRefused)}
    assert not failed and refused <= ({LIAR} if faults else set()), (failed, refused)
    last = {f.replica: f.loss for f in facts if isinstance(f, e.StageReady) and f.mode == "evaluate" and f.loss}
    begun = (f for f in facts if isinstance(f, d.RunStep) and f.mode == "train" and f.replica != LIAR)
    samples = {(f.replica, f.step): f.block for f in begun}
    return Ended(fmean(loss for replica, loss in last.items() if replica != LIAR), samples)


def whole_replicas(given: argparse.Namespace) -> list[Row]:
    from planaria.exchange.attacks import ATTACKS

    def run(seed: int, rule: str, attack: str) -> Ended:
        faults = lies(attack, (2 * LIAR, 2 * LIAR + 1), given.steps) if attack else ()
        return ended(recipe(given, f"{rule or 'mean'}-{attack or 'honest'}", seed, rule), faults)

    honest = {rule: {seed: run(seed, rule, "") for seed in given.seeds} for rule in ("", RULE)}

    def row(name: str, runs: Mapping[int, Ended], over: str, claim: Claim | None = None) -> Row:
        ratios = [run.loss / honest[over][seed].loss for seed, run in runs.items()]
        others = sum(len(run.samples.items() ^ honest[over][seed].samples.items()) for seed, run in runs.items())
        limit = f"1; {over or 'mean'}: {median(run.loss for run in honest[over].values()):.3f} nats"
        return Row(name, ratios, limit, claim, {"steps on other samples": others}, judged="worst")

    def lied(rule: str, attack: str, claim: Claim | None = None) -> Row:
        runs = {seed: run(seed, rule, attack) for seed in given.seeds}
        return row(f"{rule or 'mean'}, {attack}: loss over the same without lies", runs, rule, claim)

    named = given.attacks or [*ATTACKS]
    rows = [row(f"{RULE}, none lies: loss over the mean's", honest[RULE], "")]
    rows += [lied(RULE, attack, Claim(high=1.03)) for attack in named]
    return rows + [lied("", attack) for attack in (UNHEARD, *MEANS) if attack in (UNHEARD, *named)]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=120)
    flags.add_argument("--attacks", nargs="*", help="all that ship unless named")
    given = flags.parse_args()
    return conclude(NAME, given, whole_replicas(given))


if __name__ == "__main__":
    start(main)
