"""The samples of one member: blocks of batches that the group's controller assigns, each to one member only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from planaria.common.errors import UserError
from planaria.group.settings import SharedData

_Batch = TypeVar("_Batch")


class Blocks(Protocol):
    """Batches by number, for any number of epochs."""

    samples: int
    """samples in an epoch; 0: unknown"""
    block_samples: int
    """samples of a full block"""

    def count(self, epochs: int) -> int:
        """Return the number of blocks in ``epochs`` epochs; 0: unknown."""

    def batches(self, block: int) -> Iterator[Any]:
        """Yield the batches of a block."""


class Shard:
    """The batches of one member; ``len`` is the number for all members together. It can be iterated once."""

    def __init__(
        self,
        batches: Callable[[Blocks, SharedData], Iterator[Any]],
        blocks: Blocks,
        data: SharedData,
        accumulate: int,
    ) -> None:
        self._batches = batches
        self._blocks = blocks
        self._data = data
        self._accumulate = accumulate

    def __len__(self) -> int:
        return self._data.blocks * self._accumulate

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._blocks, self._data)


class MappedBlocks:
    """Blocks of a ``DataLoader`` over a dataset with an index. Each epoch has another order, determined by the seed."""

    def __init__(self, loader: DataLoader[Any], accumulate: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        """``rank``: the part of each block to read, of ``ranks`` parts of ``accumulate`` batches.

        :raises UserError: if the loader chooses its own samples, which cannot be divided among members."""
        self._data = loader.dataset
        self._collate = loader.collate_fn
        self._pin = loader.pin_memory
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            raise UserError("shard: a custom batch_sampler cannot be divided among members; set batch_size instead")
        if type(loader.sampler) not in (RandomSampler, SequentialSampler):
            raise UserError(
                f"shard: {type(loader.sampler).__name__} cannot be divided among members; use shuffle=True, or none"
            )
        if getattr(loader.sampler, "replacement", False) or getattr(loader.sampler, "_num_samples", None) is not None:
            raise UserError("shard: a sampler with replacement or num_samples cannot be divided; use shuffle=True")
        self._shuffled, self._seed = isinstance(loader.sampler, RandomSampler), seed
        self._batch, self._block, self._part = loader.batch_size, accumulate * ranks, (rank, ranks)
        self.samples, self.block_samples = len(self._data), self._batch * self._block  # type: ignore[arg-type]
        full, rest = divmod(self.samples, self._batch)
        self._per_epoch = full + (rest > 0 and not loader.drop_last)
        if not self._per_epoch:
            raise UserError(
                f"shard: {self.samples} samples are fewer than batch_size = {self._batch}; lower it, or set "
                "drop_last=False"
            )
        self._threads = ThreadPoolExecutor(loader.num_workers) if loader.num_workers else None
        self._epoch = -1
        self._order = torch.empty(0)
        self._limit = math.inf

    def count(self, epochs: int) -> int:
        self._limit = epochs * self._per_epoch
        return math.ceil(self._limit / self._block)

    def batches(self, block: int) -> Iterator[Any]:
        """Yield the batches of a block, which may begin in one epoch and end in the next."""
        first = block * self._block
        for batch in part(range(first, int(min(first + self._block, self._limit))), *self._part):
            epoch, number = divmod(batch, self._per_epoch)
            yield self._read(self._sample_order(epoch)[number * self._batch : (number + 1) * self._batch].tolist())

    def _sample_order(self, epoch: int) -> Tensor:
        """Return the order of samples in an epoch, equal at all members."""
        if epoch != self._epoch and (self._shuffled or not len(self._order)):
            generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
            order = torch.randperm(self.samples, generator=generator) if self._shuffled else torch.arange(self.samples)
            self._epoch, self._order = epoch, order
        return self._order

    def _read(self, numbers: list[int]) -> Any:
        if fetch := getattr(self._data, "__getitems__", None):
            batch = self._collate(fetch(numbers))
        else:
            each = map if self._threads is None else self._threads.map
            batch = self._collate([*each(self._data.__getitem__, numbers)])
        return _pin_memory(batch) if self._pin and torch.cuda.is_available() else batch


def _pin_memory(batch: Any) -> Any:
    """Return a batch in page-locked memory, as a ``DataLoader`` does it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


class StreamedBlocks:
    """Blocks of a loader that is read in order, such as one of an ``IterableDataset``.

    Every member reads the whole stream and uses its own blocks. A block before the current position, of a member that
    was lost, starts the stream again; so the stream must be the same in each iteration and at each member.
    """

    samples = 0

    def __init__(self, loader: Iterable[Any], accumulate: int, batch: int, rank: int = 0, ranks: int = 1) -> None:
        self._loader = loader
        self._block, self._part = accumulate * ranks, (rank, ranks)
        self.block_samples = batch * self._block
        self._position, self._stream = 0, iter(loader)

    def count(self, epochs: int) -> int:
        return 0

    def batches(self, block: int) -> Iterator[Any]:
        if block < self._position:
            self._position, self._stream = 0, iter(self._loader)
        skipped = (block - self._position) * self._block
        self._position = block + 1
        batches = list(itertools.islice(self._stream, skipped, skipped + self._block))
        if not batches:
            raise UserError(f"shard: the stream ends before block {block}; lower steps, or use a longer stream")
        yield from part(batches, *self._part)


def part(batches: Sequence[_Batch], rank: int, ranks: int) -> list[_Batch]:
    """Return a rank's part of the batches of a block; all parts have the same length.

    In an incomplete block, some batches belong to two parts, as samples do with a ``DistributedSampler``.
    """
    each = math.ceil(len(batches) / ranks)
    return [batches[(turn * ranks + rank) % len(batches)] for turn in range(each)]


def blocks_of(loader: Iterable[Any], accumulate: int, seed: int, rank: int = 0, ranks: int = 1) -> Blocks:
    """Return the blocks of a loader: ``accumulate`` batches for each rank.

    :raises UserError: if it cannot be divided among members.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return MappedBlocks(loader, accumulate, seed, rank, ranks)
    size = loader.batch_size if isinstance(loader, DataLoader) else None
    return StreamedBlocks(loader, accumulate, size or 1, rank, ranks)


def mark_last(batches: Iterator[Any]) -> Iterator[tuple[bool, Any]]:
    """Yield each batch, and whether it is the last one."""
    batch_list = list(itertools.islice(batches, 1))
    for batch in batches:
        yield False, batch_list[0]
        batch_list = [batch]
    for batch in batch_list:
        yield True, batch
