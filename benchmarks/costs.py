"""Whether every strategy's statement of its costs is what it really costs.

Bytes and memory: strategies that keep copies train a small model on the inline engine, where parcels and holdings are
counted, and on the fleet, whose workers log what they sent; from that the plan's activations are taken off. The claims:
what is counted is within 2 % of the statement on the inline engine, at every worker, and within 3 % on the fleet.

Time: fleets whose stages sleep and whose links delay, with a strategy's copies and without. The claim: they lengthen a
step as the clock of `planaria compare` says, within 10 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.emulated import SKIP, even
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished, run_fleet, step_seconds
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    PipelineConfig,
    RecoveryConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control.decisions import Decision
from planaria.control.events import Event, Worked
from planaria.pipeline.network.costs import FP32_BYTES

if TYPE_CHECKING:
    from planaria.control.protocols import Observer

NAME = "costs"
INLINE, FLEET, TIME = Claim(high=0.02), Claim(high=0.03), Claim(low=0.9, high=1.1)
ROUND = 12
"""steps: whole rounds of every interval below"""


def plus(every: int, moments: bool) -> RecoveryConfig:
    options = Options({"mirror_every": every, "mirror_moments": moments})
    return RecoveryConfig(strategy="checkfree_plus", options=options)


def echo(bits: Literal[2, 4, 8], every: int) -> RecoveryConfig:
    return RecoveryConfig(strategy="echo", options=Options({"bits": bits, "every": every}))


def redundant(forward: bool) -> RecoveryConfig:
    return RecoveryConfig(strategy="redundant", options=Options({"forward": forward}))


NONE = RecoveryConfig(strategy="checkfree")
"""keeps no copies"""
BITS: tuple[Literal[2, 4, 8], ...] = (8, 4, 2)
WAYS = [
    *(plus(every, moments) for every in (1, 3) for moments in (False, True)),
    *(echo(bits, every) for bits in BITS for every in (1, 4)),
    redundant(True),
    redundant(False),
]
LINK_S = 0.012
"""seconds of one activation on the slow link"""


def named(way: RecoveryConfig) -> str:
    """What distinguishes one way from the others."""
    said = way.options
    match way.strategy:
        case "checkfree_plus":
            return f"checkfree_plus every {said['mirror_every']}" + (", moments" if said["mirror_moments"] else "")
        case "echo":
            return f"echo {said['bits']} bits every {said['every']}"
        case "redundant":
            return "redundant" + ("" if said["forward"] else " without forward")
        case other:
            return other


def routing_of(way: RecoveryConfig) -> str:
    return "swapped" if way.strategy == "checkfree_plus" else "full"


def slug(way: RecoveryConfig) -> str:
    return f"{NAME}-{named(way).replace(',', '').replace(' ', '-')}"


# Bytes and memory


@dataclass(frozen=True)
class Statement:
    """Bytes that all copies add to a step, and bytes held at each worker that holds any."""

    step_bytes: float
    memory: dict[int, int]


def small(given: argparse.Namespace, way: RecoveryConfig) -> RunConfig:
    """Stages so large that the headers of their parcels are next to nothing, and little to compute with them."""
    return RunConfig(
        name=slug(way),
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=given.dim, layers=4, hidden=given.dim * 11 // 4, context=32, tied=False),
        pipeline=PipelineConfig(stages=4, microbatches=4, microbatch_size=1),
        routing=RoutingConfig(kind=routing_of(way)),
        data=bytes_data(),
        train=TrainConfig(steps=2 * ROUND, eval_every=0),
        recovery=way,
        fleet=FleetConfig(spares=0),
        checkpoint=CheckpointConfig(every=0),
    )


def stated(config: RunConfig) -> Statement:
    """What the strategy says of itself."""
    from planaria.runtime.engine.copy_costs import costs_of_copies
    from planaria.runtime.engine.resolved import ResolvedRun

    memory: dict[int, int] = defaultdict(int)
    copies = costs_of_copies(ResolvedRun(config))
    for copy, cost in copies:
        memory[copy.host] += cost.host_memory
        for stage in copy.sources:
            memory[stage] += cost.own_memory
    return Statement(sum(cost.step_bytes * len(copy.sources) for copy, cost in copies), memory)


def counted_inline(config: RunConfig) -> Statement:
    """The same as counted on the inline engine: in the second round, when all copies are whole."""
    import torch

    from planaria.data.shards import prepare
    from planaria.data.stream import Stream
    from planaria.runtime.engine.inline import InlineEngine

    torch.set_num_threads(1)
    dataset = prepare(config.data, config.model.vocab)
    engine = InlineEngine(config, Stream(dataset, "train", config.model.context, config.seed))
    sent = []
    for _ in range(2):
        for _ in range(ROUND):
            engine.train_step()
        sent.append(engine.parcel_bytes)
    memory = {stage: keeping.nbytes for stage, keeping in engine.keeping.items()}
    return Statement((sent[1] - sent[0]) / ROUND, memory)


def counted_on_fleet(config: RunConfig) -> float:
    """Bytes a step that the fleet's edges carried in the second round beside activations and their gradients."""
    from planaria.pipeline.network.costs import UNIT, message_bytes
    from planaria.pipeline.plan.build import plan_for
    from planaria.pipeline.routing import routes
    from planaria.runtime.engine.simulate import simulate

    counters: list[Sent] = []

    def around(observer: Observer, _: Path) -> Observer:
        counters.append(Sent(observer))
        return counters[0]

    require_finished(run_fleet(config, around=around))
    sent = counters[0].bytes
    pipeline = config.pipeline
    plan = plan_for(pipeline, routes(config, 0))
    return sent / ROUND - sum(simulate(plan, UNIT, message_bytes(config.model, pipeline)).sent_bytes.values())


