"""Steps of sleeping stages on real processes: over the plan's bound and the simulator's step; strategy costs."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.fleet_run import Relay, finished, small_run, step_seconds
from benchmarks.harness import (
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    interleaved,
    milliseconds,
    ratios,
    start,
)
from planaria.config.schema import RecoveryConfig, RoutingConfig, RunConfig
from planaria.control.facts.reports import WorkReport
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.lab.compare.clock import arm_clock
from planaria.lab.reference.engine import ReferenceEngine
from planaria.pipeline.network.costs import FP32_BYTES, UNIT, Costs, message_bytes
from planaria.pipeline.plan.build import build_plan
from planaria.pipeline.plan.plan_bound import lower_bound
from planaria.pipeline.routing import routes
from planaria.pipeline.routing.base import full_routes
from planaria.runtime.prediction.copy_costs import costs_of_copies
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.resolved_run import ResolvedRun

DIM, CONTEXT = 32, 128
MESSAGE_BYTES = DIM * CONTEXT * 4
Order = Literal["1f1b", "gpipe"]
SKIP = 2  # steps that open edges, fill caches and are not counted


@dataclass(frozen=True)
class Case:
    """A pipeline and its costs. ``forward_s`` and ``backward_s`` are seconds of one microbatch at stages 1..S."""

    stages: int
    microbatches: int
    order: Order
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    latency_s: float = 0.0
    bandwidth: float | None = None

    def __str__(self) -> str:
        return f"{self.stages} × {self.microbatches} {self.order}"

    def config(self, name: str, steps: int) -> RunConfig:
        """One layer per stage, messages of :data:`MESSAGE_BYTES`, head and loss free."""
        return small_run(
            name,
            steps,
            self.stages,
            model={"dim": DIM, "context": CONTEXT},
            pipeline={"microbatches": self.microbatches, "order": self.order},
            network={
                "forward_s": [0.0, *self.forward_s],
                "backward_s": [0.0, *self.backward_s],
                "latency_s": self.latency_s,
                "bandwidth": self.bandwidth,
                "emulate": True,
            },
        )


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step: measured on the fleet, one by one; simulated; and the plan's lower bound."""

    measured: list[float]
    simulated: float
    bound: float
    binds: str


def even(stages: int, microbatches: int, order: Order, forward_s: float = 0.010, backward_s: float = 0.020) -> Case:
    return Case(stages, microbatches, order, (forward_s,) * stages, (backward_s,) * stages)


def measure(case: Case, name: str, steps: int) -> Outcome:
    """Run ``steps`` steps of the case on the fleet, and ask the simulator and the bound about one."""
    config = case.config(name, steps + SKIP)
    plan = build_plan(config.pipeline, full_routes(case.stages, case.microbatches))
    costs, size = Costs(config.network), message_bytes(config.model, config.pipeline)
    bound = lower_bound(plan, costs, size)
    return Outcome(step_seconds(finished(config), SKIP), simulate(plan, costs, size).step_s, bound.step_s, bound.binds)


def row(case: Case, steps: int) -> Row:
    outcome = measure(case, f"pipeline-{case.stages}x{case.microbatches}-{case.order}", steps)
    each = case.forward_s[0] + case.backward_s[0]
    ideal = (case.microbatches + case.stages - 1) * each
    bubble = (case.stages - 1) / (case.microbatches + case.stages - 1)
    over = [seconds / outcome.bound for seconds in outcome.measured]
    limit = f"bound 1 ({outcome.binds}); (M + S - 1)(f + b) = {ideal * 1e3:g} ms, bubble {bubble:.0%}"
    columns = {
        "step": milliseconds(outcome.measured),
        "bound": milliseconds([outcome.bound]),
        "idle": 1 - case.microbatches * each / statistics.median(outcome.measured),
    }
    return Row(str(case), over, limit, Claim(high=1.10), columns)


