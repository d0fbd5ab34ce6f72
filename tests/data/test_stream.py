"""Streams, a pure function of seed and number, and the keyed permutation of their windows."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data.permutation import permute
from planaria.data.shards import Dataset, tokenise_corpus
from planaria.data.stream import Stream

WORDS = 5000
CONTEXT = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """One document whose tokens are their positions: characters U+4E00, U+4E01, … with one id each."""
    folder = tmp_path_factory.mktemp("stream")
    letters = [chr(0x4E00 + i) for i in range(WORDS)]
    tokens = {letter: i for i, letter in enumerate(letters)} | {"</s>": WORDS}
    model = {"type": "BPE", "vocab": tokens, "merges": []}
    (folder / "t.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "text.txt").write_text("".join(letters))
    data = DataConfig(
        source=str(folder / "text.txt"), tokenizer=str(folder / "t.json"), validation=0.1, cache=str(folder / "cache")
    )
    return tokenise_corpus(data, WORDS + 1)


def test_windows_are_consecutive_and_shifted_by_one(dataset: Dataset) -> None:
    stream = Stream(dataset, "train", CONTEXT, seed=1)
    assert stream.windows == WORDS * 9 // 10 // CONTEXT
    sample = stream.sample(3)
    assert sample.dtype == torch.int64 and sample.shape == (CONTEXT + 1,)
    assert sample[0] % CONTEXT == 0
    assert torch.equal(sample.diff(), torch.ones(CONTEXT, dtype=torch.int64))


def test_a_batch_consists_of_its_samples(dataset: Dataset) -> None:
    stream = Stream(dataset, "train", CONTEXT, seed=1)
    first = stream.windows - 2  # over the end of an epoch
    tokens, targets = stream.batch(first, 5)
    assert tokens.shape == targets.shape == (5, CONTEXT) and tokens.is_contiguous() and targets.is_contiguous()
    for row in range(5):
        assert torch.equal(stream.sample(first + row), torch.cat([tokens[row], targets[row, -1:]]))


@settings(max_examples=20, deadline=None)
@given(workers=st.integers(1, 9), epoch=st.integers(0, 3), seed=st.integers(0, 2**40), data=st.data())
def test_an_epoch_has_every_window_once_for_any_division_among_workers(
    dataset: Dataset, workers: int, epoch: int, seed: int, data: st.DataObject
) -> None:
    windows = dataset.windows("train", CONTEXT)
    cuts = sorted(data.draw(st.lists(st.integers(0, windows), min_size=workers - 1, max_size=workers - 1)))
    seen: list[int] = []
    for start, stop in zip([0, *cuts], [*cuts, windows], strict=True):
        if stop > start:
            stream = Stream(Dataset.open(dataset.folder), "train", CONTEXT, seed)  # every worker opens its own
            seen += stream.batch(epoch * windows + start, stop - start)[0][:, 0].tolist()
    assert sorted(seen) == list(range(0, windows * CONTEXT, CONTEXT))


def test_seeds_and_epochs_differ(dataset: Dataset) -> None:
    one, other = Stream(dataset, "train", CONTEXT, seed=1), Stream(dataset, "train", CONTEXT, seed=2)
    orders = [s.batch(e * s.windows, s.windows)[0][:, 0].tolist() for s in (one, other) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(0, one.windows * CONTEXT, CONTEXT)) not in orders
    again = Stream(dataset, "train", CONTEXT, seed=1)
    assert again.batch(0, again.windows)[0][:, 0].tolist() == orders[0]


def test_validation_and_training_do_not_overlap(dataset: Dataset) -> None:
    places = {}
    for split in ("train", "validation"):
        stream = Stream(dataset, split, CONTEXT, seed=1)
        tokens, targets = stream.batch(0, stream.windows)
        places[split] = set(tokens.flatten().tolist()) | set(targets.flatten().tolist()) - {WORDS}
    assert max(places["train"]) < min(places["validation"])


@pytest.mark.parametrize(("split", "context"), [("train", 4501), ("validation", 501)])
def test_a_split_shorter_than_a_window_is_refused(dataset: Dataset, split: str, context: int) -> None:
    """Each split ends with a separator: 4,501 and 501 tokens."""
    message = rf"the {split} split has {context} tokens, but one sample takes model.context \+ 1 = {context + 1}; use"
    with pytest.raises(UserError, match=message):
        Stream(dataset, split, context, seed=1)  # type: ignore[arg-type]
    assert Stream(dataset, split, context - 1, seed=1).windows == 1  # type: ignore[arg-type]


keys = st.binary(min_size=0, max_size=64)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5000), key=keys)
def test_every_index_has_its_own_image(size: int, key: bytes) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@given(size=st.integers(50, 10**15), one=keys, other=keys)
def test_another_key_gives_another_order(size: int, one: bytes, other: bytes) -> None:
    indices = range(30)
    if one != other and one.rstrip(b"\0") != other.rstrip(b"\0"):
        assert [permute(i, size, one) for i in indices] != [permute(i, size, other) for i in indices]


def test_the_order_is_pinned() -> None:
    """Resumed runs depend on it."""
    assert [permute(i, 10, b"planaria") for i in range(10)] == [6, 5, 3, 9, 4, 7, 0, 2, 8, 1]


def test_neighbours_are_scattered() -> None:
    """Of 4,999 ascending neighbours, about one remains in a random order."""
    order = [permute(i, 5000, b"key") for i in range(5000)]
    assert sum(b == a + 1 for a, b in pairwise(order)) < 15
    half = sum(order[:2500]) / 2500
    assert abs(half - 2499.5) < 100  # five standard errors of the mean of half of them


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        permute(index, 7, b"")
