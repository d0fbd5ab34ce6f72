"""Robust rules on a language model: eight replicas, two of whom tell every lie that ships, on data alike and by domain.

A small LLaMA of bytes learns four kinds of text (books, law, dialogue, an encyclopaedia) by AdamW; replicas agree on
every step's gradient. Both settings see the same samples in the same steps: dealt out so that each replica has all four
kinds, or so that it has one kind only. Two replicas, of different kinds, lie from the first step to the last and know
what all others say. The rules bear two. Reference is the mean of all eight without liars. Beside it stands the mean of
the six others: what is lost by leaving two out, whose domains have one replica less then.

Claims: the best rule's validation loss is at most 0.03 nats (alike) or 0.08 (by domain) above the reference, under
every attack; no run is ended by a liar. The mean under attack, and every other rule, are shown. 90 nats and more: the
run ended before its end. Messages of nan, inf or a wrong type are refused as those of a wrong size are. Texts are those
of ``PLANARIA_DATA``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.robust import each
from planaria.exchange.robust.base import GramRule

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.data.stream import Stream

NAME = "robust_language"
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
            "name": NAME,
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


def ended_at(given: argparse.Namespace, seed: int, setting: str, rule: str, attack: str) -> float:
    """The validation loss at the end, in nats."""
    import torch

    from planaria.faults.byzantine import lie_of
    from planaria.faults.inline import corrupt
    from planaria.runtime.engine.inline import InlineEngine
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


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--texts", type=Path, default=Path(os.environ.get("PLANARIA_DATA", "data")))
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--attacks", nargs="+", default=ATTACKS, choices=ATTACKS)
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--dim", type=int, default=32, help="width of the model")
    flags.add_argument("--processes", type=int, default=2)
    given = flags.parse_args()
    streams(given, "train", 1)  # tokenised once, not in every process
    return conclude(NAME, given, rows_of(given))


if __name__ == "__main__":
    start(main)