@benchmark(
    "pipeline",
    steps=Flag(20, "of each pipeline, warm-up apart"),
    forward=Flag(0.010, "seconds of a microbatch's forward pass", metavar="S"),
    backward=Flag(0.020, "seconds of its backward pass", metavar="S"),
    pipelines=Flag(["4x8", "8x16"], "stages x microbatches", metavar="SxM"),
)
def run_pipeline(args: Namespace) -> Measurement:
    """Measure steps of a real pipeline over the lower bound of its plan.

    Stages sleep, so the schedule is measured and not the number of cores. Claim: from its order to its commit, control
    plane and transport included, a step takes at most 1.10 of the bound.
    """
    orders: tuple[Order, ...] = ("1f1b", "gpipe")
    rows = []
    for shape in args.pipelines:
        stages, microbatches = (int(number) for number in shape.split("x"))
        rows += [row(even(stages, microbatches, o, args.forward, args.backward), args.steps) for o in orders]
    return Result(rows, ["measured: step / lower bound"])


UNEVEN_F, UNEVEN_B = (0.006, 0.012, 0.009, 0.015), (0.012, 0.024, 0.018, 0.030)
CASES = (
    even(4, 8, "1f1b"),
    even(8, 16, "gpipe"),
    Case(4, 8, "1f1b", UNEVEN_F, UNEVEN_B),
    Case(4, 12, "gpipe", UNEVEN_F, UNEVEN_B),
    Case(4, 8, "1f1b", (0.010,) * 4, (0.020,) * 4, latency_s=0.015),
    Case(4, 8, "gpipe", (0.010,) * 4, (0.020,) * 4, bandwidth=MESSAGE_BYTES / 0.008),
    Case(4, 8, "1f1b", (0.005,) * 4, (0.010,) * 4, bandwidth=MESSAGE_BYTES / 0.020),
    Case(6, 12, "1f1b", (0.008,) * 6, (0.016,) * 6, latency_s=0.010, bandwidth=MESSAGE_BYTES / 0.005),
)
"""Even and uneven stages, slow links, and (last but one) a link that is busier than any stage."""


def simulator_row(case: Case, steps: int) -> Row:
    outcome = measure(case, f"simulator-{case.stages}x{case.microbatches}-{case.order}", steps)
    delays = [f"{case.latency_s * 1e3:g} ms late"] if case.latency_s else []
    if case.bandwidth:
        delays.append(f"busy {MESSAGE_BYTES / case.bandwidth * 1e3:g} ms")
    columns = {
        "stages": "even" if len(set(case.forward_s)) == 1 else "uneven",
        "link": ", ".join(delays) or "free",
        "fleet": milliseconds(outcome.measured),
        "simulated": milliseconds([outcome.simulated]),
    }
    limit = f"lower bound {outcome.bound * 1e3:.0f} ms: {outcome.bound / outcome.simulated:.3f}"
    return Row(str(case), [s / outcome.simulated for s in outcome.measured], limit, Claim(0.9, 1.1), columns)


@benchmark(
    "simulator",
    steps=Flag(12, "of each pipeline, warm-up apart"),
    cases=Flag(len(CASES), "number of pipelines"),
)
def run_simulator(args: Namespace) -> Measurement:
    """Measure the fleet's step over the simulator's, for eight kinds of pipeline.

    Stages sleep and links delay as the recipe's network section says; the simulator reads the same section. Claim: each
    measured step is within 10 % of the simulated one.
    """
    rows = [simulator_row(case, args.steps) for case in CASES[: args.cases]]
    return Result(rows, ["measured: fleet's step / simulated step"])


ROUND = 12  # steps: whole rounds of every interval below


def strategy(name: str, **options: int | bool) -> RecoveryConfig:
    return RecoveryConfig.model_validate({"strategy": name, "options": options})


def plus(every: int, moments: bool) -> RecoveryConfig:
    return strategy("checkfree_plus", mirror_every=every, mirror_moments=moments)


