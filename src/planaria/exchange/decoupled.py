"""Decoupled DiLoCo (arXiv 2604.21428): rounds wait for few replicas and include the others' current weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, PrivateAttr, model_validator
from torch import Tensor

from planaria.config.bounds import Positive
from planaria.exchange import weight_message
from planaria.exchange.aggregate import AGGREGATORS, check_aggregator, equal_weights
from planaria.exchange.base import OnWeights, Settled, StageOuterState, UpdateWeights, Weights
from planaria.exchange.robust.rules import RobustAggregator
from planaria.exchange.streaming_diloco import Streaming, fragments


class Decoupled(Streaming):
    """Streaming DiLoCo whose rounds begin when ``min_due`` replicas have made their inner steps.

    All other replicas take part immediately, with the weights of their last step. After ``delay`` more steps, a replica
    settles with the updates that have arrived everywhere; one that was too slow settles with the same updates after
    its own step, so all keep the same slow weights. If no update of a replica arrived, its changes to the fragment
    are lost.

    An update counts in proportion to the inner steps since its replica received the fragment. The published weight is
    tokens² / steps, which is proportional to that, since all replicas have equally many tokens in a step.
    """

    decoupled: ClassVar[bool] = True

    delay: Positive = 2
    """inner steps between sending a fragment and applying the result; updates arrive meanwhile"""
    min_due: Positive = 1
    """replicas that must have made their inner steps before a round begins, and whose updates must arrive before it
    ends"""
    aggregator: Annotated[str, AfterValidator(check_aggregator)] = "rda"
    """rule that combines the values of a group: mean, rda, senders, clipped_senders"""

    _known_weights: Mapping[int, float] | None = PrivateAttr(default=None)
    """weights of the updates in the round that is being settled"""

    @model_validator(mode="after")
    def _check_mix(self) -> Self:
        if self.mix:
            raise ValueError(f"mix = {self.mix:g}: a decoupled replica adopts the result of a round unmixed; remove it")
        return self

    def why_unsupported(self, members: int) -> str:
        if self.min_due > members:
            return f"min_due = {self.min_due}, but exchange.replicas = {members}; use {members} or less"
        return super().why_unsupported(members)

    def quorum(self, members: int) -> int:
        return min(self.min_due, members) - 1

    def detects_equivocation(self, members: int) -> bool:
        """False: members do not wait for each other's reports."""
        return False

    def why_rule_unsupported(self, by: RobustAggregator, members: int) -> str:
        return (
            "the members of a decoupled round do not compare what they received, so one could send each a "
            "different update; use exchange.kind = 'streaming_diloco'"
        )

    @property
    def uses_own_exactly(self) -> bool:
        return self._known_weights is None

    def contribution_weights(self, steps: Mapping[int, int]) -> dict[int, float]:
        some = any(steps.values())
        return {member: float(count) if some else 1.0 for member, count in steps.items()}

    def catch_up(self, outer: StageOuterState, fast: Weights, latest: StageOuterState) -> Settled:
        """Overwrite the fragments of the missed rounds; the other fragments keep the replica's own weights."""
        slow = latest["slow"]
        parts = fragments(slow, self.fragments)
        missed = {round % self.fragments for round in range(outer.rounds, latest.rounds)}
        taken = {name: slow[name] for fragment in missed for name in parts[fragment]}
        caught_up = replace(
            latest, parts={**outer.parts, **{name: part for name, part in latest.parts.items() if part}}
        )
        return {**fast, **weight_message.fast_copy(taken, fast)}, caught_up

    def after_rejecting(self, rejected: int, on_weights: OnWeights, known_weights: UpdateWeights | None = None) -> Self:
        exchange = super().after_rejecting(rejected, on_weights, known_weights)
        if known_weights is not None:
            exchange = exchange.model_copy()
            exchange._known_weights = known_weights.coefficients
        return exchange

    def aggregate(self, decoded: Mapping[int, Weights]) -> dict[str, Tensor]:
        """Return the weighted aggregate. Equal weights count as 1: other numbers would round sums differently."""
        weights = self._known_weights or {}
        unequal = len(set(weights.values())) > 1
        return AGGREGATORS[self.aggregator](decoded, weights if unequal else equal_weights(decoded))
