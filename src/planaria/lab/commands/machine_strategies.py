"""Ways to train a recipe on the machines of a topology: one machine, a pipeline with each codec, or replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from typing import Literal

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.exchange.registry import make_exchange
from planaria.lab.commands.advise_wire import candidates, microbatch_flags
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import Costs, message_bytes
from planaria.pipeline.network.topology import Node, Topology
from planaria.runtime.fleet.devices import UNKNOWN
from planaria.runtime.prediction.layer_division import LayerCost, WorkerCapacity, divide
from planaria.runtime.prediction.memory import USABLE, StageMemory, stage_memory
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.prediction.traffic import exchange_costs, one_replica
from planaria.runtime.preparation.config_checks import require_sound
from planaria.runtime.resolved_run import ResolvedRun

MAX_MACHINES = 7
"""maximum in a household: every order of them is weighed"""
WIRES = ("bf16", "8/8", "6/4")
"""codecs to compare; fewer bits cost a small model 0.3 nats. The recipe's own is added"""
EXCHANGES: dict[str, dict[str, object]] = {
    "allreduce": {"kind": "allreduce"},
    "diloco, every 50": {"kind": "diloco", "options": {"every": 50}},
    "noloco, every 50": {"kind": "noloco", "options": {"every": 50}},
}


@dataclass(frozen=True)
class PlacedCosts(Costs):
    """Costs of stages on machines of a topology."""

    topology: Topology = field(kw_only=True)
    machines: Sequence[Node] = field(kw_only=True)
    """by stage"""

    def compute(self, kind: Literal["forward", "backward"], stage: int, hop: int) -> float:
        return super().compute(kind, stage, hop) / self.machines[stage].speed

    def transmit(self, source: int, target: int, size: int) -> float:
        sites = self._sites(source, target)
        queued = self.topology.latency_s(*sites) if self.network.latency_queued else 0.0
        return queued + self.topology.queueing * self.topology.transmit_s(*sites, size)

    def carry(self, source: int, target: int, size: int) -> float:
        return self.topology.carry_s(*self._sites(source, target), size)

    def _sites(self, source: int, target: int) -> tuple[str, str]:
        return self.machines[source].site, self.machines[target].site


@dataclass(frozen=True)
class Strategy:
    """One way to train on some of the machines."""

    name: str
    machines: tuple[Node, ...]
    step_s: float
    peak: float | None
    """bytes on the machine with the least room, or None if the family cannot predict them"""
    obstacle: str
    """why it does not fit, or an empty string"""
    flags: str
    config: RunConfig
    """the recipe with this strategy's stages, codec, microbatches and replicas"""
    sends: bool
    """whether machines exchange messages in a step, whose times are less certain"""

    def hours(self, steps: int) -> float:
        return steps * self.step_s / 3600

    def money(self, steps: int) -> float:
        """Return the price of all its machines for those hours."""
        return self.hours(steps) * sum(machine.price_per_hour for machine in self.machines)


def weigh_machines(config: RunConfig, topology: Topology) -> list[Strategy]:
    """Return all strategies: those that fit first, each sorted by the time of a step.

    :raises UserError: if there are too many machines, or stages of unequal cost.
    """
    if len(topology.nodes) > MAX_MACHINES:
        raise UserError(
            f"network.topology: {len(topology.nodes)} nodes; advice weighs every order of at most {MAX_MACHINES}: "
            "remove some, or use `planaria plan`"
        )
    single = one_replica(config)
    found = [
        *(_alone(single, machine) for machine in topology.nodes if machine.role == "any"),
        *_pipelines(single, topology),
        *_replicas(single, topology),
    ]
    return sorted(found, key=lambda strategy: (bool(strategy.obstacle), strategy.step_s))


