"""A liar that is honest at all stages but one: judged there alone, or as a whole replica (exchange.robust.scope).

Eight replicas of a small LLaMA of bytes, each in five stages, agree by DiLoCo every tenth step. From step 20 on one of
them lies in every round, at one stage of its five, and knows what all others say. With scope = 'stage' each stage
judges what it hears by itself; with 'replica' inner products are added up over the stages, and one coefficient holds
for all. The same seeds, texts and samples in all runs; the rules expect one liar.

What is shown: the liar's coefficient, averaged over the rounds in which it lies, over all five stages (in which an
honest replica has about 1/8), and beside it that at the stage where it lies; and what the lie costs: the validation
loss of those that never lie, over that of the same run, rule and scope without lies.

Claim: by multi-Krum with scope = 'replica' the liar's coefficient is at most 0.05, in each seed, under lies that are
gross: turned round, or noise of ten times its size. Lies within the spread of honest replicas (zero, ALIE, IPM, a copy)
are shown. Then sixteen replicas, none of whom lies: in a thousand rounds nobody is refused or found out, and to weigh
offers takes at most a tenth of the processor time of a round of ten steps. The text is books/ of ``PLANARIA_DATA``.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.robust import each
from planaria.config.options import Options

if TYPE_CHECKING:
    from planaria.runtime.engine.inline import InlineEngine
    from planaria.runtime.engine.inline_replicas import Round

NAME = "robust_scope"
REPLICAS, STAGES, LIAR, BEGINS, EVERY = 8, 5, 3, 20, 10
SCOPES = ("stage", "replica")
GROSS = ("own_flip", "sign_flip", "random")
SUBTLE = ("zero", "alie", "ipm", "mimic")
RULES: dict[str, dict[str, Any]] = {
    "multi-Krum": {"rule": "multikrum"},
    "NNM, multi-Krum": {"rule": "multikrum", "mix": "nnm"},
    "geometric median": {"rule": "geometric_median", "rounds": 8},
    "clipping": {"rule": "clipping", "rounds": 1},
    "Flag": {"rule": "flag"},
}


class Ended(NamedTuple):
    """What became of a liar, and of the others."""

    counted: float
    """its coefficient, over the rounds in which it lied and all stages"""
    there: float
    """at the stage where it lied"""
    loss: float
    """of validation, mean of those that never lie; nats"""


def recipe(given: argparse.Namespace, seed: int, rule: str, scope: str) -> Any:
    from planaria.config.schema import RunConfig

    return RunConfig.model_validate(
        {
            "name": NAME,
            "out": str(RUNS),
            "seed": seed,
            "data": {"source": str(given.texts / "books"), "tokenizer": "bytes", "cache": str(RUNS / "cache")},
            "model": {"vocab": 257, "dim": 32, "layers": STAGES - 1, "heads": 4, "hidden": 88, "context": 32},
            "pipeline": {"stages": STAGES - 1, "microbatches": 1, "microbatch_size": 4},
            "optim": {"lr": 3e-3, "warmup": 10, "schedule": "constant"},
            "train": {"steps": given.steps, "eval_every": 0, "eval_microbatches": 16},
            "exchange": {
                "replicas": REPLICAS, "kind": "diloco", "options": {"every": EVERY, "alpha": 0.3},
                "robust": {**RULES[rule], "scope": scope},
            },
        }
    )  # fmt: skip


def ended(given: argparse.Namespace, seed: int, rule: str, scope: str, attack: str) -> Ended:
    """One run, to its end."""
    import torch

    from planaria import streams
    from planaria.faults.byzantine import lie_of
    from planaria.faults.inline import corrupt
    from planaria.runtime.engine.inline import InlineEngine

    torch.set_num_threads(1)
    config = recipe(given, seed, rule, scope)
    engine = InlineEngine(config, *streams(config))
    assert engine.replicas is not None
    over, there = list[float](), list[float]()
    for step in range(given.steps):
        if attack and step == BEGINS:
            corrupt(engine, engine.replicas.nodes(LIAR)[given.stage], lie_of(attack, None, given.steps, seed, 0))
        rounds = engine.train_step().rounds
        for round in rounds if step >= BEGINS else ():
            told = counted(engine, round)
            over.append(fmean(told.values()))
            there.append(told.get(given.stage, told[0]))
    honest = [loss for replica, loss in enumerate(engine.evaluate_replicas()) if replica != LIAR]
    return Ended(fmean(over), fmean(there), fmean(honest))


def counted(engine: InlineEngine, round: Round) -> dict[int, float]:
    """What the liar's offers counted in a round, by stage; with whole replicas the first tells it for all."""
    first = [(node, verdict) for node, verdict in round.verdicts.items() if node in round.first and verdict.counted]
    return {engine.stage[node]: verdict.counted[0].coefficients[LIAR] for node, verdict in first}


