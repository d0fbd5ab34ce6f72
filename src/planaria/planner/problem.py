"""The planning problem as arrays (nodes, links, stages, route rules), and its solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import MessageCosts, message_bytes
from planaria.pipeline.network.topology import Topology
from planaria.pipeline.plan.actions import Route
from planaria.pipeline.routing.skipping import cc3_violation, visits_per_microbatch
from planaria.planner.tables import NO_SUMS, CostTables, Ints, round_trip

ENTRY, BLOCK, RETURN = range(3)
"""rows of :class:`PlanningProblem`'s ``forward`` and ``backward``: visits to the origin, and visits between them"""
ROLES = ("any", "data", "worker")
NO_LATENCY: Ints = np.zeros((0, 0), np.int64)
NO_SAVING: Ints = np.zeros((0, 0), np.int64)
GRADIENT_BYTES = 4
"""bytes of each parameter's gradient in a sum, as the fleet sends it"""
LONGEST_S = 1e6
"""longest pass or message, seconds, that is still exact in whole nanoseconds"""


@dataclass(frozen=True)
class PlanningProblem:
    """Sizes, rules and times of a planning problem. Times are nanoseconds; node n is column n."""

    names: tuple[str, ...]
    sites: tuple[str, ...]
    site: Ints
    """[nodes]: index into ``sites``"""
    sizes: tuple[int, ...]
    """nodes of each stage 0..S; the nodes of stage 0 are the data nodes"""
    microbatches: int
    """microbatches that start at each data node"""
    visits: int
    """block stages on each route"""
    swaps: int
    jump: int
    forward: Ints
    backward: Ints
    link: Ints
    """[sites, sites]: time from sending a message to its arrival"""
    transmit: Ints
    """[sites, sites]: time for which a message occupies its link; all 0 if messages never queue"""
    slots: Ints
    role: Ints
    """index into ``ROLES``"""
    additional_microbatches: int = 0
    """data nodes at which one additional microbatch starts"""
    sums: Ints = field(default_factory=lambda: NO_SUMS)
    """[2, sites, sites]: time of a message with all gradients of an ends node, and of a block-stage node; empty if a
    step ends with its passes"""
    latency: Ints = field(default_factory=lambda: NO_LATENCY)
    """[sites, sites]: part of ``link`` that does not depend on the message's size; schedules omit it; empty: none"""
    saving: Ints = field(default_factory=lambda: NO_SAVING)
    """[sites, sites]: time that a gradient takes less than ``link`` and ``transmit``, which are those of an activation;
    empty: none"""

    @property
    def nodes(self) -> int:
        return len(self.names)

    @property
    def count(self) -> int:
        """Microbatches in one step."""
        return self.sizes[0] * self.microbatches + self.additional_microbatches

    @property
    def work(self) -> int:
        """Cost of simulating a plan once, in visits of microbatches."""
        return self.count * (self.visits + 2) + self.summed * sum(size**2 for size in self.sizes)

    @property
    def summed(self) -> bool:
        """True if a step ends only when all nodes have their stage's gradient sum."""
        return bool(self.sums.size)

    @property
    def link_back(self) -> Ints:
        """[sites, sites]: time from sending a gradient to its arrival."""
        return self.link - self.saving if self.saving.size else self.link

    @property
    def transmit_back(self) -> Ints:
        """[sites, sites]: time for which a gradient occupies its link."""
        return self.transmit - self.saving if self.saving.size and self.transmit.any() else self.transmit

    @property
    def round_trips(self) -> Ints:
        """[sites, sites]: time of an activation to the other site and of its gradient back."""
        return self.link + self.link_back.T

    @property
    def passes(self) -> Ints:
        """[3, nodes]: forward plus backward."""
        return self.forward + self.backward

    @property
    def tables(self) -> CostTables:
        arrays = {name: getattr(self, name) for name in CostTables._fields}
        return CostTables(**arrays | {"sizes": np.array(self.sizes, np.int64)})

    @property
    def prices(self) -> PlannedPrices:
        return PlannedPrices(self)

    @property
    def memory(self) -> dict[int, int]:
        """Slots by node, as a step plan expects them."""
        return dict(enumerate(self.slots.tolist()))


