"""Sample ``n`` of seed ``s``: the data order depends on a run's progress only, not on its readers."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.data.dataset import Data, Dataset, Split
from planaria.data.mixture import Turns
from planaria.data.permutation import permute


class Stream:
    """An endless sequence of samples from one split, reshuffled in every epoch of each source.

    A sample is a window of ``context`` tokens plus the next one. Windows are consecutive, overlap in that one token
    only, and occur once per epoch. In a mixture, sample ``n`` is the next window of its source (:class:`Turns`).

    :raises UserError: if a source's split is shorter than one window.
    """

    def __init__(self, data: Data, split: Split, context: int, seed: int) -> None:
        self.context = context
        self.turns = Turns(data.quotas, seed)
        self.sources = {name: _Source(name, part, split, context, seed) for name, part in data.parts.items()}
        self._in_order = list(self.sources.values())
        self.windows = sum(source.windows for source in self._in_order)
        self._data, self._split = data, split

    @cached_property
    def separator(self) -> int:
        """The id between documents, common to all sources."""
        return next(iter(self._data.parts.values())).separator(self._split)

    def sample(self, n: int) -> Tensor:
        """Return sample ``n`` ≥ 0: int64 [context + 1], a pure function of seed and ``n``."""
        return torch.from_numpy(self._window(n))

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return samples ``first`` .. ``first + count - 1`` as tokens and targets: int64 [count, context] each."""
        windows = torch.from_numpy(np.stack([self._window(n) for n in range(first, first + count)]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _window(self, n: int) -> npt.NDArray[np.int64]:
        source, turn = self.turns.at(n)
        return self._in_order[source].window(turn)


class _Source:
    """The windows of one source, in shuffled order."""

    def __init__(self, name: str, dataset: Dataset, split: Split, context: int, seed: int) -> None:
        self.windows = dataset.windows(split, context)
        self._dataset, self._split, self._context = dataset, split, context
        self._seed, self._suffix = seed, f" {name}" if name else ""
        if not self.windows:
            of, what = (f" of data.mixture.{name}", "source") if name else ("", "data.source")
            raise UserError(
                f"the {split} split{of} has {dataset.tokens(split)} tokens, but one sample takes model.context + 1 = "
                f"{context + 1}; use a longer {what}, another data.validation or a smaller model.context"
            )

    def window(self, turn: int) -> npt.NDArray[np.int64]:
        """Return the window of a turn: int64 [context + 1]."""
        epoch, position = divmod(turn, self.windows)
        # Each epoch has its own key, so that orders are independent.
        key = hashlib.sha256(f"{self._seed} {epoch}{self._suffix}".encode()).digest()
        window = permute(position, self.windows, key)
        return self._dataset.read(self._split, window * self._context, self._context + 1)