def _pass_seconds(config: RunConfig, stages: Sequence[int] = ()) -> float:
    """Return the seconds of one microbatch's forward and backward pass through ``stages`` (all) at speed 1."""
    costs, chosen = Costs(config.network), stages or range(config.pipeline.stages + 1)
    return sum(costs.compute(kind, stage, 1) for kind in ("forward", "backward") for stage in chosen)


def _alone(config: RunConfig, machine: Node) -> Strategy:
    step_s = _pass_seconds(config) * config.pipeline.microbatches / machine.speed
    peak, obstacle = _whole_model(config, (machine,))
    return Strategy(f"{machine.name} alone", (machine,), step_s, peak, obstacle, "--engine inline", config, False)


def _whole_model(config: RunConfig, machines: Sequence[Node]) -> tuple[float | None, str]:
    """Return the bytes of all stages in one process, one microbatch at a time, and the machine without that room."""
    memory = stage_memory(_in_flight(config, 1), _smallest(config, machines))
    if not memory:
        return None, ""
    tensors = sum(stage.state + stage.kept for stage in memory) + max(stage.working for stage in memory)
    peak = float(tensors + memory[0].process)
    return peak, next((lack for machine in machines if (lack := _lack(machine, peak))), "")


def _in_flight(config: RunConfig, count: int) -> RunConfig:
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"in_flight": count})})


def _smallest(config: RunConfig, machines: Sequence[Node]) -> int:
    """Return the least memory of these machines' devices, :data:`UNKNOWN` if none is known; 0: they compute on CPUs."""
    if config.train.device == "cpu":
        return 0
    return int(min((machine.memory_bytes for machine in machines if machine.memory_bytes), default=UNKNOWN))


def _lack(machine: Node, peak: float) -> str:
    room = machine.memory_bytes
    if room is None or peak <= USABLE * room:
        return ""
    return f"needs {peak / 1e9:.3g} GB; {machine.name} has {room / 1e9:.3g} GB, {USABLE * room / 1e9:.3g} GB usable"


def _pipelines(config: RunConfig, topology: Topology) -> Iterator[Strategy]:
    """Yield the best pipeline with each codec, over all divisions into stages, orders of machines and microbatches."""
    own = [] if config.pipeline.wire in WIRES else [config.pipeline.wire]
    layouts = _layouts(config, topology)
    for wire in (*WIRES, *own):
        options = [
            _pipeline(layout, topology, machines)
            for layout in (recipe.with_flags(base, {"pipeline.wire": wire}) for base in layouts)
            if (machines := _best_order(layout, topology)) is not None
        ]
        if options:
            yield min(options, key=lambda strategy: (bool(strategy.obstacle), strategy.step_s))