class Solution(NamedTuple):
    """An arrangement of nodes into stages, and a route for each microbatch."""

    stage: Ints
    """[nodes]: the stage that each node holds"""
    origin: Ints
    """[count]: the data node of each microbatch; its own microbatches start in this order"""
    path: Ints
    """[count, visits]: the other nodes on its route"""

    @property
    def routes(self) -> list[Route]:
        return [(o, *walk, o) for o, walk in zip(self.origin.tolist(), self.path.tolist(), strict=True)]

    def members(self, stage: int) -> list[int]:
        """Return the nodes of a stage."""
        nodes: list[int] = np.flatnonzero(self.stage == stage).tolist()
        return nodes

    def copy(self) -> Solution:
        return Solution(*(array.copy() for array in self))


class PlannedPrices(MessageCosts):
    """A problem's times in the interface of the simulated clock."""

    def __init__(self, problem: PlanningProblem) -> None:
        last = problem.visits + 1
        times = {"forward": problem.forward.tolist(), "backward": problem.backward.tolist()}
        site = problem.site.tolist()
        link = {"forward": problem.link.tolist(), "backward": problem.link_back.tolist()}
        transmit = {"forward": problem.transmit.tolist(), "backward": problem.transmit_back.tolist()}
        shared = bool(problem.transmit.any())
        self.compute = lambda kind, node, hop: times[kind][ENTRY if hop == 0 else RETURN if hop == last else BLOCK][
            node
        ]
        self.shadow = lambda kind, node, hop: 0
        self.transmit = lambda a, b, kind: transmit[kind][site[a]][site[b]] if shared else 0
        self.carry = lambda a, b, kind: link[kind][site[a]][site[b]]


def stage_of(stages: Sequence[Sequence[int]], nodes: int) -> Ints:
    """Return [nodes]: the stage of each node, given the nodes of each stage."""
    stage = np.zeros(nodes, np.int64)
    for s, members in enumerate(stages):
        stage[list(members)] = s
    return stage


def problem_of(config: RunConfig, topology: Topology) -> PlanningProblem:
    """Return the planning problem of a recipe on the nodes of a topology.

    :raises UserError: when nodes, stages, microbatches or costs are inconsistent.
    """
    _require_feasible(config, topology)
    pipeline, routing, nodes = config.pipeline, config.routing, topology.nodes
    data_nodes, stages, sizes = routing.data_nodes, pipeline.stages, message_bytes(config.model, pipeline)
    if topology.path_network is not None:  # paths are chosen for messages of one size
        sizes = MessageBytes.both(sizes.larger)
    sites = tuple(dict.fromkeys(node.site for node in nodes))
    link, transmit, back = (
        np.array([[_nanoseconds(time(a, b, size)) for b in sites] for a in sites], np.int64)
        for time, size in (
            (topology.carry_s, sizes.forward),
            (topology.transmit_s, sizes.forward),
            (topology.transmit_s, sizes.backward),
        )
    )
    return PlanningProblem(
        names=tuple(node.name for node in nodes),
        sites=sites,
        site=np.array([sites.index(node.site) for node in nodes], np.int64),
        sizes=(data_nodes, *_split_evenly(len(nodes) - data_nodes, stages)),
        microbatches=pipeline.microbatches // data_nodes,
        visits=visits_per_microbatch(stages, routing.skip),
        swaps=routing.swaps,
        jump=routing.max_jump,
        forward=_pass_times(config, topology, "forward"),
        backward=_pass_times(config, topology, "backward"),
        link=link,
        transmit=transmit * topology.queueing,
        slots=np.array([node.memory for node in nodes], np.int64),
        role=np.array([ROLES.index(node.role) for node in nodes], np.int64),
        sums=_sum_times(config, topology, sites) if routing.wait_for_gradient_sums else NO_SUMS,
        latency=np.array([[_nanoseconds(topology.latency_s(a, b)) for b in sites] for a in sites], np.int64),
        saving=NO_SAVING if sizes.forward == sizes.backward else transmit - back,
    )


