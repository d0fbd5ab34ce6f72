"""Strategies to train a recipe on the machines of a topology: one machine, a pipeline with each codec, or replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.network_config import NetworkConfig
from planaria.config.schema import RunConfig
from planaria.exchange.registry import make_exchange
from planaria.lab.commands.advise_wire import microbatch_sizes, with_wire
from planaria.lab.commands.machine_pipelines import has_fixed_stages, layout_flags, pipelines
from planaria.lab.commands.placed_strategy import (
    Strategy,
    accepted,
    best,
    first_fit,
    in_one_process,
    local_wire,
    peak_of_all,
    why_rejected,
)
from planaria.pipeline.network.topology import Node, Topology
from planaria.report.phrases import format_count
from planaria.runtime.prediction.preflight_table import stated_step_s
from planaria.runtime.prediction.traffic import exchange_costs, one_replica
from planaria.runtime.resolved_run import ResolvedRun

MAX_MACHINES = 7
"""maximum in a household: every order of them is weighed"""
EVERY = "exchange.options.every"
EMULATION = ("emulate", "straggle_probability", "straggle_factor", "straggle_s")
"""settings of ``network`` that have no effect on real machines"""
EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {"exchange.kind": "allreduce"},
    "diloco, every 50": {"exchange.kind": "diloco", EVERY: 50},
    "noloco, every 50": {"exchange.kind": "noloco", EVERY: 50},
}


def weigh_machines(config: RunConfig, topology: Topology) -> list[Strategy]:
    """Return all strategies: those that fit first, each sorted by the time of a step.

    :raises UserError: if there are too many machines.
    """
    if len(topology.nodes) > MAX_MACHINES:
        raise UserError(
            f"network.topology: {len(topology.nodes)} nodes; advice weighs every order of at most {MAX_MACHINES}: "
            "remove some, or use `planaria plan`"
        )
    single = _one_replica_with_all_samples(config)
    found = [
        *(_alone(single, machine) for machine in topology.nodes if machine.role == "any"),
        *pipelines(single, topology),
        *_replicas(single, topology),
    ]
    return sorted(found, key=lambda strategy: (bool(strategy.obstacle), strategy.step_s))


def _one_replica_with_all_samples(config: RunConfig) -> RunConfig:
    """Return the recipe with one replica on real links and machines."""
    microbatches = config.pipeline.microbatches * config.exchange.replicas
    flags = {"engine": "fleet", "exchange.max_replicas": None, "pipeline.microbatches": microbatches}
    real = NetworkConfig()
    emulation = {f"network.{name}": getattr(real, name) for name in EMULATION}
    return recipe.with_flags(one_replica(config), flags | emulation)


def not_weighed(config: RunConfig, topology: Topology, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Yield a line for each kind of strategy that these machines or the recipe exclude, with the reason and a fix."""
    for machine in topology.nodes:
        if machine.role != "any":
            yield (
                f"{machine.name} alone or as a replica: its role = {machine.role!r} excludes "
                f"{'block stages' if machine.role == 'data' else 'the ends'}; set role = 'any'"
            )
    if not any(strategy.is_pipeline for strategy in strategies):
        yield f"pipelines: {_why_no_pipeline(config, topology)}"
    whole = sum(machine.role == "any" for machine in topology.nodes)
    missing = [name for name in EXCHANGES if not any(s.name.endswith(f"replicas, {name}") for s in strategies)]
    if missing and whole < 2:
        yield f"replicas: {format_count(whole, 'machine')} with role = 'any'; at least 2 are required"
        return
    for name in missing:
        yield f"replicas, {name}: {_why_no_replicas(_one_replica_with_all_samples(config), name, whole)}"


def _why_no_replicas(config: RunConfig, name: str, machines: int) -> str:
    every, steps, samples = EXCHANGES[name].get(EVERY, 1), config.train.steps, config.pipeline.samples
    if every > steps:
        return f"train.steps = {steps} ends before the first exchange; set at least {every}"
    if all(samples % count for count in range(2, machines + 1)):
        per_step = f"{format_count(samples, 'sample')} per step"
        return f"{per_step}, which 2 to {machines} machines cannot share equally; change pipeline.microbatches"
    flags = {**EXCHANGES[name], "exchange.replicas": 2, "recovery.strategy": "checkpoint"}
    if why := why_rejected(config, flags):
        return f"{why} (change [exchange] of the recipe)"
    return "no microbatch size divides the samples of each replica; lower pipeline.microbatch_size"


