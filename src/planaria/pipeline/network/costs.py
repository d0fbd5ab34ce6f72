"""Costs of one action and one message in seconds, from a recipe's network section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from planaria.common.errors import UserError
from planaria.config.schema import NetworkConfig
from planaria.pipeline.codecs import message_bytes as message_bytes
from planaria.pipeline.codecs.base import MessageBytes

FP32_BYTES = 4
MBIT = 1e6 / 8
"""bytes per second of one Mbit/s"""


@dataclass(frozen=True)
class Costs:
    """Costs of computation and messages, from ``network``.

    Stage 0 computes at the return visit of a route (norm, head and loss; in the backward pass too). At the first visit,
    hop 0, the embedding is a table look-up; layers there (``model.ends_layers``) take ``entry_forward_s`` and
    ``entry_backward_s``.
    """

    network: NetworkConfig
    shadowed: Mapping[int, int] = field(default_factory=dict)
    """stage → the next stage, whose forward pass it computes too (redundant computation, on routes in natural order)"""

    def compute(self, kind: Literal["forward", "backward"], stage: int, hop: int) -> float:
        """Return the seconds of one microbatch's pass at the visit ``hop`` of its route, at ``stage``.

        :raises UserError: if the recipe has no cost for this stage.
        """
        setting = f"{kind}_s"
        seconds: list[float] = getattr(self.network, setting)
        if stage == 0 and hop == 0:
            return self.network.entry_forward_s if kind == "forward" else self.network.entry_backward_s
        if not seconds:
            return 0.0
        if len(seconds) == 1:
            return seconds[0]
        if stage >= len(seconds):
            raise UserError(
                f"network.{setting} has {len(seconds)} numbers, none for stage {stage}; "
                f"set one number, or one for each of the stages 0..S"
            )
        return seconds[stage]

    def shadow(self, kind: Literal["forward", "backward"], stage: int, hop: int) -> float:
        """Return the seconds that a worker computes for a stage that it shadows, after it has sent its own output."""
        hands_on = kind == "forward" and (stage > 0 or hop == 0)  # stage 0 does at its first visit only
        return self.compute(kind, self.shadowed[stage], 1) if hands_on and stage in self.shadowed else 0.0

    def transmit(self, source: int, target: int, size: int) -> float:
        """Return the seconds that a message of ``size`` bytes occupies the link between two nodes."""
        queued = self.network.latency_s if self.network.latency_queued else 0.0
        return queued + (size / self.network.bandwidth if self.network.bandwidth else 0.0)

    def carry(self, source: int, target: int, size: int) -> float:
        """Return the seconds from sending a message of ``size`` bytes over an idle link until it has arrived."""
        overlapping = 0.0 if self.network.latency_queued else self.network.latency_s
        return overlapping + self.transmit(source, target, size)

    def staging(self, size: int) -> float:
        """Return the seconds of a copy of ``size`` bytes between a device and its host, one way."""
        return size / self.network.staging_bandwidth if self.network.staging_bandwidth else 0.0


UNIT = Costs(NetworkConfig(forward_s=[1.0], backward_s=[2.0]))
"""costs for comparing plans: a backward pass costs two forward passes, stages are equal, messages are free"""


class MessageCosts:
    """``costs`` in whole nanoseconds, cached, for messages of one size on each leg (``kind``: of the sending pass).

    Sums of integers are exact: simultaneous events tie, and a simulated time is comparable with a bound.
    """

    staging = 0
    """like :meth:`Costs.staging`, if it overlaps computation"""
    shared_inbound = False
    """whether all messages to a node queue for one link"""

    def __init__(self, costs: Costs, sizes: MessageBytes) -> None:
        copied, overlap = _ticks(costs.staging(sizes.larger)), costs.network.overlap
        self.staging, stands = (copied, 0) if overlap else (0, copied)
        self.compute: Callable[[str, int, int], int] = cache(
            lambda kind, stage, hop: _ticks(costs.compute(kind, stage, hop)) + stands * _messages(stage)
        )
        """like :meth:`Costs.compute`, plus copies that do not overlap"""
        self.shadow: Callable[[str, int, int], int] = cache(
            lambda kind, stage, hop: _ticks(costs.shadow(kind, stage, hop))
        )
        """like :meth:`Costs.shadow`"""
        self.transmit: Callable[[int, int, str], int] = cache(
            lambda source, target, kind: _ticks(costs.transmit(source, target, sizes.of(kind)))
        )
        """like :meth:`Costs.transmit`"""
        self.carry: Callable[[int, int, str], int] = cache(
            lambda source, target, kind: _ticks(costs.carry(source, target, sizes.of(kind)))
        )
        """like :meth:`Costs.carry`"""
        self.shared_inbound = costs.network.inbound == "shared"

    @staticmethod
    def seconds(ticks: int) -> float:
        return ticks / 1e9


def _messages(stage: int) -> int:
    """Return the messages that one pass receives and sends: one at stage 0, where routes begin and return."""
    return 2 if stage else 1


def _ticks(seconds: float) -> int:
    return round(seconds * 1e9)