def rows_of(given: argparse.Namespace) -> list[Row]:
    named = [("multi-Krum", attack) for attack in given.attacks]
    named += [(rule, GROSS[0]) for rule in given.rules if rule != "multi-Krum"]
    rules = dict.fromkeys(rule for rule, _ in named)
    cases = list(product(given.seeds, SCOPES, [*((rule, "") for rule in rules), *named]))
    seeds, scopes, of = zip(*cases, strict=True)
    of_rules, attacks = zip(*of, strict=True)
    ends = each(ended, [given] * len(cases), seeds, of_rules, scopes, attacks, processes=given.processes)
    found = dict(zip(cases, ends, strict=True))
    rows = []
    for (rule, attack), scope in product([*((rule, "") for rule in rules), *named], SCOPES):
        runs = {seed: found[seed, scope, (rule, attack)] for seed in given.seeds}
        costs = [run.loss / found[seed, scope, (rule, "")].loss for seed, run in runs.items()]
        claim = Claim(high=0.05) if (rule, scope) == ("multi-Krum", "replica") and attack in GROSS else None
        beside: dict[str, float] = {"where it lies": round(max(run.there for run in runs.values()), 4)}
        beside["loss"] = round(median(costs), 4) if attack else round(median(run.loss for run in runs.values()), 4)
        what = f"{rule}, {attack or 'none lies'}, scope = '{scope}'"
        rows.append(Row(what, [run.counted for run in runs.values()], "1/8", claim, beside, judged="worst"))
    return rows


def honest(given: argparse.Namespace, rounds: int, every: int) -> tuple[int, float]:
    """(offers refused and replicas found out, share of processor time that weighing takes) of sixteen honest replicas
    over so many ``rounds``."""
    import torch

    from planaria import streams
    from planaria.exchange.weighing import Weighing
    from planaria.runtime.engine.inline import InlineEngine

    torch.set_num_threads(1)
    config = recipe(given, 1, "multi-Krum", "replica")
    exchange = config.exchange.model_copy(
        update={"replicas": 16, "options": Options({**config.exchange.options, "every": every})}
    )
    pipeline = config.pipeline.model_copy(update={"stages": 1})
    model = config.model.model_copy(update={"dim": given.dim, "hidden": given.dim * 11 // 4})
    config = config.model_copy(update={"exchange": exchange, "pipeline": pipeline, "model": model})
    engine, spent = InlineEngine(config, *streams(config)), [0.0]

    def timed(method: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            found = method(*args, **kwargs)
            spent[0] += time.process_time() - began
            return found

        return inner

    patched: Any = Weighing
    plain = patched.products, patched.counted
    patched.products, patched.counted = map(timed, plain)
    accused, began = 0, time.process_time()
    for _ in range(rounds * every):
        for round in engine.train_step().rounds:
            accused += sum(len(verdict.refused) for verdict in round.verdicts.values())
    share = spent[0] / (time.process_time() - began)
    patched.products, patched.counted = plain
    return accused, share


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--texts", type=Path, default=Path(os.environ.get("PLANARIA_DATA", "data")))
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--attacks", nargs="+", default=[*GROSS, *SUBTLE])
    flags.add_argument("--dim", type=int, default=128, help="width of the model of honest replicas")
    flags.add_argument("--rules", nargs="+", default=[*RULES], choices=RULES, help="beside multi-Krum")
    flags.add_argument("--stage", type=int, default=2, help="where it lies")
    flags.add_argument("--steps", type=int, default=80)
    flags.add_argument("--rounds", type=int, default=1000, help="of replicas that are all honest; 0: none")
    flags.add_argument("--processes", type=int, default=2)
    given = flags.parse_args()

    from planaria import streams

    streams(recipe(given, given.seeds[0], "multi-Krum", "stage"))  # tokenised once, not in every process
    rows = rows_of(given)
    if given.rounds:
        none = f"{given.rounds} rounds of 16 honest replicas: refused or found out"
        rows.append(Row(none, [honest(given, given.rounds, 1)[0]], "0", Claim(high=0)))
        share = f"weighing over a round of {EVERY} steps, 16 replicas, processor time"
        rows.append(Row(share, [honest(given, 5, EVERY)[1]], "0", Claim(high=0.1)))
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