def _why_no_pipeline(config: RunConfig, topology: Topology) -> str:
    nodes, wanted = topology.nodes, config.pipeline.stages + 1
    if len(nodes) < 2:
        return f"{format_count(len(nodes), 'machine')}, and each stage and the ends need one; add [[nodes]]"
    if all(node.role == "worker" for node in nodes):
        return f"no machine may hold the ends: all {len(nodes)} have role = 'worker'; set role = 'any' of one"
    if all(node.role == "data" for node in nodes):
        return f"no machine may hold block stages: all {len(nodes)} have role = 'data'; set role = 'any' of one"
    if has_fixed_stages(config) and wanted > len(nodes):
        return (
            f"the recipe's {wanted - 1} block stages cost differently and, with the ends, need {wanted} machines; "
            f"there are {len(nodes)}: give all block stages one cost in network.forward_s and backward_s, without "
            "pipeline.layers and routing.kind, or add [[nodes]]"
        )
    return (
        f"no assignment of stages to these {len(nodes)} machines suits their roles and the recipe; set role = 'any', "
        "or pipeline.stages to a number that divides model.layers"
    )


def _alone(config: RunConfig, machine: Node) -> Strategy:
    """Return training in one process on a machine, with the largest microbatches up to the recipe's that fit."""
    whole = recipe.with_flags(config, in_one_process(config))

    def options() -> Iterator[Strategy]:
        for sized in _microbatches(whole, config.pipeline.in_flight, 1):
            peak, obstacle = peak_of_all(sized, (machine,), 1)
            step_s = _passes_s(sized) / machine.speed
            yield Strategy(f"{machine.name} alone", (machine,), step_s, peak, obstacle, sized, sends=False)

    chosen = first_fit(options())
    assert chosen is not None
    return chosen


def _microbatches(config: RunConfig, *in_flight: int | None) -> Iterator[RunConfig]:
    """Yield the recipe with its microbatches, then smaller ones, with each limit of microbatches in flight."""
    own = config.pipeline.microbatch_size
    for size in sorted((size for size in microbatch_sizes(config) if size <= own), reverse=True):
        sized = with_wire(config, config.pipeline.wire, size)
        for limit in dict.fromkeys(in_flight):
            yield sized.model_copy(update={"pipeline": sized.pipeline.model_copy(update={"in_flight": limit})})


def _passes_s(config: RunConfig) -> float:
    """Return the seconds of all passes of one replica's step, one after another, at speed 1."""
    return stated_step_s(ResolvedRun(one_replica(config.model_copy(update={"engine": "inline"})))) or 0.0


def _replicas(config: RunConfig, topology: Topology) -> Iterator[Strategy]:
    """Yield replicas, one on each of the fastest machines, that divide the samples of a step; of each exchange the
    best number.
    """
    whole = [machine for machine in topology.nodes if machine.role == "any"]
    fastest = sorted(whole, key=lambda machine: -machine.speed)
    one_stage = (config.model.ends_layers, config.model.layers - config.model.ends_layers)
    base = (accepted(config, layout_flags(config, one_stage)) if config.routing.kind == "full" else None) or config
    base = recipe.with_flags(base, local_wire(base))
    for name, exchange in EXCHANGES.items():
        if exchange.get(EVERY, 1) <= config.train.steps:
            options = [
                option
                for count in range(2, len(fastest) + 1)
                if (option := first_fit(_replicated(base, topology, fastest[:count], name, exchange)))
            ]
            if chosen := best(options):
                yield chosen


def _replicated(
    base: RunConfig, topology: Topology, machines: Sequence[Node], name: str, exchange: Mapping[str, object]
) -> Iterator[Strategy]:
    """Yield one replica on each machine, in the processes of its stages, with the microbatches to try."""
    count, slowest = len(machines), min(machine.speed for machine in machines)
    admits = exchange["exchange.kind"] != "allreduce"  # which admits microbatches by another rule
    for sized in _microbatches(base, 1 if admits else None):
        share, rest = divmod(sized.pipeline.microbatches, count)
        flags = {**exchange, "exchange.replicas": count, "pipeline.microbatches": share}
        if rest or (divided := accepted(sized, flags)) is None:
            continue
        step_s = _passes_s(divided) / slowest + _meeting_s(divided, topology, machines)
        peak, obstacle = peak_of_all(divided, machines, divided.pipeline.stages + 1)
        yield Strategy(f"{count} replicas, {name}", tuple(machines), step_s, peak, obstacle, divided, sends=True)


def _meeting_s(config: RunConfig, topology: Topology, machines: Sequence[Node]) -> float:
    """Return the seconds of a step in which replicas wait for updates of all stages over their slowest link."""
    sent = round(sum(cost.critical for cost in exchange_costs(config)))
    sites = [(a.site, b.site) for a, b in permutations(machines, 2)]
    return max(topology.carry_s(a, b, sent) for a, b in sites) / (make_exchange(config.exchange).interval or 1)
