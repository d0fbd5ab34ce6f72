"""Stragglers among eight replicas: how long a round of all waits for them, and how long a round of two does.

Every replica is real processes on the fleet; stages sleep what the recipe says, and one round in twenty a replica takes
five times as long. All arms have the same seeds, and with them the same stragglers in the same rounds. The claim:
rounds of all (DiLoCo) take at least 1.10 times as long as rounds in pairs (NoLoCo).
"""

from __future__ import annotations

import statistics

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished, run_fleet
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    ExchangeConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control import decisions as d

NAME = "stragglers"
CLAIM = Claim(low=1.10)
ARMS = {"all": "diloco", "pairs": "noloco"}


def recipe(kind: str, seed: int, replicas: int, rounds: int, every: int, pass_s: float) -> RunConfig:
    """Replicas of two stages whose forward takes ``pass_s`` and whose backward twice that."""
    return RunConfig(
        name=f"{NAME}-{kind}-{seed}",
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=VOCAB, dim=32, layers=1, heads=2, hidden=64, context=16),
        pipeline=PipelineConfig(stages=1, microbatches=1, microbatch_size=1),
        data=bytes_data(),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=rounds * every, eval_every=0),
        exchange=ExchangeConfig(replicas=replicas, kind=kind, options=Options({"every": every}), patience_s=1000.0),
        fleet=FleetConfig(spares=0, missed=40),
        checkpoint=CheckpointConfig(every=0),
        network=NetworkConfig(
            emulate=True, forward_s=[pass_s], backward_s=[2 * pass_s], straggle=0.05, straggle_times=5.0
        ),
    )


def train(config: RunConfig) -> tuple[float, float]:
    """Seconds from the first step to the last commit; of them, the mean replica's between a step due and the next."""
    record = run_fleet(config)
    require_finished(record)
    began = {}
    last: dict[int, float] = {}
    waited = 0.0
    for t, fact in record.history:
        if isinstance(fact, d.RunStep):
            began.setdefault(fact.replica, t)
        elif isinstance(fact, d.Commit):
            last[fact.replica] = t
        elif isinstance(fact, d.Settle):
            waited += sum(t - last[replica] for replica in fact.members)
    return max(last.values()) - max(began.values()), waited / config.exchange.replicas


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--replicas", type=int, default=8)
    flags.add_argument("--rounds", type=int, default=40)
    flags.add_argument("--every", type=int, default=4, help="steps from one round to the next")
    flags.add_argument("--pass-ms", type=float, default=20.0, help="of a forward at each of the two stages")
    flags.add_argument("--seeds", type=int, default=3)
    given = flags.parse_args()
    shape = (given.replicas, given.rounds, given.every, given.pass_ms / 1e3)
    took: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for seed in range(1, given.seeds + 1):
        for arm, kind in ARMS.items():
            took[arm].append(train(recipe(kind, seed, *shape)))
    seconds = {arm: [total for total, _ in found] for arm, found in took.items()}
    beside = {
        f"{arm}: {what}": f"{statistics.median(found[place] for found in took[arm]):.1f} s"
        for arm in ARMS
        for place, what in enumerate(("took", "waited"))
    }
    row = Row(
        what="rounds of all / pairs",
        values=[one / other for one, other in zip(seconds["all"], seconds["pairs"], strict=True)],
        limit="modelled 1.19 for 8 replicas",
        claim=CLAIM,
        beside=beside,
    )
    return conclude(NAME, given, [row])


if __name__ == "__main__":
    start(main)
