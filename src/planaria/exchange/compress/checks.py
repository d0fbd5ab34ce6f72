"""Checks of a run's compression against its stages, its routing, and the run that it resumes."""

from __future__ import annotations

import math
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.compress.compression import Compression
from planaria.exchange.compress.sparse import ChunkedTopK
from planaria.exchange.registry import make_exchange
from planaria.models.families import stage_parameters


def compression_in(config: ExchangeConfig) -> Compression | None:
    """Return the lossy compression of messages, or None if there is none."""
    rule = make_exchange(config) if config.has_several_replicas else None
    return None if not isinstance(rule, AggregatingExchange) or rule.compression.exact else rule.compression


def require_messages(config: RunConfig) -> None:
    """Check that the compression supports every stage and the routing; UserError if not."""
    compression = compression_in(config.exchange)
    if compression is None:
        return
    if config.routing.mixed:
        raise UserError(
            "routing.mixed = true cannot be combined with compressed messages (exchange.compress, or bits): error "
            "feedback belongs to one replica, and mixed routes pass the samples of others; remove one of them"
        )
    if not isinstance(compression.compressor, ChunkedTopK):
        return
    keep = compression.compressor.keep
    for stage in range(config.pipeline.stages + 1):
        count = stage_parameters(config.model, config.pipeline.stages, stage)
        if keep * count < 1.0 - 1e-9:
            digits = 2 + math.floor(math.log10(count))
            minimum = math.ceil(10**digits / count) / 10**digits
            raise UserError(
                f"exchange.compress.keep = {keep:g}: keeps less than one of the {count:,} numbers of stage "
                f"{stage}; set it to {minimum:g} or more"
            )


def require_same_feedback(before: RunConfig, config: RunConfig, folder: Path) -> None:
    """Require the same compressor and feedback if the replicas and their exchange stay the same.

    :raises UserError: if the changed settings of the run in ``folder`` differ in these.
    """
    old, new = before.exchange, config.exchange
    if (old.replicas, old.kind) != (new.replicas, new.kind):
        return
    was = compression_in(old)
    if was is not None and was.parts and was != compression_in(new):
        raise UserError(
            f"{folder}: {_compression_setting(new)} (was {_compression_setting(old)}): the replicas' error feedback "
            f"belongs to the old compressor; restore the setting, or start a run with its weights: "
            f"--train.start {folder}"
        )


def _compression_setting(config: ExchangeConfig) -> str:
    if config.compress:
        return f"exchange.compress = {config.compress!r}"
    return f"exchange.options.bits = {config.options.get('bits', 32)}"
