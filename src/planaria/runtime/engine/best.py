"""Settings that say 'best' for what the recipe's own prices determine, as numbers."""

from __future__ import annotations

import math

from planaria.config.options import Options
from planaria.config.schema import RunConfig
from planaria.pipeline.network.costs import FP32_BYTES, Costs, message_bytes
from planaria.recovery import RECOVERIES, names
from planaria.recovery.base import Machines, numel
from planaria.runtime.engine.copy_costs import shapes_of
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.simulate import simulate


def settle(config: RunConfig) -> RunConfig:
    """The recipe with numbers for what its recovery strategies call 'best'.

    :raises UserError: when a strategy's option is wrong, or nothing is best for such a recipe.
    """
    chosen = RECOVERIES.make_all(names(config.recovery), config.recovery.options)
    if not any(strategy.open for strategy in chosen.values()):
        return config
    alone = config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": 1})})
    size = message_bytes(config.model, config.pipeline)
    step_s = simulate(ResolvedRun(alone).training(0), Costs(config.network), size).step_s
    stages = range(config.pipeline.stages + 1)
    largest = max(3 * FP32_BYTES * numel(shapes_of(config, stage)) for stage in stages)
    network = config.network
    bandwidth = network.bandwidth or math.inf
    at = Machines(len(stages), step_s, largest, bandwidth, network.memory_bandwidth, network.hourly)
    found = {name: value for strategy in chosen.values() for name, value in strategy.settled(at).items()}
    recovery = config.recovery.model_copy(update={"options": Options({**config.recovery.options, **found})})
    return config.model_copy(update={"recovery": recovery})
