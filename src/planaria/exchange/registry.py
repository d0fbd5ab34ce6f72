"""Registry of exchanges, and the exchange that a recipe configures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from planaria.common.errors import UserError
from planaria.config.registry import Choice, Registry, blame_custom_code, custom_choices
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.allreduce import AllReduce, NoExchange
from planaria.exchange.base import Exchange
from planaria.exchange.coded.schemes import make_coded_schedule
from planaria.exchange.compress.compression import make_compression
from planaria.exchange.decoupled import Decoupled
from planaria.exchange.diloco import DiLoCo
from planaria.exchange.eager import Eager
from planaria.exchange.gasloc import Gasloc
from planaria.exchange.gossip import PairMean
from planaria.exchange.monna import MoNNA
from planaria.exchange.noloco import NoLoCo
from planaria.exchange.robust.rules import make_robust_aggregator
from planaria.exchange.streaming_diloco import Streaming

EXCHANGES: Registry[Exchange] = Registry(
    "exchange",
    "exchange.kind",
    Exchange,  # type: ignore[type-abstract]
    {
        "allreduce": AllReduce,
        "local": NoExchange,
        "diloco": DiLoCo,
        "streaming_diloco": Streaming,
        "decoupled": Decoupled,
        "eager": Eager,
        "noloco": NoLoCo,
        "pair_mean": PairMean,
        "gasloc": Gasloc,
        "monna": MoNNA,
    },
)


@lru_cache
def make_exchange(config: ExchangeConfig) -> Exchange:
    """Return the configured exchange; cached.

    :raises UserError: for an unknown kind or option, or an invalid value.
    """
    rule = EXCHANGES.make(config.kind, config.options)
    if config.compress:
        if not isinstance(rule, AggregatingExchange):
            raise UserError(f"exchange.compress: {config.kind!r} has no messages to compress; remove it")
        rule = rule.with_compression(make_compression(config.compress))
        if config.has_several_replicas and (
            wrong := rule.compression.feedback.why_members_unsupported(config.replicas)
        ):
            raise UserError(f"exchange.compress: {wrong}")
    if config.robust:
        if not isinstance(rule, AggregatingExchange):
            raise UserError(f"exchange.robust: {config.kind!r} does not aggregate several values; remove it")
        rule = rule.with_rule(make_robust_aggregator(config.robust, config.replicas), config.replicas)
    with blame_custom_code(lambda: custom_choices([type(rule)])):
        every, overlap = rule.interval, rule.overlap
        if config.has_several_replicas and (wrong := rule.why_unsupported(config.replicas)):
            raise UserError(f"exchange.kind = {config.kind!r}: {wrong}")
        if every is not None and (not isinstance(every, int) or every < 0):
            raise UserError(
                f"exchange.kind = {config.kind!r}: interval is {every!r}; it must be a number of steps, or None"
            )
        if rule.decoupled and not (overlap and rule.synchronised):
            raise UserError(
                f"exchange.kind = {config.kind!r}: a decoupled exchange needs an overlap, and synchronised = True"
            )
        if overlap and not 0 < overlap < (every or 0):
            raise UserError(
                f"exchange.kind = {config.kind!r}: overlap is {overlap}; it must be below interval = {every}"
            )
    return rule


def too_few_steps(config: RunConfig) -> str:
    """Return a line about weights without a round of the exchange because ``train.steps`` is too low; empty if all
    have one.

    :raises UserError: as :func:`make_exchange`.
    """
    settings, steps, rule = config.exchange, config.train.steps, make_exchange(config.exchange)
    if settings.replicas == 1 or not rule.interval:
        return ""
    between = min(settings.steps_between_rounds, default=rule.interval)
    if steps >= between * rule.cycle:
        return ""
    if settings.steps_between_rounds:
        needed = f"exchange.steps_between_rounds = {list(settings.steps_between_rounds)}"
    elif getattr(rule, "every", None) == rule.interval * rule.cycle:
        needed = f"exchange.options.every = {rule.interval * rule.cycle}"
    else:
        needed = f"rounds every {rule.interval} steps"
    if steps >= between:
        return f"rounds of only {steps // between} of {rule.cycle} fragments: {needed}, train.steps = {steps}"
    return f"no round of the exchange: {needed}, train.steps = {steps}"


def chosen_classes(config: ExchangeConfig) -> Iterator[type[Choice]]:
    """Yield the classes that ``[exchange]`` selects: kind, compressor and feedback, robust rule, coding scheme."""
    yield EXCHANGES.find(config.kind)
    if config.compress:
        compression = make_compression(config.compress)
        yield from (type(compression.compressor), type(compression.feedback))
    if config.robust:
        yield type(make_robust_aggregator(config.robust, config.replicas).rule)
    if config.coded:
        yield type(make_coded_schedule(config.coded, config.replicas).scheme)
