"""Validation of updates: size, dtype, codec and finite numbers.

Members reject invalid updates before they aggregate, so that no rule needs to check again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from planaria.exchange.base import Counted, Exchange, Offer, Offers, Outer, Told, TooManyLiars
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.dense import PLAIN


class Judged(NamedTuple):
    """The valid updates of a round and the exchange that combines them."""

    rule: Exchange
    offers: dict[int, Offer]
    """by replica"""
    refused: dict[int, str]
    """replica whose update is invalid → the reason"""


def _nobody(counted: Counted) -> None:
    """Ignore the weights."""


def judge(
    rule: Exchange,
    outer: Outer,
    offers: Offers,
    like: Offer,
    told: Told = _nobody,
    left_out: Mapping[int, str] = MappingProxyType({}),
) -> Judged:
    """Return the valid ones of ``offers`` in the round after ``outer``, and the exchange for them.

    :param told: as in :meth:`~planaria.exchange.base.Exchange.facing`.
    :param left_out: members to reject, with the reason.
    :raises TooManyLiars: if more updates are invalid than the exchange tolerates, with replicas and reasons.
    """
    wrong = {**refused(offers, like, rule.codec(outer)), **left_out}
    if len(wrong) > rule.borne:
        said = "; ".join(f"what replica {member} says is of no use: {why}" for member, why in sorted(wrong.items()))
        bears = f" (exchange.robust bears {rule.borne})" if rule.borne else ""
        raise TooManyLiars(said + bears)
    sound = {member: offer for member, offer in offers.items() if member not in wrong}
    return Judged(rule.facing(len(wrong), told), sound, wrong)


def refused(offers: Offers, like: Offer, codec: Compressor) -> dict[int, str]:
    """Return members with an invalid update and the reason; ``like`` is valid, ``codec`` encodes blocking parts."""
    found = {}
    for member, offer in offers.items():
        wrong = flaw("prefetched", offer.prefetched, like.prefetched, PLAIN)
        if wrong := wrong or flaw("blocking", offer.blocking, like.blocking, codec):
            found[member] = wrong
    return found


def flaw(name: str, part: Tensor | None, like: Tensor | None, codec: Compressor) -> str:
    """Return why this part of an update is invalid, or an empty string."""
    if part is None or like is None:
        wrong = "" if part is like else "missing" if part is None else "not expected"
    else:
        wrong = codec.flaw(part, like)
    return wrong and f"its {name} part: {wrong}"
