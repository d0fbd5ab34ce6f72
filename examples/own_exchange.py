"""Exchanges of your own: an all-reduce that leaves out what replicas disagree about, and pairs that meet half-way.

cd examples
planaria train demo --allow-code --exchange.replicas 2 --exchange.kind own_exchange:Agreeing
planaria train gossip --allow-code --exchange.kind own_exchange:Elastic --exchange.options.pull 0.3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from planaria.exchange.allreduce import AllReduce
from planaria.exchange.base import Weights
from planaria.exchange.gossip import Gossip


class Agreeing(AllReduce):
    """Sign-agreement averaging. Fields are options, in addition to those of AllReduce."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """minimum agreement of signs: 0 is plain averaging, 1 keeps only components whose sign all replicas share"""

    def aggregate(self, decoded: Mapping[int, Weights]) -> dict[str, Tensor]:
        def agreed(name: str) -> Tensor:
            return (
                torch.stack([gradients[name].sign() for gradients in decoded.values()]).mean(dim=0).abs() >= self.share
            )

        return {name: mean * agreed(name) for name, mean in super().aggregate(decoded).items()}


class Elastic(Gossip):
    """In random pairs: θ ← θ + pull · (mean of the pair's θ − θ)."""

    pull: Annotated[float, Field(gt=0, le=1)] = 0.5
    """share of the distance to the pair's mean"""

    def contribution(self, drift: Tensor, slow: Tensor) -> Tensor:
        return slow + drift

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        return own + self.pull * (mean - own), torch.zeros_like(momentum)
