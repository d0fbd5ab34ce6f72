"""Eager DiLoCo (arXiv 2502.12996): a round uses the other replicas' drifts of the round before."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator
from torch import Tensor

from planaria.common.errors import UserError
from planaria.exchange import weight_message
from planaria.exchange.base import (
    ExchangeCost,
    Parts,
    Settled,
    Shapes,
    StageOuterState,
    TooManyByzantine,
    Update,
    Updates,
    Weights,
    round_cost,
)
from planaria.exchange.compress.compression import Compression
from planaria.exchange.diloco import DiLoCo, outer_step, pseudo_gradient
from planaria.exchange.robust.rules import RobustAggregator


class Eager(DiLoCo):
    """DiLoCo whose messages travel during the next inner steps: each replica's own drift is fresh, the others' are old.

    With the drifts Δ of rounds t and t − 1, replica i takes its outer step along

        Δ̃_i = (1/n) Δ_i^t + (1/n) Σ_{j≠i} Δ_j^{t−1}

    where Δ^{−1} is 0, and the last drift of a lost replica counts once. Replicas differ by their newest drifts, so each
    has its own slow weights. One replica alone is DiLoCo.
    """

    synchronised: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        if self.bits != 32:
            raise ValueError(f"bits = {self.bits}: messages travel during the inner steps, uncompressed; use 32")
        return self

    def with_compression(self, by: Compression) -> Self:
        raise UserError("exchange.compress: 'eager' sends drifts during the inner steps, uncompressed; remove it")

    @property
    def prefetches(self) -> bool:
        return True

    @property
    def has_blocking_part(self) -> bool:
        return False

    @property
    def parts(self) -> Parts:
        return {"last": "own", **super().parts}

    def start(self, weights: Weights) -> StageOuterState:
        started = super().start(weights)
        return StageOuterState({**started.parts, "last": weight_message.zeros(weights)})

    def prefetched(self, outer: StageOuterState) -> Tensor | None:
        return weight_message.pack(outer["last"] or weight_message.zeros(outer["slow"]))

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        return Update(prefetched=self.prefetched(outer) if prefetched is None else prefetched)

    def why_rule_unsupported(self, by: RobustAggregator, members: int) -> str:
        if by.scope == "replica":
            return "scope = 'replica': members weigh each other's last drifts, but use their own new ones; remove scope"
        return super().why_rule_unsupported(by, members)

    def decoded_values(self, outer: StageOuterState, updates: Updates) -> dict[int, dict[str, Tensor]]:
        return {member: weight_message.unpack(sent.prefetched, outer["slow"]) for member, sent in updates.items()}

    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        own_drift = pseudo_gradient(outer["slow"], fast)
        drifts = self.decoded_values(outer, updates) | {me: own_drift}
        try:
            joined = self.aggregate_with_rule(outer, dict(sorted(drifts.items())))
        except TooManyByzantine:
            return dict(fast), outer.settled()  # the next drift includes this one, and the last one is sent again
        slow, momentum = outer_step(outer["slow"], outer["momentum"], joined, self.beta, self.alpha, self.momentum)
        return weight_message.fast_copy(slow, fast), outer.settled(slow=slow, momentum=momentum, last=own_drift)

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return round_cost(self.groups(0, range(members), 0), 0, weight_message.packed_bytes(shapes))
