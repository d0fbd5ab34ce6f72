"""Replicas without processes: one round of an exchange, carried out for all of them in this process.

For tests and experiments. It asks the same functions as a fleet would, in the order that ``base.py`` tells.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from planaria.exchange.base import Exchange, Offer, Outer, Weights
from planaria.exchange.refusal import judge


@dataclass
class Replica:
    """One replica of a stage: its fast weights and its outer state."""

    fast: dict[str, Tensor]
    outer: Outer


def replicas(exchange: Exchange, weights: Weights, count: int) -> dict[int, Replica]:
    """``count`` replicas, 0 and up, that all start from copies of ``weights``."""
    return {
        member: Replica({name: tensor.clone() for name, tensor in weights.items()}, exchange.start(weights))
        for member in range(count)
    }


def offers(
    exchange: Exchange, of: dict[int, Replica], round: int, seed: int, alone: Collection[int] = ()
) -> dict[int, dict[int, Offer]]:
    """What every replica gets to hear in ``round``; those ``alone`` hear nobody, and nobody hears them."""
    said = {member: exchange.speaking(member).offer(replica.outer, replica.fast) for member, replica in of.items()}
    heard = {}
    for group in exchange.groups(round, list(of), seed):
        for member in group:
            others = [member] if member in alone else [other for other in group if other not in alone]
            heard[member] = {other: said[other] for other in others}
    return heard


def settle(exchange: Exchange, of: dict[int, Replica], heard: dict[int, dict[int, Offer]]) -> None:
    """Every replica makes of its group's offers what its exchange says."""
    for member, replica in of.items():
        judged = judge(exchange, replica.outer, heard[member], heard[member][member])
        replica.fast, replica.outer = judged.rule.settle(replica.outer, replica.fast, judged.offers, member)


def meet(exchange: Exchange, of: dict[int, Replica], round: int, seed: int, alone: Collection[int] = ()) -> None:
    """A round without delay: :func:`offers`, then :func:`settle`."""
    settle(exchange, of, offers(exchange, of, round, seed, alone))
