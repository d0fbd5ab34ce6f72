"""A configuration resolved once: its recovery strategies, its exchange, and the plan of each step.

The plan gives the route and cost of each microbatch, from routing and replicas or from a schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from planaria.config.schema import RunConfig
from planaria.exchange.base import Exchange
from planaria.exchange.registry import make_exchange
from planaria.pipeline.network.costs import Costs, MessageCosts, message_bytes
from planaria.pipeline.plan.actions import Route, StepPlan
from planaria.pipeline.plan.build import build_plan, compile_plan, plan_routes
from planaria.pipeline.routing import routes, skip_stages
from planaria.pipeline.routing.arrangement import Arrangement, mix_routes, replicate_nodes, replicate_routes
from planaria.planner.schedule import Schedule, read
from planaria.recovery import make_chain
from planaria.recovery.chain import Chain

PLAN_CACHE_SIZE = 64
"""plans that are cached, since routes repeat"""


class ResolvedRun:
    """A resolved configuration. Immutable, and equal in every worker of a run and in both engines."""

    def __init__(self, config: RunConfig, together: bool | None = None) -> None:
        """Resolve ``config``.

        :param together: one process makes the steps of all replicas; by default, if routes lead from one to another.
        :raises UserError: if the configuration names a schedule that cannot be read.
        """
        self.config = config
        self._together = config.routing.mixed if together is None else together
        named = config.routing.schedule
        self.schedule: Schedule | None = None if named is None else read(Path(named))
        self._compiled = lru_cache(PLAN_CACHE_SIZE)(self._compile)
        self.routes = lru_cache(PLAN_CACHE_SIZE)(self._routes)
        """step → routes of a training step without absent nodes; UserError if the recipe's routing has none"""

    @cached_property
    def recovery(self) -> Chain:
        """The recovery strategies, in the order of trial; UserError if one is unknown or invalid."""
        return make_chain(self.config.recovery, self.config.pipeline.stages)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange between replicas; UserError if it is unknown or invalid."""
        return make_exchange(self.config.exchange)

    @cached_property
    def arrangement(self) -> Arrangement:
        """All nodes of the run."""
        if self.schedule is not None:
            return Arrangement(dict(enumerate(self.schedule.stages)))
        return replicate_nodes(self.max_replicas, self.config.pipeline.stages)

    @property
    def max_replicas(self) -> int:
        """The largest number of replicas, each with its own nodes."""
        grows = self.config.engine == "fleet" and not self._together
        return (self.config.exchange.max_replicas if grows else None) or self.config.exchange.replicas

    @property
    def replicas(self) -> int:
        """Replicas that step independently. Replicas that add up gradients in every step count as one."""
        together = self._together or self.exchange.exchanges_gradients
        return 1 if together else self.config.exchange.replicas

    @property
    def replicas_per_plan(self) -> int:
        """Replicas whose microbatches share a plan."""
        return self.config.exchange.replicas // self.replicas

    @property
    def lockstep(self) -> bool:
        """Whether replicas with different weights train in lockstep because microbatches cross replicas."""
        return self.replicas_per_plan > 1 and not self.exchange.exchanges_gradients

    @property
    def replicas_step_independently(self) -> bool:
        """Whether several replicas exist or may join, each with its own steps."""
        return self.replicas_per_plan == 1 and self.max_replicas > 1

    @property
    def block(self) -> int:
        """Samples in a step of one independent replica."""
        return self.config.samples // self.replicas

    def column(self, replica: int) -> Arrangement:
        """Return the nodes of an independent replica."""
        if not self.replicas_step_independently:
            return self.arrangement
        return Arrangement({s: [self.arrangement.nodes(s)[replica]] for s in self.arrangement.stages})

    def replica_of(self, node: int) -> int:
        """Return the independent replica of a node."""
        return next(r for r in range(self.max_replicas) if node in self.column(r).stage)

    def _routes(self, step: int) -> list[Route]:
        if self.schedule is not None:
            return [tuple(route) for route in self.schedule.routes]
        paths, count, stages = routes(self.config, step), self.max_replicas, self.config.pipeline.stages
        if self.config.routing.mixed:
            return mix_routes(paths, count, stages, self.config.seed, step)
        return replicate_routes(paths, count, stages)

    def training(
        self, step: int, absent: Collection[int] = (), detour: Sequence[Sequence[int]] = (), replica: int = 0
    ) -> StepPlan:
        """Return the plan of a replica's step without ``absent`` nodes; ``detour`` replaces a schedule's routes."""
        if self.schedule is not None:
            return self._compiled(tuple(map(tuple, detour or self.schedule.routes)), True)
        own = self.column(replica).stage
        walked = [route for route in self.routes(step) if route[0] in own]
        return self._compiled(tuple(skip_stages(walked, absent)), True)

    def plan_of_replica(self, step: int, replica: int, microbatches: Sequence[int]) -> StepPlan:
        """Return the plan of one replica's own passes of these microbatches (from 0) over its own nodes, for replicas
        that share a plan.
        """
        paths, stages = routes(self.config, step), self.arrangement.stages
        nodes = {stage: self.arrangement.nodes(stage)[replica] for stage in stages}
        walked = [tuple(nodes[stage] for stage in paths[microbatch % len(paths)]) for microbatch in microbatches]
        return self._compiled(tuple(walked), True)

    def validation(self, absent: Collection[int] = (), replica: int = 0) -> StepPlan:
        """Return the plan of a validation: every microbatch visits the first present node of every stage."""
        column = self.column(replica)
        present = column.of(column.stage.keys() - set(absent))
        return self._compiled((present.spine,) * self.config.train.eval_microbatches, False)

    def _compile(self, walked: tuple[Route, ...], train: bool) -> StepPlan:
        if train and self.schedule is not None:
            return compile_plan(walked, self.schedule.problem.memory, self.prices)
        if self.replicas_per_plan > 1:  # each replica limits admission itself
            return plan_routes(walked, self.config.pipeline.order, len(walked), train)
        return build_plan(self.config.pipeline, walked, train)

    @cached_property
    def prices(self) -> MessageCosts:
        """Costs of passes and messages at each node."""
        if self.schedule is not None:
            return self.schedule.problem.prices
        return MessageCosts(Costs(self.config.network), message_bytes(self.config.model, self.config.pipeline))

    def price_index(self, node: int) -> int:
        """Return the index of a node in the prices."""
        return node if self.schedule is not None else self.arrangement.stage[node]

    def link(self, source: int, target: int) -> tuple[float, float | None]:
        """Return latency (s) and bandwidth (bytes/s, or None if unlimited) between two nodes."""
        network = self.config.network
        if self.schedule is None:
            return network.latency_s, network.bandwidth
        taken, carried = (price(source, target, "forward") for price in (self.prices.transmit, self.prices.carry))
        size = message_bytes(self.config.model, self.config.pipeline).forward  # as planned
        return MessageCosts.seconds(carried - taken), size / MessageCosts.seconds(taken) if taken else None
