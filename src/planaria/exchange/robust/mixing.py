"""What makes vectors more alike before a rule sees them: each becomes a mean of some, by a matrix M [m, n]."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from planaria.exchange.robust.base import nearest

Mix = Literal["none", "nnm", "bucketing"]
BUCKET = 2
"""s: vectors in a bucket; so many liars are in at most as many buckets, of s times fewer"""


def mixing(mix: Mix, gram: Tensor, liars: int, draw: int) -> Tensor:
    """M for the inner products K [n, n]: row i says of which members the i-th vector becomes the mean.

    nnm: of its n − f nearest (arXiv 2302.01772). bucketing: of random buckets of two (arXiv 2006.09365), the same at
    all who know ``draw``; the last may be smaller.
    """
    n = len(gram)
    if mix == "none":
        return torch.eye(n, dtype=gram.dtype)
    if mix == "nnm":
        near = nearest(gram, n - liars)
        return torch.zeros(n, n, dtype=gram.dtype).scatter_(1, near, 1.0 / near.shape[1])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(draw))
    made = torch.zeros(-(-n // BUCKET), n, dtype=gram.dtype)
    for row, members in enumerate(torch.split(order, BUCKET)):
        made[row, members] = 1.0 / len(members)
    return made
