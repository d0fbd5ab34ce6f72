"""Blocks of a loader: every sample in one block of each epoch, the same at all members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from planaria.common.errors import UserError
from planaria.group.shard import MappedBlocks, StreamedBlocks, blocks_of


def read(blocks: MappedBlocks, block: int) -> list[int]:
    return [number for batch in blocks.batches(block) for number in batch.tolist()]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 5))
def test_every_epoch_has_every_sample_once(
    count: int, batch: int, accumulate: int, shuffled: bool, drops: bool, seed: int
) -> None:
    loader = DataLoader(list(range(count)), batch, shuffle=shuffled, drop_last=drops)  # type: ignore[arg-type]
    if drops and count < batch:
        with pytest.raises(UserError, match="fewer than batch_size"):
            blocks_of(loader, accumulate, seed)
        return
    blocks, again = MappedBlocks(loader, accumulate, seed), MappedBlocks(loader, accumulate, seed)
    numbers, in_epoch = range(blocks.count(2)), count // batch * batch if drops else count
    assert again.count(2) == len(numbers)
    used = [sample for number in numbers for sample in read(blocks, number)]
    for epoch in (used[:in_epoch], used[in_epoch:]):
        assert len(set(epoch)) == len(epoch) == in_epoch
    backwards = {number: read(again, number) for number in reversed(numbers)}
    assert used == [sample for number in numbers for sample in backwards[number]]
    assert all(len([*blocks.batches(number)]) == accumulate for number in numbers[:-1]), "only the last one is short"


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_ranks_divide_each_block_into_parts_of_equal_length(
    count: int, batch: int, accumulate: int, ranks: int
) -> None:
    loader = DataLoader(list(range(count)), batch, shuffle=True)  # type: ignore[arg-type]
    whole = MappedBlocks(loader, accumulate * ranks, 0)
    parts = [MappedBlocks(loader, accumulate, 0, rank, ranks) for rank in range(ranks)]
    assert {part.count(1) for part in parts} == {whole.count(1)}
    for number in range(whole.count(1)):
        read_here = [read(part, number) for part in parts]
        assert len({len([*part.batches(number)]) for part in parts}) == 1
        assert {sample for part in read_here for sample in part} == set(read(whole, number))
        if number < whole.count(1) - 1:
            assert sorted(sample for part in read_here for sample in part) == sorted(read(whole, number))
    stream = [blocks_of(DataLoader(Counting(), 4), 2, 0, rank, 2) for rank in (0, 1)]
    assert [[b.tolist()[0] for b in blocks.batches(1)] for blocks in stream] == [[16, 24], [20, 28]]


def test_epochs_differ_and_seeds_do() -> None:
    loader = DataLoader(list(range(100)), 10, shuffle=True)  # type: ignore[arg-type]
    one, other = MappedBlocks(loader, 1, 0), MappedBlocks(loader, 1, 1)
    assert read(one, 0) != read(one, 10) and read(one, 0) != read(other, 0)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


def test_a_stream_is_read_by_number_also_backwards() -> None:
    blocks = blocks_of(DataLoader(Counting(), 4), 2, 0)
    assert isinstance(blocks, StreamedBlocks) and blocks.block_samples == 8
    assert [batch.tolist() for batch in blocks.batches(2)] == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert [batch.tolist() for batch in blocks.batches(4)] == [[32, 33, 34, 35], [36, 37, 38, 39]]
    assert [batch.tolist() for batch in blocks.batches(0)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(UserError, match="the stream ends before block 5"):
        list(blocks.batches(5))


def test_loaders_that_cannot_be_divided_are_named() -> None:
    data = list(range(10))
    weighted = DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 10, 10))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="WeightedRandomSampler cannot be divided"):
        blocks_of(weighted, 1, 0)

    class Own(BatchSampler): ...

    with pytest.raises(UserError, match="replacement or num_samples"):
        blocks_of(DataLoader(data, 2, sampler=RandomSampler(data, num_samples=4)), 1, 0)  # type: ignore[arg-type]

    with pytest.raises(UserError, match="custom batch_sampler"):
        own = Own(SequentialSampler(data), 2, False)
        blocks_of(DataLoader(data, batch_sampler=own), 1, 0)  # type: ignore[arg-type]


def test_an_own_collator_and_fetches_of_whole_batches_are_kept() -> None:
    class Fetches(list[int]):
        def __getitems__(self, numbers: list[int]) -> list[int]:
            return [100 + number for number in numbers]

    threaded = DataLoader(list(range(6)), 3, num_workers=2)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in MappedBlocks(threaded, 1, 0).batches(1)] == [[3, 4, 5]]
    loader = DataLoader(Fetches(range(6)), 3, collate_fn=torch.tensor)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in MappedBlocks(loader, 1, 0).batches(1)] == [[103, 104, 105]]
