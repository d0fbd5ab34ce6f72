"""Streaming DiLoCo (arXiv 2501.18512): fragments of a stage take turns while training continues."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import model_validator
from torch import Tensor

from planaria.config.bounds import Fraction, Natural, Positive
from planaria.exchange.base import (
    ExchangeCost,
    Settled,
    Shapes,
    StageOuterState,
    Updates,
    Weights,
    one_group,
    round_cost,
)
from planaria.exchange.diloco import DiLoCo


class Streaming(DiLoCo):
    """DiLoCo by fragments: round r changes fragment r mod F, so each has a round every ``every`` inner steps."""

    fixed_on_resume: ClassVar[tuple[str, ...]] = ("momentum", "fragments")

    every: Positive = 100
    """inner steps between two rounds of the same fragment; rounds come ``fragments`` times as often"""
    fragments: Positive = 4
    """parts of a stage, each with its own rounds"""
    delay: Natural = 0
    """inner steps between sending a fragment and applying the result"""
    mix: Fraction = 0.0
    """share of the fast weights that remains after a round"""

    @model_validator(mode="after")
    def _check_fragments_and_delay(self) -> Self:
        if self.every % self.fragments:
            raise ValueError(
                f"every = {self.every} does not divide into fragments = {self.fragments} equal waits; change one of "
                "them"
            )
        if self.delay >= self.interval:
            raise ValueError(
                f"delay = {self.delay}: a fragment must be settled before the next is sent (every / fragments = "
                f"{self.interval}); lower it"
            )
        return self

    @property
    def interval(self) -> int:
        return self.every // self.fragments

    @property
    def overlap(self) -> int:
        return self.delay

    @property
    def cycle(self) -> int:
        return self.fragments

    def slow_weights_before_round(self, outer: StageOuterState) -> Weights:
        slow = outer["slow"]
        return {name: slow[name] for name in fragments(slow, self.fragments)[outer.rounds % self.fragments]}

    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        slow, settled = self._take_outer_step(outer, updates, me)
        mixed = {name: mixture(fast[name].detach(), slow[name], self.mix) for name in slow}
        return {**fast, **mixed}, settled

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        """Return the bytes of a round. Messages that arrive within ``delay`` steps do not block members."""
        parts = fragments(shapes, self.fragments)
        blocking = sum(self.compression.bytes({n: shapes[n] for n in part}) for part in parts) / self.fragments
        cost = round_cost(one_group(range(members)), blocking)
        return replace(cost, critical=0.0) if self.delay else cost


def mixture(fast: Tensor, slow: Tensor, mix: float) -> Tensor:
    """θ ← aθ + (1 − a)φ (arXiv 2501.18512), elementwise, in fp32 and returned in the dtype of ``fast``."""
    return (mix * fast.float() + (1.0 - mix) * slow).to(fast.dtype)


def fragments(names: Iterable[str], count: int) -> list[tuple[str, ...]]:
    """Return the parameter ``names`` in ``count`` fragments; layers alternate, so that each has early and late
    ones. With fewer layers than fragments, parameters alternate instead.

    A layer is the set of names with the same prefix up to the first number (``layers.3``); a parameter without a number
    is a layer. A stage with fewer parameters than fragments leaves some empty.
    """
    layers: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        numbered = re.match(r"(.*?)\.(\d+)(?:\.|$)", name)
        layers.setdefault((numbered[1], int(numbered[2])) if numbered else (name, 0), []).append(name)
    whole = len(layers) >= count
    dealt = [part for layer in sorted(layers) for part in ([layers[layer]] if whole else [[n] for n in layers[layer]])]
    return [tuple(name for layer in dealt[k::count] for name in layer) for k in range(count)]
