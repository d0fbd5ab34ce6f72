"""Sample ``n`` of seed ``s``: what is read next depends on how far the run is, never on who reads it."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.data.permutation import permute
from planaria.data.shards import Dataset, Split
from planaria.errors import UserError


class Stream:
    """An endless sequence of samples from one split, shuffled anew in every epoch.

    A sample is a window: ``context`` tokens and the one after them. Windows are consecutive and overlap in that one
    token only, and an epoch holds each of them once. Raises UserError if the split is shorter than one window.
    """

    def __init__(self, dataset: Dataset, split: Split, context: int, seed: int) -> None:
        self.windows = dataset.windows(split, context)
        self.context = context
        self._dataset, self._split, self._seed = dataset, split, seed
        if not self.windows:
            raise UserError(
                f"the {split} split has {dataset.tokens(split)} tokens, but one sample takes model.context + 1 = "
                f"{context + 1}; use a longer data.source, another data.validation or a smaller model.context"
            )

    def sample(self, n: int) -> Tensor:
        """Sample ``n`` ≥ 0: int64 [context + 1], a pure function of seed and ``n``."""
        return torch.from_numpy(self._window(n))

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples ``first`` .. ``first + count - 1`` as tokens and their targets: int64 [count, context] each."""
        windows = torch.from_numpy(np.stack([self._window(n) for n in range(first, first + count)]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _window(self, n: int) -> npt.NDArray[np.int64]:
        epoch, position = divmod(n, self.windows)
        # A key of its own for every epoch: another order each time, and none that follows from the one before.
        key = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
        window = permute(position, self.windows, key)
        return self._dataset.read(self._split, window * self.context, self.context + 1)