def _sum_times(config: RunConfig, topology: Topology, sites: Sequence[str]) -> Ints:
    """:raises UserError: when a message of gradients takes too long."""
    from planaria.models.families import stage_parameters  # needs torch

    tables = []
    for description, stage in (("ends", 0), ("block stage's", 1)):
        size = GRADIENT_BYTES * stage_parameters(config.model, config.pipeline.stages, stage)
        for a, b in product(sites, repeat=2):
            if (seconds := topology.carry_s(a, b, size)) > LONGEST_S:
                raise UserError(
                    f"routing.wait_for_gradient_sums: {a} - {b}: the {description} gradients, {size} bytes, take "
                    f"{seconds:.3g} s, more than "
                    f"{LONGEST_S:g} s; raise the link's bandwidth, or remove routing.wait_for_gradient_sums"
                )
        tables.append([[_nanoseconds(topology.carry_s(a, b, size)) for b in sites] for a in sites])
    return np.array(tables, np.int64)


def _require_feasible(config: RunConfig, topology: Topology) -> None:
    """:raises UserError: on too few nodes, indivisible microbatches, impossible roles or a link that is too slow."""
    pipeline, nodes, data_nodes = config.pipeline, topology.nodes, config.routing.data_nodes
    if len(nodes) - data_nodes < pipeline.stages:
        raise UserError(
            f"network.topology: {len(nodes)} nodes, {data_nodes} of them data nodes (routing.data_nodes), are too few "
            f"for pipeline.stages = {pipeline.stages}; add nodes"
        )
    if pipeline.microbatches % data_nodes:
        raise UserError(
            f"pipeline.microbatches = {pipeline.microbatches} does not divide into routing.data_nodes = {data_nodes}"
        )
    roles = [node.role for node in nodes]
    if roles.count("data") > data_nodes or len(nodes) - roles.count("worker") < data_nodes:
        raise UserError(
            f"routing.data_nodes = {data_nodes}: of the topology's nodes, {roles.count('data')} must be data nodes and "
            f"{roles.count('worker')} must not; change the roles"
        )
    size = message_bytes(config.model, pipeline).larger
    for a, b in product(dict.fromkeys(node.site for node in nodes), repeat=2):
        if (seconds := topology.carry_s(a, b, size)) > LONGEST_S:
            raise UserError(
                f"network.topology: {a} - {b}: a microbatch's {size} bytes take {seconds:.3g} s, more than "
                f"{LONGEST_S:g} s; raise the link's bandwidth, or lower its latency or network.link_time_scale"
            )


def by_centrality(problem: PlanningProblem, solution: Solution, stage: int) -> list[int]:
    """Return the nodes of a stage, ordered by how soon each could sum all gradients of the stage and send them back."""
    carry = problem.sums[min(stage, 1)] if problem.summed else problem.link
    nodes = np.flatnonzero(solution.stage == stage)
    return sorted(nodes.tolist(), key=lambda hub: (round_trip(carry, problem.site, nodes, hub), hub))


def order_violation(problem: PlanningProblem, solution: Solution, microbatch: int) -> str:
    """Return how a microbatch's route violates CC3, or an empty string if it does not."""
    return cc3_violation(solution.stage[solution.path[microbatch]].tolist(), problem.swaps, problem.jump)


def _pass_times(config: RunConfig, topology: Topology, kind: str) -> Ints:
    network = config.network
    stage_times: list[float] = getattr(network, f"{kind}_s")
    if config.pipeline.has_uneven_stages:
        raise UserError(
            f"pipeline.layers = {config.pipeline.cut}: a planner puts any node into any block stage, so "
            "they must cost the same; remove it, and set the nodes' speed in the topology"
        )
    if len(set(stage_times[1:])) > 1:
        raise UserError(
            f"network.{kind}_s: a planner puts any node into any block stage, so they must cost the same; set one "
            "number for stages 1..S, and set the nodes' speed in the topology"
        )
    entry = network.entry_forward_s if kind == "forward" else network.entry_backward_s
    slowest = min(node.speed for node in topology.nodes)
    if (seconds := max(entry, *stage_times, 0.0, 0.0) / slowest) > LONGEST_S:
        raise UserError(
            f"network.{kind}_s: a microbatch takes {seconds:.3g} s on the slowest node, more than {LONGEST_S:g} s; "
            "lower it, or raise the node's speed"
        )
    rows = [entry, stage_times[-1] if stage_times else 0.0, stage_times[0] if stage_times else 0.0]
    return np.array([[_nanoseconds(seconds / node.speed) for node in topology.nodes] for seconds in rows], np.int64)


def _split_evenly(whole: int, count: int) -> Sequence[int]:
    return [whole // count + (index < whole % count) for index in range(count)]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