NONE = strategy("checkfree")  # keeps no copies
WAYS = [
    *(plus(every, moments) for every in (1, 3) for moments in (False, True)),
    *(strategy("echo", bits=bits, every=every) for bits in (8, 4, 2) for every in (1, 4)),
    strategy("redundant", forward=True),
    strategy("redundant", forward=False),
]
LINK_S = 0.012  # seconds of one activation on the slow link


def named(way: RecoveryConfig) -> str:
    """Return the strategy with the options that distinguish it."""
    options = way.options
    match way.strategy:
        case "checkfree_plus":
            return f"checkfree_plus every {options['mirror_every']}" + (
                ", moments" if options["mirror_moments"] else ""
            )
        case "echo":
            return f"echo {options['bits']} bits every {options['every']}"
        case "redundant":
            return "redundant" + ("" if options["forward"] else " without forward")
        case other:
            return other


def routing_of(way: RecoveryConfig) -> str:
    return "swapped" if way.strategy == "checkfree_plus" else "full"


def slug(way: RecoveryConfig) -> str:
    return f"costs-{named(way).replace(',', '').replace(' ', '-')}"


# Bytes and memory


@dataclass(frozen=True)
class Statement:
    """Bytes that all copies add to a step, and bytes held at each worker that holds any."""

    step_bytes: float
    memory: dict[int, int]


