"""Steps of sleeping stages on real processes: over the plan's bound and the simulator's step; strategy costs."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished, run_fleet, step_seconds
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    PipelineConfig,
    RecoveryConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control.decisions import Decision
from planaria.control.events import Event
from planaria.control.reports import Worked
from planaria.pipeline.network.costs import FP32_BYTES

if TYPE_CHECKING:
    from planaria.control.protocols import Observer


DIM, CONTEXT = 32, 128
MESSAGE_BYTES = DIM * CONTEXT * 4
SKIP = 2
"""steps that open edges, fill caches and are not counted"""


@dataclass(frozen=True)
class Case:
    """A pipeline and its prices. ``forward_s`` and ``backward_s`` are seconds of one microbatch at stages 1..S."""

    stages: int
    microbatches: int
    order: Literal["1f1b", "gpipe"]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    latency_s: float = 0.0
    bandwidth: float | None = None

    def __str__(self) -> str:
        return f"{self.stages} × {self.microbatches} {self.order}"

    def config(self, name: str, steps: int) -> RunConfig:
        """The recipe: one layer a stage, messages of :data:`MESSAGE_BYTES`, head and loss free."""
        return RunConfig(
            name=name,
            out=str(RUNS),
            model=ModelConfig(vocab=VOCAB, dim=DIM, layers=self.stages, heads=2, hidden=64, context=CONTEXT),
            pipeline=PipelineConfig(
                stages=self.stages, microbatches=self.microbatches, microbatch_size=1, order=self.order
            ),
            data=bytes_data(),
            train=TrainConfig(steps=steps, eval_every=0),
            fleet=FleetConfig(spares=0),
            checkpoint=CheckpointConfig(every=0),
            network=NetworkConfig(
                forward_s=[0.0, *self.forward_s],
                backward_s=[0.0, *self.backward_s],
                latency_s=self.latency_s,
                bandwidth=self.bandwidth,
                emulate=True,
            ),
        )


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step: measured on the fleet, one by one; simulated; and the plan's lower bound."""

    measured: list[float]
    simulated: float
    bound: float
    binds: str


def even(stages: int, microbatches: int, order: Literal["1f1b", "gpipe"], forward_s: float, backward_s: float) -> Case:
    """Stages that are all alike."""
    return Case(stages, microbatches, order, (forward_s,) * stages, (backward_s,) * stages)


def measure(case: Case, name: str, steps: int) -> Outcome:
    """Run ``steps`` steps of the case on the fleet, and ask the simulator and the bound about one."""
    from planaria.pipeline.network.costs import Costs, message_bytes
    from planaria.pipeline.plan.bound import lower_bound
    from planaria.pipeline.plan.build import plan_for
    from planaria.pipeline.routing import full
    from planaria.runtime.engine.simulate import simulate

    config = case.config(name, steps + SKIP)
    plan = plan_for(config.pipeline, full(case.stages, case.microbatches))
    costs, size = Costs(config.network), message_bytes(config.model, config.pipeline)
    bound = lower_bound(plan, costs, size)
    record = run_fleet(config)
    require_finished(record)
    return Outcome(step_seconds(record, SKIP), simulate(plan, costs, size).step_s, bound.step_s, bound.binds)


PIPELINE_NAME = "pipeline"
CLAIM = Claim(high=1.10)


def row(case: Case, steps: int) -> Row:
    """The verdict on one pipeline."""
    outcome = measure(case, f"{PIPELINE_NAME}-{case.stages}x{case.microbatches}-{case.order}", steps)
    each = case.forward_s[0] + case.backward_s[0]
    ideal = (case.microbatches + case.stages - 1) * each
    bubble = (case.stages - 1) / (case.microbatches + case.stages - 1)
    return Row(
        what=str(case),
        values=[seconds / outcome.bound for seconds in outcome.measured],
        limit=f"bound 1 ({outcome.binds}); (M + S - 1)(f + b) = {ideal * 1e3:g} ms, bubble {bubble:.0%}",
        claim=CLAIM,
        beside={
            "step": milliseconds(outcome.measured),
            "bound": milliseconds([outcome.bound]),
            "idle": 1 - case.microbatches * each / statistics.median(outcome.measured),
        },
    )


