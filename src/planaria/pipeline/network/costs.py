"""What one action and one message cost, in seconds, according to a recipe's network section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig, NetworkConfig, PipelineConfig

FP32_BYTES = 4
MBIT = 1e6 / 8
"""bytes per second of one Mbit/s"""
WIRE_BYTES = {"fp32": FP32_BYTES, "bf16": 2}
"""of one number of an activation, by ``pipeline.wire``"""


@dataclass(frozen=True)
class Costs:
    """Prices of computing and sending, taken from ``network``.

    Stage 0 pays at the return visit of a route (norm, head and loss; in the backward pass too); the embedding visit,
    hop 0, is a table look-up and counts as free.
    """

    network: NetworkConfig
    shadowed: Mapping[int, int] = field(default_factory=dict)
    """stage → the next stage, whose forward pass it computes too (redundant computation, on routes in natural order)"""

    def compute(self, kind: Literal["forward", "backward"], stage: int, hop: int) -> float:
        """Seconds of one microbatch's forward or backward pass at the visit ``hop`` of its route, at ``stage``.

        Raises UserError if the recipe gives costs for fewer stages than that.
        """
        field = f"{kind}_s"
        seconds: list[float] = getattr(self.network, field)
        if not seconds or (stage == 0 and hop == 0):
            return 0.0
        if len(seconds) == 1:
            return seconds[0]
        if stage >= len(seconds):
            raise UserError(
                f"network.{field} has {len(seconds)} numbers, none for stage {stage}; "
                f"give one number, or one for each of the stages 0..S"
            )
        return seconds[stage]

    def shadow(self, kind: Literal["forward", "backward"], stage: int, hop: int) -> float:
        """Seconds that a worker goes on computing for a stage it shadows, once it has sent its own output."""
        hands_on = kind == "forward" and (stage > 0 or hop == 0)  # the ends do at their first visit only
        return self.compute(kind, self.shadowed[stage], 1) if hands_on and stage in self.shadowed else 0.0

    def transmit(self, source: int, target: int, bytes: int) -> float:
        """Seconds that a message of ``bytes`` keeps the way from one node to another busy."""
        return bytes / self.network.bandwidth if self.network.bandwidth else 0.0

    def carry(self, source: int, target: int, bytes: int) -> float:
        """Seconds from sending a message of ``bytes`` over an idle link until it has arrived whole."""
        return self.network.latency_s + self.transmit(source, target, bytes)

    def staging(self, bytes: int) -> float:
        """Seconds in which a message of ``bytes`` is copied between a device and its host, one way."""
        return bytes / self.network.staging_bandwidth if self.network.staging_bandwidth else 0.0


UNIT = Costs(NetworkConfig(forward_s=[1.0], backward_s=[2.0]))
"""Prices for looking at a plan's shape: a backward pass costs two forward passes, every stage alike, messages free."""


def message_bytes(model: ModelConfig, pipeline: PipelineConfig) -> int:
    """Bytes of the activation (microbatch_size, context, dim) that one stage hands to the next, as it travels."""
    return pipeline.microbatch_size * model.context * model.dim * WIRE_BYTES[pipeline.wire]


class Prices:
    """``costs`` in whole nanoseconds, remembered, for messages of one size.

    Sums of integers are exact: what is due at the same time ties, and a simulated time can be held against a bound.
    """

    staging = 0
    """like :meth:`Costs.staging`, beside what is computed"""

    def __init__(self, costs: Costs, message_bytes: int) -> None:
        copied, overlap = _ticks(costs.staging(message_bytes)), costs.network.overlap
        self.staging, stands = (copied, 0) if overlap else (0, copied)
        self.compute: Callable[[str, int, int], int] = cache(
            lambda kind, stage, hop: _ticks(costs.compute(kind, stage, hop)) + stands * _messages(stage)
        )
        """like :meth:`Costs.compute`, with copies that a stage waits for"""
        self.shadow: Callable[[str, int, int], int] = cache(
            lambda kind, stage, hop: _ticks(costs.shadow(kind, stage, hop))
        )
        """like :meth:`Costs.shadow`"""
        self.transmit: Callable[[int, int], int] = cache(
            lambda source, target: _ticks(costs.transmit(source, target, message_bytes))
        )
        """like :meth:`Costs.transmit`"""
        self.carry: Callable[[int, int], int] = cache(
            lambda source, target: _ticks(costs.carry(source, target, message_bytes))
        )
        """like :meth:`Costs.carry`"""

    @staticmethod
    def seconds(ticks: int) -> float:
        return ticks / 1e9


def _messages(stage: int) -> int:
    """Messages that one pass takes in and sends. At the ends, where routes begin and return, it is one of the two."""
    return 2 if stage else 1


def _ticks(seconds: float) -> int:
    return round(seconds * 1e9)