def small(args: Namespace, way: RecoveryConfig) -> RunConfig:
    """Large stages with little computation, so that message headers are negligible."""
    return small_run(
        slug(way),
        2 * ROUND,
        4,
        model={"dim": args.dim, "heads": 4, "hidden": args.dim * 11 // 4, "context": 32, "tied": False},
        pipeline={"microbatches": 4},
        routing={"kind": routing_of(way)},
        recovery=way,
    )


def stated(config: RunConfig) -> Statement:
    memory: dict[int, int] = defaultdict(int)
    copies = costs_of_copies(ResolvedRun(config))
    for copy, cost in copies:
        memory[copy.host] += cost.host_memory
        for stage in copy.sources:
            memory[stage] += cost.own_memory
    return Statement(sum(cost.step_bytes * len(copy.sources) for copy, cost in copies), memory)


def counted_inline(config: RunConfig) -> Statement:
    """Count the costs on the reference engine in the second round, when all copies are complete."""
    torch.set_num_threads(1)
    dataset = tokenise_corpus(config.data, config.model.vocab)
    engine = ReferenceEngine(config, Stream(dataset, "train", config.model.context, config.seed))
    sent = []
    for _ in range(2):
        for _ in range(ROUND):
            engine.train_step()
        sent.append(engine.copy_bytes)
    memory = {stage: copies.nbytes for stage, copies in engine.copies.items()}
    return Statement((sent[1] - sent[0]) / ROUND, memory)


def counted_on_fleet(config: RunConfig) -> float:
    """Return the bytes per step of the fleet's edges in the second round, without activations and gradients."""
    counter = Sent()
    finished(config, around=counter.attach)
    pipeline = config.pipeline
    plan = build_plan(pipeline, routes(config, 0))
    return counter.bytes / ROUND - sum(simulate(plan, UNIT, message_bytes(config.model, pipeline)).sent_bytes.values())


class Sent(Relay):
    """Counts the bytes sent in the second round."""

    bytes = 0

    def on_worked(self, t: float, worked: WorkReport) -> None:
        super().on_worked(t, worked)
        if worked.step >= ROUND:
            self.bytes += sum(worked.sent_bytes.values())


def off(counted: float, stated: float) -> float:
    return abs(counted - stated) / stated if stated else float(counted > 0)


def bytes_rows(args: Namespace, way: RecoveryConfig) -> list[Row]:
    config = small(args, way)
    stated_costs, inline, fleet = stated(config), counted_inline(config), counted_on_fleet(config)
    memory = [off(held, stated_costs.memory.get(stage, 0)) for stage, held in inline.memory.items()]
    errors, columns = (
        [off(inline.step_bytes, stated_costs.step_bytes), *memory],
        {"stated": kilobytes(stated_costs.step_bytes)},
    )
    held = {
        "counted": kilobytes(inline.step_bytes),
        "memory, stated": kilobytes(sum(stated_costs.memory.values())),
        "held": kilobytes(sum(inline.memory.values())),
    }
    what = f"{named(way)}: inline, bytes and each worker's memory"
    on_fleet = [off(fleet, stated_costs.step_bytes)]
    return [
        Row(what, errors, "0", Claim(high=0.02), columns | held, judged="worst"),
        Row(f"{named(way)}: fleet, bytes", on_fleet, "0", Claim(high=0.03), columns | {"counted": kilobytes(fleet)}),
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
    context: int = 32  # tokens of a microbatch: few, so that copies are large compared with activations

    def config(self, way: RecoveryConfig, steps: int) -> RunConfig:
        """Sleeping stages; on a slow link an activation takes :data:`LINK_S`."""
        case = even(4, 8, "1f1b")
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
    Race(strategy("redundant", forward=True), strategy("redundant", forward=False), slow=False),
    Race(strategy("redundant", forward=False), NONE, slow=True),
    Race(plus(1, False), NONE, slow=True),
    Race(plus(3, True), NONE, slow=True),
    Race(strategy("echo", bits=8, every=1), NONE, slow=True, context=8),
    Race(strategy("echo", bits=8, every=4), NONE, slow=True, context=2),
]


def mean_step(config: RunConfig) -> float:
    """Seconds of a step on the fleet, over whole rounds: not all steps of a round carry copies."""
    return statistics.mean(step_seconds(finished(config), SKIP))


def time_row(race: Race, rounds: int, repeats: int) -> Row:
    both = [race.config(way, rounds * ROUND) for way in (race.way, race.against)]
    longer, plain = (arm_clock(config).step_s for config in both)
    with_it, without = interleaved([lambda: mean_step(both[0]), lambda: mean_step(both[1])], repeats)
    over = ratios(with_it, without)
    against = "" if race.against == NONE else f" over {named(race.against)}"
    what = f"{named(race.way)}{against}: {'slow' if race.slow else 'free'} links, step"
    columns = {
        "stated": f"{longer / plain:.3f} × {milliseconds([plain])}",
        "counted": f"{statistics.median(over):.3f} × {milliseconds(without)}",
    }
    return Row(what, [ratio / (longer / plain) for ratio in over], "1", Claim(0.9, 1.1), columns)


@benchmark(
    "costs",
    dim=Flag(128, "width of the model whose bytes are counted"),
    ways=Flag(len(WAYS), "number of strategies whose bytes are counted"),
    races=Flag(len(RACES), "number of timed races"),
    rounds=Flag(1, f"of {ROUND} steps, in one timed run"),
    repeats=Flag(3, "of each timed run"),
)
def run_costs(args: Namespace) -> Measurement:
    """Compare the costs that strategies state with measured ones.

    Bytes and memory: strategies that keep copies train a small model on the reference engine, which counts copy
    messages and copies, and on the fleet, whose workers log sent bytes; the plan's activations are subtracted.
    Claims: within 2 % of the statement inline, at every worker, and within 3 % on the fleet. Time: fleets whose
    stages sleep and whose links delay, with copies and without. Claim: steps lengthen as the clock of `planaria
    compare` says, within 10 %.
    """
    rows = [row for way in WAYS[: args.ways] for row in bytes_rows(args, way)]
    rows += [time_row(race, args.rounds, args.repeats) for race in RACES[: args.races]]
    notes = [
        "measured, of bytes and memory: share by which a count is off its statement, the worst; kB a step, memory in "
        "all; of steps: measured over predicted slowdown",
    ]
    return Result(rows, notes)


if __name__ == "__main__":
    start(pipeline=run_pipeline, simulator=run_simulator, costs=run_costs)