def run_pipeline() -> int:
    """How close a real pipeline of processes comes to the least time its plan can take.

    Stages sleep their cost, so that the schedule is measured and not the number of cores. The claim: from the order to
    run a step to the order to commit it, control plane and transport included, a step takes at most 1.10 of its plan's
    lower bound.
    """
    flags = parser(PIPELINE_NAME, run_pipeline.__doc__)
    flags.add_argument("--steps", type=int, default=20, help="of each pipeline, warm-up apart")
    flags.add_argument(
        "--forward", type=float, default=0.010, metavar="S", help="seconds of a microbatch's forward pass"
    )
    flags.add_argument("--backward", type=float, default=0.020, metavar="S", help="seconds of its backward pass")
    flags.add_argument("--pipelines", nargs="+", default=["4x8", "8x16"], metavar="SxM", help="stages x microbatches")
    given = flags.parse_args()
    orders: tuple[Literal["1f1b", "gpipe"], ...] = ("1f1b", "gpipe")
    rows = []
    for shape in given.pipelines:
        stages, microbatches = (int(number) for number in shape.split("x"))
        rows += [row(even(stages, microbatches, o, given.forward, given.backward), given.steps) for o in orders]
    return conclude(PIPELINE_NAME, given, rows, ["measured: step / lower bound"])


SIMULATOR_NAME = "simulator"
SIMULATOR_CLAIM = Claim(low=0.9, high=1.1)

UNEVEN_F, UNEVEN_B = (0.006, 0.012, 0.009, 0.015), (0.012, 0.024, 0.018, 0.030)
CASES = (
    even(4, 8, "1f1b", 0.010, 0.020),
    even(8, 16, "gpipe", 0.010, 0.020),
    Case(4, 8, "1f1b", UNEVEN_F, UNEVEN_B),
    Case(4, 12, "gpipe", UNEVEN_F, UNEVEN_B),
    Case(4, 8, "1f1b", (0.010,) * 4, (0.020,) * 4, latency_s=0.015),
    Case(4, 8, "gpipe", (0.010,) * 4, (0.020,) * 4, bandwidth=MESSAGE_BYTES / 0.008),
    Case(4, 8, "1f1b", (0.005,) * 4, (0.010,) * 4, bandwidth=MESSAGE_BYTES / 0.020),
    Case(6, 12, "1f1b", (0.008,) * 6, (0.016,) * 6, latency_s=0.010, bandwidth=MESSAGE_BYTES / 0.005),
)
"""Even and uneven stages, slow links, and (last but one) a link that is busier than any stage."""


def simulator_row(case: Case, steps: int) -> Row:
    """The verdict on one pipeline."""
    outcome = measure(case, f"{SIMULATOR_NAME}-{case.stages}x{case.microbatches}-{case.order}", steps)
    return Row(
        what=str(case),
        values=[seconds / outcome.simulated for seconds in outcome.measured],
        limit=f"lower bound {outcome.bound * 1e3:.0f} ms: {outcome.bound / outcome.simulated:.3f}",
        claim=SIMULATOR_CLAIM,
        beside={
            "stages": "even" if len(set(case.forward_s)) == 1 else "uneven",
            "link": _link(case),
            "fleet": milliseconds(outcome.measured),
            "simulated": milliseconds([outcome.simulated]),
        },
    )


def _link(case: Case) -> str:
    """What a message costs on its way."""
    delays = [f"{case.latency_s * 1e3:g} ms late"] if case.latency_s else []
    if case.bandwidth:
        delays.append(f"busy {MESSAGE_BYTES / case.bandwidth * 1e3:g} ms")
    return ", ".join(delays) or "free"


def run_simulator() -> int:
    """Whether the simulator tells the truth: its step against the fleet's, over pipelines of several kinds.

    Stages sleep and links delay what the recipe's network section says; the simulator is asked about the same section.
    The claim: each measured step is within 10 % of the simulated one.
    """
    flags = parser(SIMULATOR_NAME, run_simulator.__doc__)
    flags.add_argument("--steps", type=int, default=12, help="of each pipeline, warm-up apart")
    flags.add_argument("--cases", type=int, default=len(CASES), help="only the first so many pipelines")
    given = flags.parse_args()
    rows = [simulator_row(case, given.steps) for case in CASES[: given.cases]]
    return conclude(SIMULATOR_NAME, given, rows, ["measured: fleet's step / simulated step"])


COSTS_NAME = "costs"
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
    return f"{COSTS_NAME}-{named(way).replace(',', '').replace(' ', '-')}"


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
    from planaria.lab.inline.engine import InlineEngine

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


def run_costs() -> int:
    """Whether every strategy's statement of its costs is what it really costs.

    Bytes and memory: strategies that keep copies train a small model on the inline engine, where parcels and holdings
    are counted, and on the fleet, whose workers log what they sent; from that the plan's activations are taken off. The
    claims: what is counted is within 2 % of the statement on the inline engine, at every worker, and within 3 % on the
    fleet.

    Time: fleets whose stages sleep and whose links delay, with a strategy's copies and without. The claim: they
    lengthen a step as the clock of `planaria compare` says, within 10 %.
    """
    flags = parser(COSTS_NAME, run_costs.__doc__)
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
    return conclude(COSTS_NAME, given, rows, notes)


if __name__ == "__main__":
    start(pipeline=run_pipeline, simulator=run_simulator, costs=run_costs)