def _layouts(config: RunConfig, topology: Topology) -> list[RunConfig]:
    """Return the recipe with each number of block stages: equal ones, and ones that make the slowest machine's passes
    as short as possible. If its stages differ, return only the recipe itself.
    """
    if config.pipeline.layers == "auto":
        config = recipe.with_flags(config, {"pipeline.layers": None})
    own, network, machines = config.pipeline.stages, config.network, len(topology.nodes)
    equal = all(len(set(seconds[1:])) <= 1 for seconds in (network.forward_s, network.backward_s))
    if config.pipeline.has_uneven_stages or not equal or config.routing.kind != "full":
        return [config] if own < machines else []
    layers = config.model.layers - config.model.ends_layers
    ends, block = (_pass_seconds(config, [stage]) for stage in (0, 1))
    head = ends / block * layers / own if block else 0.0  # in layers
    capacities = [WorkerCapacity(1 / machine.speed, layers) for machine in topology.nodes]
    found = []
    for count in range(1, min(machines - 1, layers) + 1):
        fitted = divide([LayerCost()] * layers, count, head, capacities)
        even = [layers // count] * count
        divided = [even] if sum(even) == layers else []
        found += [
            _accepted(_with_stages(config, sizes)) for sizes in (divided if fitted == even else [*divided, fitted])
        ]
    return [layout for layout in found if layout is not None]


def _accepted(layout: RunConfig) -> RunConfig | None:
    """Return the layout if training accepts it, or with checkpoints where the recipe's recovery needs equal stages."""
    for change in ({}, {"recovery.strategy": "checkpoint"}):
        with suppress(UserError):
            require_sound(ResolvedRun(changed := recipe.with_flags(layout, change)))
            return changed
    return None


def _with_stages(config: RunConfig, sizes: Sequence[int]) -> RunConfig:
    """Return the recipe with block stages of these numbers of layers, which take the same time in all."""
    own, seconds = config.pipeline.stages, {}
    uneven = len(set(sizes)) > 1
    if len(sizes) == own and not uneven:
        return config
    for name in ("forward_s", "backward_s"):
        ends, *blocks = getattr(config.network, name)
        layer = (blocks[0] if blocks else ends) * own / sum(sizes)
        seconds[f"network.{name}"] = [ends, *(layer * size for size in sizes)]
    layers = list(sizes) if uneven else None
    return recipe.with_flags(config, {"pipeline.stages": len(sizes), "pipeline.layers": layers, **seconds})


def _best_order(config: RunConfig, topology: Topology) -> tuple[Node, ...] | None:
    """Return the machines of stages 0..S with the least bound on a step, preferring those whose memory suffices."""
    size, memory = message_bytes(config.model, config.pipeline), stage_memory(config, _smallest(config, topology.nodes))
    stages = config.pipeline.stages

    def bound(machines: tuple[Node, ...]) -> tuple[bool, float]:
        lacks = any(_lack(machine, stage.peak) for machine, stage in zip(machines, memory, strict=False))
        return lacks, _bound(config, PlacedCosts(config.network, topology=topology, machines=machines), size)

    orders = permutations(topology.nodes, stages + 1)
    allowed = (order for order in orders if all(_may_hold(node, n) for n, node in enumerate(order)))
    return min(allowed, key=bound, default=None)


def _may_hold(node: Node, stage: int) -> bool:
    """Return whether a machine's role lets it hold a stage: data nodes the ends, workers the others."""
    return node.role == "any" or (node.role == "data") == (stage == 0)


def _bound(config: RunConfig, costs: PlacedCosts, size: MessageBytes) -> float:
    """Return the busiest machine's or link's seconds in a step, plus those of one microbatch alone."""
    stages = range(config.pipeline.stages + 1)
    computing = [sum(costs.compute(kind, stage, 1) for kind in ("forward", "backward")) for stage in stages]
    hops = [(stage, (stage + 1) % len(stages)) for stage in stages]
    there = [costs.transmit(a, b, size.forward) for a, b in hops]
    back = [costs.transmit(b, a, size.backward) for a, b in hops]
    inbound = [there[stage - 1] + back[stage] for stage in stages]
    links = inbound if costs.network.inbound == "shared" else [*there, *back]
    return (config.pipeline.microbatches - 1) * max(*computing, *links) + sum(computing) + sum(there) + sum(back)


def _pipeline(config: RunConfig, topology: Topology, machines: tuple[Node, ...]) -> Strategy:
    def weigh(candidate: RunConfig) -> tuple[bool, float, float | None, str, RunConfig]:
        costs = PlacedCosts(candidate.network, topology=topology, machines=machines)
        size = message_bytes(candidate.model, candidate.pipeline)
        peak, obstacle = _placed(candidate, machines)
        return (
            bool(obstacle),
            simulate(ResolvedRun(candidate).training(0), costs, size).step_s,
            peak,
            obstacle,
            candidate,
        )

    weighed = [weigh(candidate) for candidate in candidates(config, config.pipeline.wire)]
    _, seconds, peak, obstacle, chosen = min(weighed, key=lambda one: one[:2])
    return Strategy(
        f"pipeline, {chosen.pipeline.wire}", machines, seconds, peak, obstacle, _pipeline_flags(chosen), chosen, True
    )


def _pipeline_flags(config: RunConfig) -> str:
    """Return the flags of this pipeline. Costs of other stages than the recipe's come with them; faults in the recipe
    may hit stages that do not exist.
    """
    pipeline, network = config.pipeline, config.network
    flags = f"--pipeline.wire '{pipeline.wire}' --pipeline.stages {pipeline.stages} {microbatch_flags(pipeline)}"
    if pipeline.has_uneven_stages:
        flags += f" --pipeline.layers '{pipeline.cut}'"
        flags += " --recovery.strategy checkpoint" * (config.recovery.strategy == "checkpoint")
    if config.chaos.trace:
        flags += " --chaos.trace none"
    for name in ("forward_s", "backward_s"):
        if len(costs := getattr(network, name)) > 1:
            flags += f" --network.{name} '[{', '.join(f'{seconds:.3g}' for seconds in costs)}]'"
    return flags


def _placed(config: RunConfig, machines: Sequence[Node]) -> tuple[float | None, str]:
    """Return the peak of the stage with the least room on its machine, and whether it exceeds that room."""
    memory: Sequence[StageMemory] = stage_memory(config, _smallest(config, machines))
    if not memory:
        return None, ""
    pairs = list(zip(machines, (float(stage.peak) for stage in memory), strict=True))
    tightest = max(pairs, key=lambda pair: pair[1] / (pair[0].memory_bytes or float("inf")))
    peak = tightest[1] if tightest[0].memory_bytes else max(peak for _, peak in pairs)
    return peak, _lack(*tightest)


def _replicas(config: RunConfig, topology: Topology) -> Iterator[Strategy]:
    """Yield replicas, one on each of the fastest machines, that divide the samples of a step; of each exchange the
    best number.
    """
    whole = [machine for machine in topology.nodes if machine.role == "any"]
    fastest = sorted(whole, key=lambda machine: -machine.speed)
    counts = [n for n in range(2, len(fastest) + 1) if config.pipeline.microbatches % n == 0]
    for name, exchange in EXCHANGES.items():
        options = [_replicated(config, topology, fastest[:n], name, exchange) for n in counts]
        if options and _interval(options[0].config) <= config.train.steps:
            yield min(options, key=lambda strategy: (bool(strategy.obstacle), strategy.step_s))


def _replicated(
    config: RunConfig, topology: Topology, machines: Sequence[Node], name: str, exchange: dict[str, object]
) -> Strategy:
    count, share = len(machines), config.pipeline.microbatches // len(machines)
    flags = {f"exchange.{key}": value for key, value in exchange.items()}
    divided = recipe.with_flags(config, {**flags, "exchange.replicas": count, "pipeline.microbatches": share})
    slowest = min(machine.speed for machine in machines)
    step_s = _pass_seconds(config) * share / slowest + _meeting_s(divided, topology, machines)
    peak, obstacle = _whole_model(divided, machines)
    extra = "".join(f" --exchange.options.{key} {n}" for key, n in dict(exchange.get("options") or {}).items())  # type: ignore[call-overload]
    if ResolvedRun(config).recovery.slots:
        extra += " --recovery.strategy checkpoint"  # replicas keep no copies
    words = f"--exchange.kind {exchange['kind']}{extra} --exchange.replicas {count} --pipeline.microbatches {share}"
    return Strategy(f"{count} replicas, {name}", tuple(machines), step_s, peak, obstacle, words, divided, True)


def _meeting_s(config: RunConfig, topology: Topology, machines: Sequence[Node]) -> float:
    """Return the seconds of a step in which replicas wait for updates of all stages over their slowest link."""
    sent = round(sum(cost.critical for cost in exchange_costs(config)))
    sites = [(a.site, b.site) for a, b in permutations(machines, 2)]
    return max(topology.carry_s(a, b, sent) for a, b in sites) / _interval(config)


def _interval(config: RunConfig) -> int:
    """Return the steps from one exchange to the next."""
    return make_exchange(config.exchange).interval or 1
