"""Exchanges of weights in random groups, and the bound on γ within which replicas stay together.

A replica sends one tensor x, computed from its slow weights φ and its drift θ − φ, and continues with its group's mean;
the released code of arXiv 2506.10911 sends two tensors.

Updates may have two parts (``prefetch``, or fewer than 32 bits): φ and the next group are known after the previous
round, so φ travels in full during the inner steps. Members wait only for the drift, which is small and tolerates
rounding. This sends more bytes in total and fewer on the critical path.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from planaria.config.bounds import Fraction, Positive
from planaria.exchange import weight_message
from planaria.exchange.aggregate import OuterMomentumExchange
from planaria.exchange.base import (
    ExchangeCost,
    Settled,
    Shapes,
    StageOuterState,
    TooManyByzantine,
    Update,
    Updates,
    Weights,
    round_cost,
)
from planaria.exchange.robust.rules import RobustAggregator


def contraction(members: int, group: int) -> float:
    """Return c of equation (3) in docs/systems.md: the mean share of a disagreement within the groups of a round.

    ``members`` replicas form K = ⌈members / group⌉ groups, drawn by :func:`random_groups`. Within-group differences
    span members − K of the members − 1 dimensions of all differences, and no direction is preferred:

        c = (members − K) / (members − 1),    members / (2(members − 1)) for pairs of an even number.

    It is at least 1 − 1/group, its limit for many members. [derived here]
    """
    return (members - -(-members // group)) / (members - 1)


def largest_gamma(alpha: float, c: float) -> float:
    """Return the bound on γ, equation (3) in docs/systems.md.

    Without noise, the mean square of the disagreement vanishes if and only if 0 < γ < bound:

        γ < 2(1 − α²) / (1 + α − 2αc)

    α is the momentum, c that of :func:`contraction`. Let d be a replica's distance from the mean of all and P the
    projection on differences within groups: δ ← αδ − γPd and d ← d + δ close a linear recursion in E|d|², E⟨d, δ⟩ and
    E|δ|², because P is independent of both and E P = c; at the bound its spectral radius is 1. [derived here]
    """
    return 2.0 * (1.0 - alpha * alpha) / (1.0 + alpha - 2.0 * alpha * c)


def random_groups(round: int, members: Sequence[int], size: int, seed: int) -> list[tuple[int, ...]]:
    """Return ``members`` in groups of ``size``, drawn for each ``round``; ids within a group ascend.

    One permutation is cut with a stride: groups {π_k, π_{k+K}, π_{k+2K}, …} for k < K = ⌈N / size⌉ (released code of
    arXiv 2506.10911, for N divisible by the size). Otherwise some groups are smaller by one; with pairs, one member
    sits out. The seed is a string, which Python hashes by SHA-512: draws are the same on every platform.

    :raises ValueError: if a member is listed twice or ``size`` is below 1.
    """
    if len(set(members)) < len(members):
        raise ValueError(f"a member is listed twice: {sorted(members)}")
    if size < 1:
        raise ValueError(f"groups of {size} cannot be formed")
    order = sorted(members)
    random.Random(f"exchange/{seed}/{round}").shuffle(order)
    count = -(-len(order) // size)
    return [tuple(sorted(order[k::count])) for k in range(count)]


class SlowWeightExchange(OuterMomentumExchange, ABC):
    """Replicas with different weights; a subclass defines x and the outer step."""

    every: Positive = 50
    """inner steps between rounds"""
    prefetch: bool = False
    """send slow weights in advance, so that members wait only for drifts (always on below 32 bits)"""

    @model_validator(mode="after")
    def _check_aggregator(self) -> Self:
        if self.aggregator not in ("senders", "clipped_senders"):
            return self
        raise ValueError(
            f"aggregator = {self.aggregator!r} treats zeros as coordinates that were not sent, but this exchange.kind "
            "sends slow weights, which are not zero; use 'mean', or exchange.kind = 'diloco'"
        )

    @abstractmethod
    def contribution(self, drift: Tensor, slow: Tensor) -> Tensor:
        """Return x for one parameter, from θ − φ and φ."""

    @abstractmethod
    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return new slow weights and momentum, from the replica's own x and its group's mean."""

    @property
    def interval(self) -> int:
        return self.every

    @property
    def prefetches(self) -> bool:
        return self.two_parts

    @property
    def slow_factor(self) -> float:
        """Factor of φ in x."""
        return 1.0

    @property
    def two_parts(self) -> bool:
        return self.prefetch or not self.compression.exact

    def prefetched(self, outer: StageOuterState) -> Tensor | None:
        return weight_message.pack(outer["slow"]) if self.two_parts else None

    def drift_of(self, outer: StageOuterState, fast: Weights) -> dict[str, Tensor]:
        """Return the drift that a replica reports: θ − φ."""
        return {name: fast[name].detach().float() - slow for name, slow in outer["slow"].items()}

    def group_aggregate(self, outer: StageOuterState, values: Mapping[int, Weights], me: int) -> dict[str, Tensor]:
        """Return the aggregate of the members' x, its own included."""
        return self.aggregate_with_rule(outer, values) if len(values) > 1 else self.aggregate(values)

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        drift = self.drift_of(outer, fast)
        if self.two_parts:
            prefetched = self.prefetched(outer) if prefetched is None else prefetched
            return self.compression.update(outer, drift, prefetched)
        return Update(
            weight_message.pack({name: self.contribution(drift[name], slow) for name, slow in outer["slow"].items()})
        )

    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        """Settle alone if a robust rule has too few updates in the group."""
        try:
            return self._settle(outer, fast, updates, me)
        except TooManyByzantine:
            return self._settle(outer, fast, {me: updates[me]}, me)

    def _settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        received, kept = self.compression.receive(outer, updates, me, outer["slow"])
        values = self._values(outer, updates, received)
        if me not in values:  # its own update was rejected: it repeats the round
            return weight_message.fast_copy(outer["slow"], fast), outer.settled(slow=outer["slow"], **kept)
        joined = self.group_aggregate(outer, values, me)
        new_slow, momentum = {}, {}
        for name, slow in outer["slow"].items():
            before = outer["momentum"].get(name, torch.zeros_like(slow))
            new_slow[name], momentum[name] = self.step(slow, before, values[me][name], joined[name])
        return weight_message.fast_copy(new_slow, fast), outer.settled(slow=new_slow, momentum=momentum, **kept)

    def decoded_values(self, outer: StageOuterState, updates: Updates) -> dict[int, dict[str, Tensor]]:
        return self._values(outer, updates, self.decode_blocking(outer, updates, outer["slow"]))

    def _values(
        self, outer: StageOuterState, updates: Updates, received: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[int, dict[str, Tensor]]:
        """Return x of each member; its decoded blocking part in ``received`` is x itself, or a drift."""
        if not self.two_parts:
            return {member: dict(value) for member, value in received.items()}
        prefetched = {member: weight_message.unpack(updates[member].prefetched, outer["slow"]) for member in received}
        return {
            member: {name: self.contribution(drift[name], prefetched[member][name]) for name in drift}
            for member, drift in received.items()
        }

    def spread(self, outer: StageOuterState, updates: Updates) -> float:
        return super().spread(outer, updates) / (1.0 if self.two_parts else self.slow_factor)

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        prefetched = weight_message.packed_bytes(shapes) if self.two_parts else 0
        return round_cost(self.groups(0, range(members), 0), self.compression.bytes(shapes), prefetched)


class Gossip(SlowWeightExchange, ABC):
    """Replicas that meet in groups drawn for each round."""

    group: Annotated[int, Field(ge=2)] = 2
    """replicas that meet in one round"""

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        return random_groups(round, members, self.group, seed)

    def why_rule_unsupported(self, by: RobustAggregator, members: int) -> str:
        smallest = min(map(len, self.groups(0, range(members), 0)))
        required = by.min_members()
        if smallest < required:
            return (
                f"{members} replicas in groups of {self.group} meet in some of {smallest}, and tolerating "
                f"{by.rule.byzantine} Byzantine replicas needs groups of at least {required}; raise "
                "exchange.options.group, or use exchange.kind = 'diloco'"
            )
        return super().why_rule_unsupported(by, members)


class PullingGossip(Gossip, ABC):
    """Gossip with momentum and a pull towards the group's mean of strength γ."""

    alpha: Fraction
    """momentum of the outer step"""
    beta: Annotated[float, Field(gt=0)]
    """outer learning rate"""
    gamma: Annotated[float, Field(gt=0)]
    """pull towards the group's mean"""

    @model_validator(mode="after")
    def _check_gamma(self) -> Self:
        """Apply the lowest bound, that of many replicas, since their number changes during a run."""
        bound = largest_gamma(self.alpha, 1.0 - 1.0 / self.group)
        if self.gamma < bound:
            return self
        raise ValueError(
            f"gamma = {self.gamma:g} with alpha = {self.alpha:g}: replicas would drift apart; in groups of "
            f"{self.group} gamma must stay below 2(1 - alpha^2) / (1 + alpha - 2 alpha (1 - 1/{self.group})) = "
            f"{bound:.3g}; lower gamma or alpha"
        )


class PairMean(Gossip):
    """NoLoCo without momentum and learning rate: α = 0 and β = γ = 1."""

    def contribution(self, drift: Tensor, slow: Tensor) -> Tensor:
        return slow + drift

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """θ ← (1/n) Σ_{j∈G} θ_j; the slow weights only serve as the origin of drifts."""
        return mean, torch.zeros_like(momentum)
