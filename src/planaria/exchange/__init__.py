"""How replicas of a stage agree: a registry of exchanges, each one file."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from planaria.config import ExchangeConfig
from planaria.errors import UserError, nearest
from planaria.exchange.aggregate import aggregator
from planaria.exchange.allreduce import AllReduce
from planaria.exchange.base import Exchange
from planaria.exchange.diloco import DiLoCo
from planaria.exchange.gasloc import Gasloc
from planaria.exchange.local import Local
from planaria.exchange.noloco import NoLoCo
from planaria.exchange.pair_mean import PairMean
from planaria.exchange.streaming import Streaming

EXCHANGES: dict[str, Callable[[ExchangeConfig], Exchange]] = {
    "allreduce": AllReduce.from_config,
    "local": Local.from_config,
    "diloco": DiLoCo.from_config,
    "streaming_diloco": Streaming.from_config,
    "noloco": NoLoCo.from_config,
    "pair_mean": PairMean.from_config,
    "gasloc": Gasloc.from_config,
}


@lru_cache
def exchange(config: ExchangeConfig) -> Exchange:
    """The exchange that the recipe names; UserError names the nearest known one, or says which setting cannot work.

    Made once: whoever leads replicas asks at every turn.
    """
    if config.kind not in EXCHANGES:
        raise UserError(f"exchange.kind = {config.kind!r}: no such exchange; {nearest(config.kind, EXCHANGES)}")
    aggregator(config)
    if config.every == 0 and config.kind not in ("allreduce", "local"):
        raise UserError(
            f"exchange.every = 0 with exchange.kind = {config.kind!r}: every step's gradients are averaged by "
            "'allreduce'; give 1 or more inner steps"
        )
    return EXCHANGES[config.kind](config)
