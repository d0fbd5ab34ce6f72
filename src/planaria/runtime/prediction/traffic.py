"""Bytes that a run sends while nothing fails: between stages in a step, and between replicas in a round."""

from __future__ import annotations

from planaria.config.schema import RunConfig
from planaria.exchange.base import ExchangeCost
from planaria.exchange.registry import make_exchange
from planaria.pipeline.network.costs import UNIT, message_bytes
from planaria.runtime.prediction.copy_costs import shapes_of
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.resolved_run import ResolvedRun


def one_replica(config: RunConfig) -> RunConfig:
    """Return the same run with one replica: some exchanges plan the steps of all replicas, others of one."""
    alone = config.exchange.model_copy(update={"replicas": 1, "robust": ""})
    return config.model_copy(update={"exchange": alone})


def link_bytes(config: RunConfig) -> dict[tuple[int, int], int]:
    """Return sender and receiver → bytes of activations and gradients that one replica sends in its first step."""
    plan = ResolvedRun(one_replica(config)).training(0)
    return dict(simulate(plan, UNIT, message_bytes(config.model, config.pipeline)).sent_bytes)


def exchange_costs(config: RunConfig) -> list[ExchangeCost]:
    """Return the cost of one round for one replica, stage by stage; empty for one replica."""
    replicas, stages = config.exchange.replicas, range(config.pipeline.stages + 1)
    agreed = make_exchange(config.exchange)
    return [agreed.cost(shapes_of(config, stage), replicas) for stage in stages] if replicas > 1 else []
