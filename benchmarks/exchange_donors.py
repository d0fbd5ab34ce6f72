"""State of a rebuilt stage between rounds: the donor's current one, or the weights of its last round."""

from __future__ import annotations

import random
import tomllib
from argparse import Namespace
from itertools import product
from typing import Any

from benchmarks.harness import CORES, ROOT, Claim, Flag, Measurement, Result, Row, benchmark, by_case, gaps, start
from benchmarks.ladder import engine_for
from planaria.config.schema import RunConfig
from planaria.data.shards import tokenise_corpus
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.packing import pack, unpack
from planaria.models.state import StageState

RECIPE = ROOT / "src/planaria/lab/recipes/exchange.toml"
KINDS: dict[str, dict[str, Any]] = {"diloco": {"momentum": "heavy_ball", "alpha": 0.3}, "noloco": {}, "pair_mean": {}}
"""kind of exchange → its options"""
NONE, CURRENT, ROUND = "without kills", "current", "last round"


def recipe(args: Namespace, kind: str, seed: int) -> RunConfig:
    plain = tomllib.loads(RECIPE.read_text())
    del plain["compare"]
    plain["train"]["steps"] = args.steps
    plain["exchange"] |= {"kind": kind, "options": {"every": args.every, **KINDS[kind]}}
    return RunConfig.model_validate({**plain, "seed": seed})


def rebuild(engine: ReferenceEngine, state: str, draw: random.Random) -> None:
    """Lose a random stage of a random replica, and rebuild it from another replica at the same step."""
    node = draw.randrange(len(engine.stage))
    others = [other for other in engine.resolved.arrangement.nodes(engine.stage[node]) if other != node]
    donor = others[draw.randrange(len(others))]
    assert engine.replicas is not None
    outer = engine.replicas.outer[donor]
    donated = engine.runners[donor].state().trained if state == CURRENT else StageState(dict(outer.settled["slow"]))
    donated.outer = outer.state_for_transfer(to_successor=False)
    engine.load_states({node: unpack(pack(donated))})
    engine.replicas.rebuilt([node])


def train(args: Namespace, kind: str, state: str, seed: int) -> float:
    """Return the validation loss in nats after a run with a kill every ``args.kill_every`` steps."""
    engine, draw = engine_for(recipe(args, kind, seed)), random.Random(seed)
    while engine.step < args.steps:
        if state != NONE and engine.step and engine.step % args.kill_every == 0:
            rebuild(engine, state, draw)
        engine.train_step()
    return engine.evaluate()


@benchmark(
    "exchange_donors",
    seeds=Flag([1, 2, 3]),
    steps=Flag(300),
    every=Flag(20, "inner steps between rounds"),
    kill_every=Flag(15, "steps between kills, each of one stage of one replica"),
    workers=Flag(CORES, "processes at the same time"),
)
def run_exchange_donors(args: Namespace) -> Measurement:
    """Compare the donor's current weights and moments with the weights of its last round and fresh moments.

    Four replicas of a small LLaMA (``planaria compare exchange``) lose a stage every 15 steps. With the weights of the
    last round, results would depend on steps alone, since all donors still have them.

    Claims, of the validation loss minus that of the same run without kills: the current state costs at most 0.01 nats,
    the last round's weights at least 0.03.
    """
    config = recipe(args, "noloco", 1)
    tokenise_corpus(config.data, config.model.vocab, print)
    cases = product(KINDS, (NONE, CURRENT, ROUND), args.seeds)
    losses = by_case(args.workers, train, cases, args)
    rows = []
    for kind, (state, claim) in product(KINDS, ((CURRENT, Claim(high=0.01)), (ROUND, Claim(low=0.03)))):
        of, base = ([losses[kind, each, seed] for seed in args.seeds] for each in (state, NONE))
        columns = {"loss": " ".join(f"{loss:.3f}" for loss in of), "without kills": " ".join(f"{x:.3f}" for x in base)}
        rows.append(Row(f"{kind}: {state}", gaps(of, base), "0", claim, columns))
    return Result(rows, ["measured: difference of validation losses in nats; medians"])


if __name__ == "__main__":
    start(run_exchange_donors)
