"""One round of an exchange for all replicas in this process, without a fleet; for tests and experiments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from planaria.exchange.base import Exchange, StageOuterState, Update, Weights
from planaria.exchange.update_validation import validate


@dataclass
class Replica:
    """One replica of a stage: its fast weights and its outer state."""

    fast: dict[str, Tensor]
    outer: StageOuterState


def replicas(exchange: Exchange, weights: Weights, count: int) -> dict[int, Replica]:
    """Return ``count`` replicas, numbered from 0, that start from copies of ``weights``."""
    return {
        member: Replica({name: tensor.clone() for name, tensor in weights.items()}, exchange.start(weights))
        for member in range(count)
    }


def exchanged(
    exchange: Exchange, of: dict[int, Replica], round: int, seed: int, alone: Collection[int] = ()
) -> dict[int, dict[int, Update]]:
    """Return the updates that each replica receives in ``round``; those ``alone`` neither send nor receive."""
    updates = {
        member: exchange.for_sender(member).update(replica.outer, replica.fast) for member, replica in of.items()
    }
    received = {}
    for group in exchange.groups(round, list(of), seed):
        for member in group:
            others = [member] if member in alone else [other for other in group if other not in alone]
            received[member] = {other: updates[other] for other in others}
    return received


def settle(exchange: Exchange, of: dict[int, Replica], received: dict[int, dict[int, Update]]) -> None:
    """Settle each replica with the updates it received."""
    for member, replica in of.items():
        judged = validate(exchange, replica.outer, received[member], received[member][member])
        replica.fast, replica.outer = judged.rule.settle(replica.outer, replica.fast, judged.updates, member)


def exchange_once(
    exchange: Exchange, of: dict[int, Replica], round: int, seed: int, alone: Collection[int] = ()
) -> None:
    """Carry out a round without delay: :func:`exchanged`, then :func:`settle`."""
    settle(exchange, of, exchanged(exchange, of, round, seed, alone))
