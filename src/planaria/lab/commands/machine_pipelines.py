"""Pipelines over the machines of a topology: stages, the machines that hold them, codecs and microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Literal

from planaria.config import recipe
from planaria.config.options import Options
from planaria.config.schema import RunConfig
from planaria.lab.commands.advise_wire import candidates
from planaria.lab.commands.advised_command import flag_text
from planaria.lab.commands.placed_strategy import Strategy, accepted, best, peak_of_stages
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import Costs, message_bytes
from planaria.pipeline.network.topology import Node, Topology
from planaria.runtime.prediction.layer_division import LayerCost, WorkerCapacity, divide
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.preparation.requirements import device_needs, stage_work
from planaria.runtime.resolved_run import ResolvedRun

WIRES = ("bf16", "8/8", "6/4")
"""codecs to compare; fewer bits cost a small model 0.3 nats. The recipe's own is added"""


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


def pipelines(config: RunConfig, topology: Topology) -> Iterator[Strategy]:
    """Yield the best pipeline with each codec, over all divisions into stages, orders of machines and microbatches."""
    own = [] if config.pipeline.wire in WIRES else [config.pipeline.wire]
    layouts = _layouts(config, topology)
    for wire in (*WIRES, *own):
        text: object = dict(wire) if isinstance(wire, Options) else wire
        options = [
            option
            for layout in (recipe.with_flags(base, {"pipeline.wire": text}) for base in layouts)
            for machines in _best_orders(layout, topology)
            for option in _placed(layout, topology, machines)
        ]
        if chosen := best(options):
            yield chosen


def has_fixed_stages(config: RunConfig) -> bool:
    """Return whether the recipe's stages cannot be divided differently, as their layers are not alike."""
    network, pipeline = config.network, config.pipeline
    equal = all(len(set(seconds[1:])) <= 1 for seconds in (network.forward_s, network.backward_s))
    return (pipeline.has_uneven_stages and pipeline.layers != "auto") or not equal or config.routing.kind != "full"


def _layouts(config: RunConfig, topology: Topology) -> list[RunConfig]:
    """Return the recipe with each number of block stages that the machines can hold, and no or some layers beside the
    ends: equal stages, and those that make the slowest machine's passes as short as possible.
    """
    if has_fixed_stages(config):
        return [config] if config.pipeline.stages < len(topology.nodes) else []
    if config.pipeline.layers == "auto":
        config = recipe.with_flags(config, {"pipeline.layers": None})
    own, most = config.model.ends_layers, min(len(topology.nodes) - 1, config.model.layers)
    found: list[RunConfig] = []
    for count in range(1, most + 1):
        limit = config.model.layers - count
        for sizes in _divisions(config, topology, count, [own] if own else range(limit + 1)):
            layout = accepted(config, layout_flags(config, sizes))
            found += [] if layout is None else [layout]
    return found


