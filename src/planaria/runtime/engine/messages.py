"""What compressed messages need of a run, and of the one that it goes on with."""

from __future__ import annotations

import math
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange import exchange
from planaria.exchange.aggregate import Averaging
from planaria.exchange.compress.sparse import Sparse
from planaria.exchange.compression import Compression
from planaria.models.families import stage_parameters


def compression_in(config: ExchangeConfig) -> Compression | None:
    """How messages are made shorter; None where nothing is lost of them, or nothing said."""
    made = exchange(config) if config.replicas > 1 else None
    return None if not isinstance(made, Averaging) or made.compression.exact else made.compression


def require_messages(config: RunConfig) -> None:
    """:raises UserError: when messages cannot be made shorter as the recipe says, at some stage or on its routes."""
    compression = compression_in(config.exchange)
    if compression is None:
        return
    if config.routing.mixed:
        raise UserError(
            "routing.mixed = true beside shorter messages (exchange.compress, or bits): a debt or an estimate is of a "
            "replica's own samples, and mixed routes pass those of others; leave one of them out"
        )
    if not isinstance(compression.compressor, Sparse):
        return
    keep = compression.compressor.keep
    for stage in range(config.pipeline.stages + 1):
        count = stage_parameters(config.model, config.pipeline.stages, stage)
        if keep * count < 1.0 - 1e-9:
            digits = 2 + math.floor(math.log10(count))
            least = math.ceil(10**digits / count) / 10**digits
            raise UserError(
                f"exchange.compress.keep = {keep:g}: of the {count:,} numbers of stage {stage} less than one would be "
                f"sent; give {least:g} or more"
            )


def require_same_debts(before: RunConfig, config: RunConfig, folder: Path) -> None:
    """What replicas owe each other, and know of each other, goes by one compressor and one feedback. As many replicas
    of the same exchange go on with it, so they go on with these too.

    :raises UserError: when the run in ``folder`` is to go on with others.
    """
    old, new = before.exchange, config.exchange
    if (old.replicas, old.kind) != (new.replicas, new.kind):
        return
    was = compression_in(old)
    if was is not None and was.parts and was != compression_in(new):
        raise UserError(
            f"{folder}: {_said(new)} (was {_said(old)}): what its replicas owe each other is of the old one; leave "
            f"that as it was, or begin a run with its weights: --train.start {folder}"
        )


def _said(config: ExchangeConfig) -> str:
    if config.compress:
        return f"exchange.compress = {config.compress!r}"
    return f"exchange.options.bits = {config.options.get('bits', 32)}"
