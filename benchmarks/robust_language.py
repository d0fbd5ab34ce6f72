"""Robust aggregation of small LLaMA replicas: whole replicas by domain, and one lying stage."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.robust import each
from planaria.config.options import Options
from planaria.exchange.robust.base import GramRule

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.data.stream import Stream
    from planaria.faults.byzantine import Lie
    from planaria.lab.inline.engine import InlineEngine
    from planaria.lab.inline.replicas import Round


ROBUST_LANGUAGE_NAME = "robust_language"
REPLICAS, PER_REPLICA, LIARS = 8, 4, (1, 6)
DOMAINS = ("books", "law", "dialogue", "encyclopaedia")
RULES: Mapping[str, Any] = {
    "mean": "",
    "multi-Krum": {"rule": "multikrum", "liars": 2},
    "clipping": {"rule": "clipping", "rounds": 1, "liars": 2},
    "Flag": {"rule": "flag", "liars": 2},
    "NNM, trimmed mean": {"rule": "trimmed_mean", "liars": 2, "mix": "nnm"},
}
ATTACKS = (
    "sign_flip", "own_flip", "zero", "random", "equivocate", "alie", "ipm", "mimic", "stale", "label_flip", "huge",
    "wrong_size",
)  # fmt: skip
SIX = "mean of the six others"
SETTINGS = {"alike": 0.03, "by domain": 0.08}
"""how many nats above the reference the best rule may end"""
CONTROL = {"rule": "benchmarks.robust_language:MeanOfTheRest", "liars": len(LIARS)}
ENDED = 99.0
"""nats of a run that did not reach its end"""


class MeanOfTheRest(GramRule):
    """The mean of those who are not refused: with liars who send nothing of use, that of the others."""

    def least(self) -> int:
        return 1

    def coefficients(self, gram: Tensor) -> Tensor:
        return gram.new_full((len(gram),), 1 / len(gram))


class Dealt:
    """Samples of several streams in turn: a step's n-th is of domain n mod 4, or of the domain of its replica."""

    def __init__(self, streams: Sequence[Stream], by_domain: bool) -> None:
        self._streams, self._by_domain = streams, by_domain
        self.separator = streams[0].separator

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples ``first`` to ``first + count - 1``: int64 [count, context] each."""
        import torch

        found = [self._sample(n) for n in range(first, first + count)]
        tokens, targets = (torch.cat(side) for side in zip(*found, strict=True))
        return tokens, targets

    def _sample(self, n: int) -> tuple[Tensor, Tensor]:
        kinds, whole = len(self._streams), REPLICAS * PER_REPLICA
        step, place = divmod(n, whole)
        replica, own = divmod(place, PER_REPLICA)
        # Of each domain a step takes the same samples either way.
        by_kind = replica % kinds, replica // kinds * PER_REPLICA + own
        domain, turn = by_kind if self._by_domain else (place % kinds, place // kinds)
        return self._streams[domain].batch(step * (whole // kinds) + turn, 1)


def recipe(given: argparse.Namespace, seed: int, rule: str) -> Any:
    from planaria.config.schema import RunConfig

    return RunConfig.model_validate(
        {
            "name": ROBUST_LANGUAGE_NAME,
            "out": str(RUNS),
            "seed": seed,
            "model": {
                "vocab": 257, "dim": given.dim, "layers": 2, "heads": 4, "hidden": given.dim * 11 // 4, "context": 64
            },
            "pipeline": {"stages": 1, "microbatches": 1, "microbatch_size": PER_REPLICA},
            "exchange": {"replicas": REPLICAS, "robust": CONTROL if rule == SIX else RULES[rule]},
            "optim": {"lr": 3e-3, "warmup": 20, "schedule": "cosine"},
            "train": {"steps": given.steps, "eval_every": 0, "eval_microbatches": 32},
        }
    )  # fmt: skip


def streams(given: argparse.Namespace, split: Any, seed: int) -> list[Stream]:
    from planaria.config.schema import DataConfig
    from planaria.data.shards import prepare
    from planaria.data.stream import Stream

    found = []
    for domain in DOMAINS:
        data = DataConfig(source=str(given.texts / domain), tokenizer="bytes", cache=str(RUNS / "cache"))
        found.append(Stream(prepare(data, 257), split, 64, seed))
    return found


def corrupt(engine: InlineEngine, node: int, lie: Lie) -> None:
    """Make a node Byzantine, from its next update on."""
    from planaria.faults.byzantine import Byzantine

    assert engine.replicas is not None, "only replicas send updates"
    byzantine = Byzantine(engine.config.exchange, lie)
    engine.replicas.outer[node].publisher = byzantine
    engine.replicas.sources[node] = partial(byzantine.poisoned, vocab=engine.config.model.vocab)


def ended_at(given: argparse.Namespace, seed: int, setting: str, rule: str, attack: str) -> float:
    """The validation loss at the end, in nats."""
    import torch

    from planaria.faults.byzantine import lie_of
    from planaria.lab.inline.engine import InlineEngine
    from planaria.runtime.engine.runner import NonFinite

    torch.set_num_threads(1)
    by_domain = setting == "by domain"
    train, validation = (streams(given, split, seed) for split in ("train", "validation"))
    engine = InlineEngine(recipe(given, seed, rule), Dealt(train, by_domain), Dealt(validation, False))  # type: ignore[arg-type]
    if attack:
        assert engine.replicas is not None
        stages = 1 + max(engine.stage.values())
        for number, node in enumerate(engine.stage):
            if node // stages in LIARS and (attack != "label_flip" or node % stages == 0):
                corrupt(engine, node, lie_of(attack, None, given.steps, seed, number))
    try:
        for _ in range(given.steps):
            engine.train_step()
        return engine.evaluate()
    except NonFinite:
        return ENDED


def rows_of(given: argparse.Namespace) -> list[Row]:
    cases = list(product(given.seeds, SETTINGS, RULES, ("", *given.attacks)))
    cases += list(product(given.seeds, SETTINGS, [SIX], ["wrong_size"]))
    seeds, settings, rules, attacks = zip(*cases, strict=True)
    ends = each(ended_at, [given] * len(cases), seeds, settings, rules, attacks, processes=given.processes)
    found = dict(zip(cases, ends, strict=True))
    rows: list[Row] = []
    for setting in SETTINGS:
        nats = [found[seed, setting, SIX, "wrong_size"] - found[seed, setting, "mean", ""] for seed in given.seeds]
        rows.append(Row(f"{setting}, none: {SIX}", nats, "0: all eight", judged="median"))
    for setting, attack in product(SETTINGS, ("", *given.attacks)):
        clean = {seed: found[seed, setting, "mean", ""] for seed in given.seeds}
        over = {rule: [found[seed, setting, rule, attack] - clean[seed] for seed in given.seeds] for rule in RULES}
        best = min((rule for rule in RULES if rule != "mean"), key=lambda rule: median(over[rule]))
        for rule, nats in over.items():
            claim = Claim(high=SETTINGS[setting]) if attack and rule == best else None
            limit = f"{median(clean.values()):.3f} nats"
            rows.append(Row(f"{setting}, {attack or 'none'}: {rule}", nats, limit, claim, judged="median"))
    return rows


def run_robust_language() -> int:
    """Compare robust rules on a language model: eight replicas, two Byzantine, each shipped attack.

    A small LLaMA of bytes learns four kinds of text (books, law, dialogue, an encyclopaedia) by AdamW; replicas agree
    on every step's gradient. Both settings see the same samples in the same steps: dealt out so that each replica has
    all four kinds, or so that it has one kind only. Two replicas, of different kinds, lie from the first step to the
    last and know what all others say. The rules bear two. Reference is the mean of all eight without liars. Beside it
    stands the mean of the six others: what is lost by leaving two out, whose domains have one replica less then.

    Claims: the best rule's validation loss is at most 0.03 nats (alike) or 0.08 (by domain) above the reference, under
    every attack; no run is ended by a liar. The mean under attack, and every other rule, are shown. 90 nats and more:
    the run ended before its end. Messages of nan, inf or a wrong type are refused as those of a wrong size are. Texts
    are those of ``PLANARIA_DATA``.
    """
    flags = parser(ROBUST_LANGUAGE_NAME, run_robust_language.__doc__)
    flags.add_argument("--texts", type=Path, default=Path(os.environ.get("PLANARIA_DATA", "data")))
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--attacks", nargs="+", default=ATTACKS, choices=ATTACKS)
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--dim", type=int, default=32, help="width of the model")
    flags.add_argument("--processes", type=int, default=2)
    given = flags.parse_args()
    streams(given, "train", 1)  # tokenised once, not in every process
    return conclude(ROBUST_LANGUAGE_NAME, given, rows_of(given))


ROBUST_SCOPE_NAME = "robust_scope"
ROBUST_SCOPE_REPLICAS, STAGES, LIAR, BEGINS, EVERY = 8, 5, 3, 20, 10
SCOPES = ("stage", "replica")
GROSS = ("own_flip", "sign_flip", "random")
SUBTLE = ("zero", "alie", "ipm", "mimic")
ROBUST_SCOPE_RULES: dict[str, dict[str, Any]] = {
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


def robust_scope_recipe(given: argparse.Namespace, seed: int, rule: str, scope: str) -> Any:
    from planaria.config.schema import RunConfig

    return RunConfig.model_validate(
        {
            "name": ROBUST_SCOPE_NAME,
            "out": str(RUNS),
            "seed": seed,
            "data": {"source": str(given.texts / "books"), "tokenizer": "bytes", "cache": str(RUNS / "cache")},
            "model": {"vocab": 257, "dim": 32, "layers": STAGES - 1, "heads": 4, "hidden": 88, "context": 32},
            "pipeline": {"stages": STAGES - 1, "microbatches": 1, "microbatch_size": 4},
            "optim": {"lr": 3e-3, "warmup": 10, "schedule": "constant"},
            "train": {"steps": given.steps, "eval_every": 0, "eval_microbatches": 16},
            "exchange": {
                "replicas": ROBUST_SCOPE_REPLICAS, "kind": "diloco", "options": {"every": EVERY, "alpha": 0.3},
                "robust": {**ROBUST_SCOPE_RULES[rule], "scope": scope},
            },
        }
    )  # fmt: skip


def ended(given: argparse.Namespace, seed: int, rule: str, scope: str, attack: str) -> Ended:
    """One run, to its end."""
    import torch

    from planaria import streams
    from planaria.faults.byzantine import lie_of
    from planaria.lab.inline.engine import InlineEngine

    torch.set_num_threads(1)
    config = robust_scope_recipe(given, seed, rule, scope)
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


def robust_scope_rows_of(given: argparse.Namespace) -> list[Row]:
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
    from planaria.exchange.robust.weighing import Weighing
    from planaria.lab.inline.engine import InlineEngine

    torch.set_num_threads(1)
    config = robust_scope_recipe(given, 1, "multi-Krum", "replica")
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


def run_robust_scope() -> int:
    """A liar that is honest at all stages but one: judged there alone, or as a whole replica (exchange.robust.scope).

    Eight replicas of a small LLaMA of bytes, each in five stages, agree by DiLoCo every tenth step. From step 20 on one
    of them lies in every round, at one stage of its five, and knows what all others say. With scope = 'stage' each
    stage judges what it hears by itself; with 'replica' inner products are added up over the stages, and one
    coefficient holds for all. The same seeds, texts and samples in all runs; the rules expect one liar.

    What is shown: the liar's coefficient, averaged over the rounds in which it lies, over all five stages (in which an
    honest replica has about 1/8), and beside it that at the stage where it lies; and what the lie costs: the validation
    loss of those that never lie, over that of the same run, rule and scope without lies.

    Claim: by multi-Krum with scope = 'replica' the liar's coefficient is at most 0.05, in each seed, under lies that
    are gross: turned round, or noise of ten times its size. Lies within the spread of honest replicas (zero, ALIE, IPM,
    a copy) are shown. Then sixteen replicas, none of whom lies: in a thousand rounds nobody is refused or found out,
    and to weigh offers takes at most a tenth of the processor time of a round of ten steps. The text is books/ of
    ``PLANARIA_DATA``.
    """
    flags = parser(ROBUST_SCOPE_NAME, run_robust_scope.__doc__)
    flags.add_argument("--texts", type=Path, default=Path(os.environ.get("PLANARIA_DATA", "data")))
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--attacks", nargs="+", default=[*GROSS, *SUBTLE])
    flags.add_argument("--dim", type=int, default=128, help="width of the model of honest replicas")
    flags.add_argument(
        "--rules", nargs="+", default=[*ROBUST_SCOPE_RULES], choices=ROBUST_SCOPE_RULES, help="beside multi-Krum"
    )
    flags.add_argument("--stage", type=int, default=2, help="where it lies")
    flags.add_argument("--steps", type=int, default=80)
    flags.add_argument("--rounds", type=int, default=1000, help="of replicas that are all honest; 0: none")
    flags.add_argument("--processes", type=int, default=2)
    given = flags.parse_args()

    from planaria import streams

    streams(robust_scope_recipe(given, given.seeds[0], "multi-Krum", "stage"))  # tokenised once, not in every process
    rows = robust_scope_rows_of(given)
    if given.rounds:
        none = f"{given.rounds} rounds of 16 honest replicas: refused or found out"
        rows.append(Row(none, [honest(given, given.rounds, 1)[0]], "0", Claim(high=0)))
        share = f"weighing over a round of {EVERY} steps, 16 replicas, processor time"
        rows.append(Row(share, [honest(given, 5, EVERY)[1]], "0", Claim(high=0.1)))
    return conclude(ROBUST_SCOPE_NAME, given, rows)


if __name__ == "__main__":
    start(language=run_robust_language, scope=run_robust_scope)
