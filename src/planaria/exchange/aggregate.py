"""Aggregation of a group's updates into one value: rules, and the base class of exchanges that use one."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Annotated, ClassVar, Literal, Protocol, Self

import torch
from pydantic import AfterValidator, PrivateAttr
from torch import Tensor

from planaria.common.errors import UserError, suggestion
from planaria.exchange import weight_message
from planaria.exchange.base import (
    Exchange,
    ExchangeCost,
    OnWeights,
    Parts,
    Shapes,
    StageOuterState,
    Updates,
    UpdateWeights,
    Weights,
    round_cost,
)
from planaria.exchange.compress.base import Compressor, squared_norm
from planaria.exchange.compress.compression import Compression, make_compression
from planaria.exchange.robust.rules import RobustAggregator
from planaria.exchange.robust.weighing import Weighing


class Aggregator(Protocol):
    """A pure function: equal arguments in the same order give bit-identical results."""

    def __call__(self, values: Mapping[int, Weights], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """Return one value of one or more members; new tensors.

        :param values: member → tensors by name, with the same names and shapes at all members, in order of member.
        :param weights: member → its positive weight; only ratios matter.
        """
        ...


def mean(values: Mapping[int, Weights], weights: Mapping[int, float]) -> dict[str, Tensor]:
    """Return Σ w_j x_j / Σ w_j, elementwise, summed in the given order."""
    names = next(iter(values.values()))
    return {name: _mean({member: vector[name] for member, vector in values.items()}, weights) for name in names}


def _mean(tensors: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    first, *rest = tensors
    total = tensors[first] * weights[first]
    for member in rest:
        total.add_(tensors[member], alpha=weights[member])
    return total.div_(sum(weights[member] for member in tensors))


MIN_DIRECTION_NORM = 1e-6
"""norm of a mean of unit vectors below which they count as cancelled: what remains is rounding error"""


def rda(values: Mapping[int, Weights], weights: Mapping[int, float]) -> dict[str, Tensor]:
    """Return the radial–directional average of each tensor (RDA, arXiv 2604.21428), and the mean of embeddings.

    With u(x) = x/‖x‖ and u(0) = 0:

        (Σ w_j ‖x_j‖ / Σ w_j) · u(Σ w_j u(x_j))

    The mean of nearly orthogonal vectors is shorter than they are, by √n for n of them; this keeps their mean norm. A
    tensor is an embedding if its name contains "embed". Sums are in fp64; norms do not depend on the number of threads.
    """
    averages = {}
    for name in next(iter(values.values())):
        tensors = {member: vector[name] for member, vector in values.items()}
        averages[name] = _mean(tensors, weights) if "embed" in name else _rda_of_tensor(tensors, weights)
    return averages


def _rda_of_tensor(tensors: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    """Return the radial–directional average of the members' tensors, in their dtype."""
    like = next(iter(tensors.values()))
    direction = torch.zeros_like(like, dtype=torch.float64)
    radius = total = 0.0
    for member, tensor in tensors.items():
        norm, weight = math.sqrt(squared_norm(tensor)), weights[member]
        if norm:
            direction.add_(tensor, alpha=weight / norm)
        radius, total = radius + weight * norm, total + weight
    length = math.sqrt(squared_norm(direction))
    return direction.mul_(radius / total / length if length > MIN_DIRECTION_NORM * total else 0.0).to(like.dtype)


def mean_over_senders(values: Mapping[int, Weights], weights: Mapping[int, float]) -> dict[str, Tensor]:
    """Return the mean of each coordinate over the members that sent it: those in whose value it is not zero.

    A coordinate that only one of n members sent counts in full, and as 1/n in :func:`mean`. In dense messages, the
    coordinates that count as not sent are those that the member did not change.
    """
    sent = {member: {name: (tensor != 0).to(tensor) for name, tensor in of.items()} for member, of in values.items()}
    shares = mean(sent, weights)
    return {
        name: torch.where(shares[name] > 0, tensor / shares[name], 0.0)
        for name, tensor in mean(values, weights).items()
    }


