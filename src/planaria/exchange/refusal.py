"""Which offers are of no use: of another size or type, no message of the round's codec, or with numbers that are none.

Who takes part in a round refuses them before anything is made of the others. No rule has to look for them again.
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
    """What a round goes by."""

    rule: Exchange
    offers: dict[int, Offer]
    """by replica, all sound"""
    refused: dict[int, str]
    """replica whose offer is of no use → what is wrong with it"""


def _nobody(counted: Counted) -> None:
    """Listens."""


def judge(
    rule: Exchange,
    outer: Outer,
    offers: Offers,
    like: Offer,
    told: Told = _nobody,
    left_out: Mapping[int, str] = MappingProxyType({}),
) -> Judged:
    """What is left of ``offers``, and the exchange for it, in the round after ``outer``; ``told`` as of
    :meth:`~planaria.exchange.base.Exchange.facing`. Those of ``left_out`` (member → why) are of no use to anybody.

    :raises TooManyLiars: when it bears none, or fewer, naming replicas and reasons.
    """
    wrong = {**refused(offers, like, rule.codec(outer)), **left_out}
    if len(wrong) > rule.borne:
        said = "; ".join(f"what replica {member} says is of no use: {why}" for member, why in sorted(wrong.items()))
        bears = f" (exchange.robust bears {rule.borne})" if rule.borne else ""
        raise TooManyLiars(said + bears)
    sound = {member: offer for member, offer in offers.items() if member not in wrong}
    return Judged(rule.facing(len(wrong), told), sound, wrong)


def refused(offers: Offers, like: Offer, codec: Compressor) -> dict[int, str]:
    """Members whose offer is of no use, and what is wrong with it, beside one that is right (``like``) and whose
    blocking part ``codec`` has made."""
    found = {}
    for member, offer in offers.items():
        wrong = flaw("prefetched", offer.prefetched, like.prefetched, PLAIN)
        if wrong := wrong or flaw("blocking", offer.blocking, like.blocking, codec):
            found[member] = wrong
    return found


def flaw(name: str, part: Tensor | None, like: Tensor | None, codec: Compressor) -> str:
    """What is wrong with the part of an offer that has this name; empty if nothing is."""
    if part is None or like is None:
        wrong = "" if part is like else "missing" if part is None else "not expected"
    else:
        wrong = codec.flaw(part, like)
    return wrong and f"its {name} part: {wrong}"
