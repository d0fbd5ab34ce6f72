"""Validation of updates: size, dtype, codec and finite numbers.

Members reject invalid updates before they aggregate, so that no rule needs to check again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from planaria.exchange.base import (
    Exchange,
    OnWeights,
    StageOuterState,
    TooManyByzantine,
    Update,
    Updates,
    UpdateWeights,
)
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.dense import UNCOMPRESSED


class ValidUpdates(NamedTuple):
    """The valid updates of a round and the exchange that combines them."""

    rule: Exchange
    updates: dict[int, Update]
    """valid update of each replica"""
    rejected: dict[int, str]
    """replica whose update is invalid → why"""


def _ignore(weights: UpdateWeights) -> None:
    """Ignore the weights."""


def validate(
    rule: Exchange,
    outer: StageOuterState,
    updates: Updates,
    like: Update,
    on_weights: OnWeights = _ignore,
    left_out: Mapping[int, str] = MappingProxyType({}),
) -> ValidUpdates:
    """Return the valid ones of ``updates`` in the round after ``outer``, and the exchange for them.

    :param on_weights: as in :meth:`~planaria.exchange.base.Exchange.after_rejecting`.
    :param left_out: members to reject, with the reason.
    :raises TooManyByzantine: if more updates are invalid than the exchange tolerates, with replicas and reasons.
    """
    invalid = {**invalid_updates(updates, like, rule.codec(outer)), **left_out}
    if len(invalid) > rule.tolerated:
        reasons = (f"the update of replica {member} is invalid: {why}" for member, why in sorted(invalid.items()))
        limit = f" (exchange.robust tolerates {rule.tolerated})" if rule.tolerated else ""
        raise TooManyByzantine("; ".join(reasons) + limit)
    valid = {member: update for member, update in updates.items() if member not in invalid}
    return ValidUpdates(rule.after_rejecting(len(invalid), on_weights), valid, invalid)


def invalid_updates(updates: Updates, like: Update, codec: Compressor) -> dict[int, str]:
    """Return members with an invalid update and the reason; ``like`` is valid, ``codec`` encodes blocking parts."""
    reasons = {}
    for member, update in updates.items():
        reason = invalid_part_reason("prefetched", update.prefetched, like.prefetched, UNCOMPRESSED)
        if reason := reason or invalid_part_reason("blocking", update.blocking, like.blocking, codec):
            reasons[member] = reason
    return reasons


def invalid_part_reason(name: str, part: Tensor | None, like: Tensor | None, codec: Compressor) -> str:
    """Return why this part of an update is invalid, or an empty string if it is valid."""
    if part is None or like is None:
        reason = "" if part is like else "missing" if part is None else "not expected"
    else:
        reason = codec.invalid_reason(part, like)
    return reason and f"its {name} part: {reason}"