def clipped_mean_over_senders(values: Mapping[int, Weights], weights: Mapping[int, float]) -> dict[str, Tensor]:
    """Clip each tensor of each message to the median norm among its senders; return :func:`mean_over_senders` of that.

    It is not a robust rule: a single sender is not clipped, and of two the larger is clipped to their mean norm.
    """
    clipped: dict[int, dict[str, Tensor]] = {member: {} for member in values}
    for name in next(iter(values.values())):
        norms = {member: math.sqrt(squared_norm(vector[name])) for member, vector in values.items()}
        limit = median([norm for norm in norms.values() if norm] or [0.0])
        for member, norm in norms.items():
            clipped[member][name] = values[member][name] * (limit / norm) if norm > limit else values[member][name]
    return mean_over_senders(clipped, weights)


AGGREGATORS: dict[str, Aggregator] = {
    "mean": mean,
    "rda": rda,
    "senders": mean_over_senders,
    "clipped_senders": clipped_mean_over_senders,
}


LAST_ROBUST_VALUE = "centre"
"""the part of an outer state that holds the last value of an iterative robust rule"""


def check_aggregator(name: str) -> str:
    """Return the name of an aggregator; raise ValueError for another name."""
    if name not in AGGREGATORS:
        raise ValueError(f"no such aggregator; {suggestion(name, AGGREGATORS)}")
    return name


