"""Sample ``n`` of seed ``s``: the data order depends on a run's progress only, not on its readers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.data.dataset import LEARNED, START, Data, Dataset, Split
from planaria.data.mixture import SourceOrder
from planaria.data.permutation import permute
from planaria.models.chunked_loss import IGNORED

BatchReader = Callable[[int], tuple[Tensor, Tensor]]
"""microbatch → (tokens, targets), both [microbatch_size, context] int64"""


class Stream:
    """An endless sequence of samples from one split, reshuffled in every epoch of each source.

    A sample of text is a window of ``context`` tokens plus the next one. Windows are consecutive, overlap in that one
    token only, and occur once per epoch; so do rows of dialogues. In a mixture, sample ``n`` is the next one of its
    source (:class:`SourceOrder`).

    :raises UserError: if a source's split is shorter than one sample.
    """

    def __init__(self, data: Data, split: Split, context: int, seed: int) -> None:
        self.context = context
        self.turns = SourceOrder(data.quotas, seed)
        self.sources = {name: _Source(name, dataset, split, context, seed) for name, dataset in data.parts.items()}
        self._in_order = list(self.sources.values())
        self.windows = sum(source.windows for source in self._in_order)

    @cached_property
    def rows(self) -> bool:
        """Whether samples are rows of dialogues, in which only some tokens are targets."""
        return any(source.rows for source in self._in_order)

    def sample(self, n: int) -> Tensor:
        """Return sample ``n`` ≥ 0: int64 [context + 1], a pure function of seed and ``n``."""
        return torch.from_numpy(self._window(n))

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return samples ``first`` .. ``first + count - 1`` as tokens and targets: int64 [count, context] each.

        Tokens that are not learned have the target :data:`IGNORED`.
        """
        numbers = range(first, first + count)
        windows = torch.from_numpy(np.stack([self._window(n) for n in numbers]))
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if self.rows:
            targets = targets.clone()  # of one sample, both are views
            targets[~torch.from_numpy(self.learned(first, count))] = IGNORED
        return tokens, targets

    def documents(self, first: int, tokens: Tensor) -> Tensor:
        """Return the number of each token's document within its sample: int64 [B, context].

        ``tokens`` [B, context] are those of samples ``first`` .. ``first + B - 1``.
        """
        numbers = []
        for n, ids in enumerate(tokens, start=first):
            source, turn = self.turns.at(n)
            numbers.append(self._in_order[source].starts(turn, ids).cumsum(0))
        return torch.stack(numbers)

    def learned(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Return whether each target of ``count`` samples from ``first`` is learned: bool [count, context]."""
        return np.stack([self._targets(n) for n in range(first, first + count)])

    def _window(self, n: int) -> npt.NDArray[np.int64]:
        source, turn = self.turns.at(n)
        return self._in_order[source].window(turn)

    def _targets(self, n: int) -> npt.NDArray[np.bool_]:
        """Return whether each of a sample's next tokens is learned: bool [context]."""
        source, turn = self.turns.at(n)
        return self._in_order[source].targets(turn)


class _Source:
    """The samples of one source, in shuffled order."""

    def __init__(self, name: str, dataset: Dataset, split: Split, context: int, seed: int) -> None:
        self.windows, self.rows = dataset.windows(split, context), dataset.meta.row > 0
        self._dataset = dataset
        self._split = split
        self._context = context
        self._seed, self._suffix = seed, f" {name}" if name else ""
        if not self.windows:
            of, label = (f" of data.mixture.{name}", "source") if name else ("", "data.source")
            if self.rows:
                alternative = "a smaller" if split == "train" else "train.eval_every = 0 or a larger"
                fix = f"use a longer {label}, or {alternative} data.validation"
                raise UserError(f"the {split} split{of} has no dialogue; {fix}")
            raise UserError(
                f"the {split} split{of} has {dataset.tokens(split)} tokens, but one sample takes model.context + 1 = "
                f"{context + 1}; use a longer {label}, another data.validation or a smaller model.context"
            )
        if self.rows and dataset.meta.row != context + 1:
            raise ValueError(f"rows of {dataset.meta.row} tokens cannot be cut into samples of {context + 1}")

    def window(self, position: int) -> npt.NDArray[np.int64]:
        """Return the ids of the sample at ``position`` of this source: int64 [context + 1]."""
        return self._dataset.window(self._split, self._number(position), self._context)

    def targets(self, position: int) -> npt.NDArray[np.bool_]:
        """Return whether each next token is learned: bool [context]."""
        if not self.rows:
            return np.ones(self._context, np.bool_)
        marks = self._dataset.marks(self._split, self._number(position))
        return (marks[1:] & LEARNED).astype(np.bool_)

    def starts(self, position: int, ids: Tensor) -> Tensor:
        """Return whether each token is the first of its document: bool [context]."""
        if not self.rows:  # a separator is the first token of the next document
            return ids == self._separator
        return torch.from_numpy(self._dataset.marks(self._split, self._number(position))[:-1] & START != 0)

    @cached_property
    def _separator(self) -> int:
        return self._dataset.separator(self._split)

    def _number(self, position: int) -> int:
        epoch, within = divmod(position, self.windows)
        # Each epoch has its own key, so that orders are independent.
        key = hashlib.sha256(f"{self._seed} {epoch}{self._suffix}".encode()).digest()
        return permute(within, self.windows, key)