class Sent:
    """Observes for another, and counts what was sent in the second round; the log tells of many steps together."""

    def __init__(self, inner: Observer) -> None:
        self._inner, self.bytes = inner, 0

    @property
    def trouble(self) -> str:
        return self._inner.trouble

    def on_event(self, t: float, event: Event) -> None:
        self._inner.on_event(t, event)

    def on_decision(self, t: float, decision: Decision) -> None:
        self._inner.on_decision(t, decision)

    def on_worked(self, t: float, worked: Worked) -> None:
        self._inner.on_worked(t, worked)
        if worked.step >= ROUND:
            self.bytes += sum(worked.sent_bytes.values())


def off(counted: float, said: float) -> float:
    """How far a count is from what was said, as a share of that."""
    return abs(counted - said) / said if said else float(counted > 0)


def bytes_rows(given: argparse.Namespace, way: RecoveryConfig) -> list[Row]:
    """Statement and counts of one way."""
    config = small(given, way)
    said, inline, fleet = stated(config), counted_inline(config), counted_on_fleet(config)
    memory = [off(held, said.memory.get(stage, 0)) for stage, held in inline.memory.items()]
    return [
        Row(
            what=f"{named(way)}: inline, bytes and each worker's memory",
            values=[off(inline.step_bytes, said.step_bytes), *memory],
            limit="0",
            claim=INLINE,
            beside={
                "stated": kilobytes(said.step_bytes),
                "counted": kilobytes(inline.step_bytes),
                "memory, stated": kilobytes(sum(said.memory.values())),
                "held": kilobytes(sum(inline.memory.values())),
            },
            judged="worst",
        ),
        Row(
            what=f"{named(way)}: fleet, bytes",
            values=[off(fleet, said.step_bytes)],
            limit="0",
            claim=FLEET,
            beside={"stated": kilobytes(said.step_bytes), "counted": kilobytes(fleet)},
        ),
    ]


def kilobytes(count: float) -> str:
    return f"{count / 1e3:.1f} kB"


# Time


@dataclass(frozen=True)
class Race:
    """A fleet with copies against one without, or with fewer; on slow links or on free ones."""

    way: RecoveryConfig
    against: RecoveryConfig
    slow: bool
    context: int = 32
    """tokens of a microbatch: few, so that copies weigh much beside activations"""

    def config(self, way: RecoveryConfig, steps: int) -> RunConfig:
        """Sleeping stages; on a slow link an activation takes :data:`LINK_S`."""
        case = even(4, 8, "1f1b", 0.010, 0.020)
        plain = case.config(f"{slug(way)}-time", steps + SKIP)
        model = plain.model.model_copy(update={"context": self.context})
        bandwidth = FP32_BYTES * self.context * model.dim / LINK_S if self.slow else None
        return plain.model_copy(
            update={
                "model": model,
                "recovery": way,
                "routing": RoutingConfig(kind=routing_of(self.way)),
                "network": plain.network.model_copy(update={"bandwidth": bandwidth}),
            }
        )


RACES = [
    Race(redundant(True), redundant(False), slow=False),
    Race(redundant(False), NONE, slow=True),
    Race(plus(1, False), NONE, slow=True),
    Race(plus(3, True), NONE, slow=True),
    Race(echo(8, 1), NONE, slow=True, context=8),
    Race(echo(8, 4), NONE, slow=True, context=2),
]


def mean_step(config: RunConfig) -> float:
    """Seconds of a step on the fleet, over whole rounds: not all steps of a round carry copies."""
    record = run_fleet(config)
    require_finished(record)
    return statistics.mean(step_seconds(record, SKIP))


def time_row(race: Race, rounds: int, repeats: int) -> Row:
    """How much longer steps get, measured and stated."""
    from planaria.lab.compare.clock import clock_of

    both = [race.config(way, rounds * ROUND) for way in (race.way, race.against)]
    longer, plain = (clock_of(config).step_s for config in both)
    with_it, without = interleaved([lambda: mean_step(both[0]), lambda: mean_step(both[1])], repeats)
    ratios = [a / b for a, b in zip(with_it, without, strict=True)]
    against = "" if race.against == NONE else f" over {named(race.against)}"
    return Row(
        what=f"{named(race.way)}{against}: {'slow' if race.slow else 'free'} links, step",
        values=[ratio / (longer / plain) for ratio in ratios],
        limit="1",
        claim=TIME,
        beside={
            "stated": f"{longer / plain:.3f} × {milliseconds([plain])}",
            "counted": f"{statistics.median(ratios):.3f} × {milliseconds(without)}",
        },
    )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--dim", type=int, default=128, help="width of the model whose bytes are counted")
    flags.add_argument("--ways", type=int, default=len(WAYS), help="only the first so many have their bytes counted")
    flags.add_argument("--races", type=int, default=len(RACES), help="only the first so many are timed")
    flags.add_argument("--rounds", type=int, default=1, help=f"of {ROUND} steps, in one timed run")
    flags.add_argument("--repeats", type=int, default=3, help="of each timed run")
    given = flags.parse_args()
    rows = [row for way in WAYS[: given.ways] for row in bytes_rows(given, way)]
    rows += [time_row(race, given.rounds, given.repeats) for race in RACES[: given.races]]
    notes = [
        "measured, of bytes and memory: share by which a count is off its statement, the worst; kB a step, memory in "
        "all; of steps: how much longer they get, over how much longer they were said to get",
    ]
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