class AggregatingExchange(Exchange, ABC):
    """An exchange whose members each send one value, optionally compressed, and aggregate them."""

    receives_all: ClassVar[bool] = False
    """whether every member receives every message, as error feedback with estimates requires"""

    bits: Literal[4, 8, 16, 32] = 32
    """bits per number in blocking messages; the rounding error is sent later"""
    aggregator: Annotated[str, AfterValidator(check_aggregator)] = "mean"
    """rule that combines the values of a group: mean, rda, senders, clipped_senders"""

    _compressed: Compression | None = PrivateAttr(default=None)
    _robust: RobustAggregator | None = PrivateAttr(default=None)

    @cached_property
    def compression(self) -> Compression:
        """Compression of blocking messages."""
        return self._compressed or make_compression(f"{self.bits}bits")

    def with_compression(self, by: Compression) -> Self:
        """Return the exchange with compressed blocking messages.

        :raises UserError: if the exchange does not support this compression.
        """
        if self.bits != 32:
            raise UserError(
                f"exchange.compress cannot be combined with exchange.options.bits = {self.bits}; remove one of them"
            )
        if by.feedback.estimates and not self.receives_all:
            raise UserError(
                "exchange.compress: this feedback keeps an estimate of every member, but some may be missing from a "
                "round of this exchange; use ef14, or exchange.kind = 'allreduce'"
            )
        if by.feedback.estimates and self.aggregator != "mean":
            raise UserError(
                f"exchange.options.aggregator = {self.aggregator!r}: this feedback's estimates (exchange.compress) add "
                "up to their mean; use 'mean', or ef14"
            )
        exchange = self.model_copy()
        exchange._compressed = by
        return exchange

    def for_sender(self, me: int) -> Self:
        if self._compressed is None:
            return self
        exchange = self.model_copy()
        exchange._compressed = replace(self._compressed, me=me)
        exchange.__dict__.pop("compression", None)  # cached for another sender
        return exchange

    def with_rule(self, by: RobustAggregator, members: int) -> Self:
        """Return the exchange with a robust rule instead of the mean, for ``members`` replicas.

        :raises UserError: if the exchange does not support this rule.
        """
        if wrong := self.why_rule_unsupported(by, members):
            raise UserError(f"exchange.robust: {wrong}")
        if self.aggregator != "mean":
            raise UserError(
                f"exchange.robust replaces exchange.options.aggregator = {self.aggregator!r}; remove one of them"
            )
        if self.compression.feedback.estimates:
            raise UserError(
                "exchange.robust cannot compare messages of a compressor with estimates (exchange.compress): they "
                "hold differences to estimates; use ef14"
            )
        exchange = self.model_copy()
        exchange._robust = by
        return exchange

    def why_rule_unsupported(self, by: RobustAggregator, members: int) -> str:
        """Return why the exchange does not support this rule, or an empty string if it does."""
        if by.is_iterative and not self.synchronised:
            return (
                "the rule continues from a value that all members share, but members of this exchange.kind "
                "have different values; use another rule"
            )
        if by.scope == "replica" and not self.has_rounds:
            return (
                "scope = 'replica' needs rounds, but this exchange.kind combines gradients within every step; "
                "remove scope, or use exchange.kind = 'diloco'"
            )
        if by.scope == "replica" and type(self).decoded_values is AggregatingExchange.decoded_values:
            return "scope = 'replica': this exchange.kind does not decode its updates (decoded_values); remove scope"
        return ""

    def why_unsupported(self, members: int) -> str:
        by = self._robust
        if by is None or members >= by.min_members():
            return "" if by is None else self.why_rule_unsupported(by, members)
        return (
            f"{members} replicas are too few to tolerate {by.rule.byzantine} Byzantine ones; "
            f"use {by.min_members()} or more"
        )

    @property
    def tolerated(self) -> int:
        return 0 if self._robust is None else self._robust.rule.byzantine

    @property
    def strikes(self) -> int:
        return 0 if self._robust is None else self._robust.strikes

    def after_rejecting(self, rejected: int, on_weights: OnWeights, known_weights: UpdateWeights | None = None) -> Self:
        if self._robust is None:
            return self
        exchange = self.model_copy()
        exchange._robust = self._robust.after_rejecting(rejected, on_weights, known_weights)
        return exchange

    @property
    def weighing(self) -> Weighing | None:
        if self._robust is None or self._robust.scope == "stage":
            return None
        return Weighing(self._robust, not self.synchronised, LAST_ROBUST_VALUE, self.decoded_values)

    def decoded_values(self, outer: StageOuterState, updates: Updates) -> dict[int, dict[str, Tensor]]:
        """Return the values of valid ``updates`` of the round after ``outer`` as a rule sees them, by member."""
        raise NotImplementedError

    @property
    def parts(self) -> Parts:
        is_iterative = self._robust is not None and self._robust.is_iterative
        return {**self.compression.parts, **({LAST_ROBUST_VALUE: "shared"} if is_iterative else {})}

    def codec(self, outer: StageOuterState) -> Compressor:
        return self.compression.codec(outer)

    def after_member_change(self, outer: StageOuterState) -> StageOuterState:
        return self.compression.after_member_change(outer)

    def aggregate_with_rule(self, outer: StageOuterState, decoded: Mapping[int, Weights]) -> dict[str, Tensor]:
        """Return the aggregate of the members' values in the round after ``outer``.

        :raises TooManyByzantine: if the robust rule does not tolerate the number of missing or invalid updates.
        """
        if self._robust is None:
            return self.aggregate(decoded)
        like = next(iter(decoded.values()))
        last = {name: tensor for name, tensor in outer[LAST_ROBUST_VALUE].items() if name in like}
        return self._robust.aggregate(decoded, outer.rounds, last)

    def parts_from_aggregate(self, aggregate: Weights) -> dict[str, Weights]:
        """Return the parts of the outer state that depend on the aggregate; shares memory."""
        return {LAST_ROBUST_VALUE: aggregate} if LAST_ROBUST_VALUE in self.parts else {}

    def aggregate(self, decoded: Mapping[int, Weights]) -> dict[str, Tensor]:
        """Return the aggregate of several members' values (member → tensors by name) with equal weights."""
        return AGGREGATORS[self.aggregator](decoded, equal_weights(decoded))

    def spread(self, outer: StageOuterState, updates: Updates) -> float:
        return weight_message.rms_spread(updates, self.codec(outer), outer.rounds)

    def decode_blocking(self, outer: StageOuterState, updates: Updates, like: Weights) -> dict[int, dict[str, Tensor]]:
        """Return the decoded blocking parts of valid ``updates`` of the round after ``outer``, by member."""
        codec = self.codec(outer)
        return {
            member: weight_message.unpack(update.blocking, like, codec, outer.rounds)
            for member, update in updates.items()
        }

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return round_cost(self.groups(0, range(members), 0), self.compression.bytes(shapes))


def equal_weights(members: Iterable[int]) -> dict[int, float]:
    """Return equal weights for ``members``."""
    return dict.fromkeys(members, 1.0)


class OuterMomentumExchange(AggregatingExchange, ABC):
    """An exchange whose outer state has slow weights and a momentum, equal at all replicas that start together."""

    @property
    def parts(self) -> Parts:
        return {"slow": "shared", "momentum": "shared", **super().parts}

    def start(self, weights: Weights) -> StageOuterState:
        return StageOuterState({"slow": weight_message.slow_copy(weights), "momentum": weight_message.zeros(weights)})