def _divisions(config: RunConfig, topology: Topology, count: int, ends_layers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return layers of stages 0..S, the best of each kind: with and without layers beside the ends, equal or not."""
    machines = sorted(topology.nodes, key=lambda machine: -machine.speed)
    capacities = [WorkerCapacity(1 / machine.speed, config.model.layers) for machine in machines]
    head, chosen = _head_layers(config), dict[tuple[bool, bool], tuple[float, tuple[int, ...]]]()
    for beside in ends_layers:
        layers = config.model.layers - beside
        divided = [divide([LayerCost()] * layers, count, head + beside, capacities)]
        divided += [[layers // count] * count] if layers % count == 0 else []
        for blocks in divided:
            work = sorted([head + beside, *blocks], reverse=True)
            slowest = max(each / machine.speed for each, machine in zip(work, machines, strict=False))
            kind = bool(beside), len(set(blocks)) == 1
            chosen[kind] = min(chosen.get(kind, (slowest + 1, ())), (slowest, (beside, *blocks)))
    return [sizes for _, sizes in chosen.values()]


def _head_layers(config: RunConfig) -> float:
    """Return the time of the ends without decoder layers, in that of a layer."""
    costs, pipeline = Costs(config.network), config.pipeline
    ends, block = (sum(costs.compute(kind, stage, 1) for kind in ("forward", "backward")) for stage in (0, 1))
    layers = config.model.layers - config.model.ends_layers
    return ends / block * layers / pipeline.stages if block else 0.0


def layout_flags(config: RunConfig, sizes: Sequence[int]) -> dict[str, object]:
    """Return the settings of a recipe with stages 0..S of these numbers of layers, which take the same time in all."""
    beside, *blocks = sizes
    own, pipeline = config.model.ends_layers, config.pipeline
    if (beside, len(blocks), len(set(blocks))) == (own, pipeline.stages, 1) and not pipeline.has_uneven_stages:
        return {}
    flags: dict[str, object] = {"pipeline.stages": len(blocks), "model.ends_layers": beside}
    flags["pipeline.layers"] = blocks if len(set(blocks)) > 1 else None
    for name in ("forward_s", "backward_s"):
        ends, *costs = getattr(config.network, name)
        whole = sum(costs) if costs else ends * pipeline.stages
        layer = whole / (config.model.layers - own)
        flags[f"network.{name}"] = [ends, *(layer * size for size in blocks)]
        if beside != own:
            flags[f"network.entry_{name}"] = beside * layer
    return flags


def _best_orders(config: RunConfig, topology: Topology) -> list[tuple[Node, ...]]:
    """Return machines of stages 0..S with the least bound on a step, preferring those whose memory suffices for the
    recipe's microbatches, and for the smallest.
    """
    size = message_bytes(config.model, config.pipeline)
    allowed = [order for order in _orders(config, topology) if all(_may_hold(node, n) for n, node in enumerate(order))]
    bounds = {o: _bound(config, PlacedCosts(config.network, topology=topology, machines=o), size) for o in allowed}
    found: list[tuple[Node, ...]] = []
    for sized in (config, next(candidates(config, config.pipeline.wire))):
        sets = {frozenset(order): order for order in allowed}
        lacks = {machines: bool(peak_of_stages(sized, order)[1]) for machines, order in sets.items()}
        order = min(allowed, key=lambda each: (lacks[frozenset(each)], bounds[each]), default=None)
        found += [order] if order is not None and order not in found else []
    return found


def _orders(config: RunConfig, topology: Topology) -> Iterator[tuple[Node, ...]]:
    """Yield the machines of stages 0..S that a run can have: equal stages get them as they join; of unequal ones, the
    stage with the most work gets the fastest machine whose memory holds its state.
    """
    stages = config.pipeline.stages + 1
    if not config.pipeline.has_uneven_stages:
        yield from permutations(topology.nodes, stages)
        return
    work, needs = stage_work(config), device_needs(config).stages
    for machines in combinations(sorted(topology.nodes, key=lambda machine: -machine.speed), stages):
        free, holders = list(machines), dict[int, Node]()
        for stage in sorted(range(stages), key=lambda stage: -work[stage]):
            fits = (one for one in free if not needs or (one.memory_bytes or needs[stage]) >= needs[stage])
            if (holder := next(fits, None)) is not None:
                holders[stage] = holder
                free.remove(holder)
        if len(holders) == stages:
            yield tuple(holders[stage] for stage in range(stages))


def _may_hold(node: Node, stage: int) -> bool:
    """Return whether a machine's role lets it hold a stage: data nodes the ends, workers the others."""
    return node.role == "any" or (node.role == "data") == (stage == 0)


def _bound(config: RunConfig, costs: PlacedCosts, size: MessageBytes) -> float:
    """Return the busiest machine's or link's seconds in a step, plus those of one microbatch alone."""
    stages = range(config.pipeline.stages + 1)
    computing = [sum(costs.compute(kind, stage, 1) for kind in ("forward", "backward")) for stage in stages]
    computing[0] += sum(costs.compute(kind, 0, 0) for kind in ("forward", "backward"))
    hops = [(stage, (stage + 1) % len(stages)) for stage in stages]
    there = [costs.transmit(a, b, size.forward) for a, b in hops]
    back = [costs.transmit(b, a, size.backward) for a, b in hops]
    inbound = [there[stage - 1] + back[stage] for stage in stages]
    links = inbound if costs.network.inbound == "shared" else [*there, *back]
    return (config.pipeline.microbatches - 1) * max(*computing, *links) + sum(computing) + sum(there) + sum(back)


def _placed(config: RunConfig, topology: Topology, machines: tuple[Node, ...]) -> Iterator[Strategy]:
    """Yield the pipeline on these machines with each choice of microbatches."""
    for candidate in candidates(config, config.pipeline.wire):
        costs = PlacedCosts(candidate.network, topology=topology, machines=machines)
        size = message_bytes(candidate.model, candidate.pipeline)
        step_s = simulate(ResolvedRun(candidate).training(0), costs, size).step_s
        peak, obstacle = peak_of_stages(candidate, machines)
        name = f"pipeline, {flag_text(candidate.pipeline.wire)}"
        yield Strategy(name, machines, step_s, peak, obstacle, candidate, sends=True)
