"""Mixtures: exact shares in every block, even shares at every length, and each source's windows in order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.bounds import MAX_MIXTURE_PERIOD
from planaria.config.schema import DataConfig
from planaria.data import shards, tokenizer
from planaria.data.dataset import CorruptDataset, Mixture, open_data
from planaria.data.mixture import SourceOrder, quotas
from planaria.data.shards import Dataset, tokenise_corpus
from planaria.data.stream import Stream
from planaria.data.tokenizer import load_tokenizer, train_bpe

CONTEXT = 8
LETTERS = {"books": "b", "code": "c", "web": "w"}
Given = dict[str, Any]


def mixture(folder: Path, weights: dict[str, float], sizes: dict[str, int] | None = None, **further: Any) -> DataConfig:
    """Sources of one letter each, ``sizes`` tokens long."""
    entries: Given = {}
    for name, weight in weights.items():
        text = LETTERS[name] * (sizes or {}).get(name, 400)
        file = folder / f"{name}.txt"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        entries[name] = {"source": str(file), "weight": weight}
    given: Given = {"tokenizer": "bytes", "validation": 0.1, "cache": str(folder / "cache")}
    return DataConfig.model_validate({"mixture": entries, **given, **further})


def weighed(*weights: float) -> tuple[int, ...]:
    entries = {f"s{i:03}": {"source": "stdlib", "weight": weight} for i, weight in enumerate(weights)}
    return quotas(DataConfig.model_validate({"mixture": entries}))


def test_a_block_is_the_smallest_with_exact_weights() -> None:
    assert weighed(0.7, 0.2, 0.1) == (7, 2, 1)
    assert weighed(70, 20, 10) == (7, 2, 1)
    assert weighed(1.0) == (1,)
    assert weighed(0.3333, 0.6667) == (3333, 6667)
    assert quotas(DataConfig()) == (1,)


@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=9))
def test_inexact_weights_are_met_within_a_ten_thousandth(weights: list[float]) -> None:
    found, total = weighed(*weights), sum(weights)
    assert sum(found) <= MAX_MIXTURE_PERIOD and min(found) > 0
    for quota, weight in zip(found, weights, strict=True):
        assert abs(quota / sum(found) - weight / total) < 1 / MAX_MIXTURE_PERIOD


@settings(max_examples=40)
@given(
    shares=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    seed=st.integers(0, 2**40),
    first=st.integers(0, 10**12),
)
def test_shares_are_exact_in_every_block_and_even_at_every_length(shares: list[int], seed: int, first: int) -> None:
    turns, size = SourceOrder(tuple(shares), seed), sum(shares)
    start = first // size * size
    found = Counter[int]()
    for n in range(start, start + 2 * size):
        before = turns.before(n)
        assert sum(before) == n
        assert all(abs(b - n * w / size) < 1 + len(shares) * w / size for b, w in zip(before, shares, strict=True))
        source, turn = turns.at(n)
        assert turn == before[source] == start // size * shares[source] + found[source]
        found[source] += 1
    assert found == {source: 2 * share for source, share in enumerate(shares)}


def test_every_second_sample_has_the_same_shares() -> None:
    turns = SourceOrder((5, 4, 1), seed=3)
    for lane in (0, 1):
        read = Counter(turns.at(n)[0] for n in range(lane, 20_000, 2))
        assert all(abs(read[s] / 10_000 - share) < 0.02 for s, share in enumerate((0.5, 0.4, 0.1)))


def test_orders_depend_on_seed_and_block() -> None:
    orders = {
        tuple(SourceOrder((7, 2, 1), seed).at(10 * block + i)[0] for i in range(10))
        for seed in (1, 2)
        for block in (0, 1, 2)
    }
    assert len(orders) > 3


def test_each_epoch_of_a_source_has_every_window_once(tmp_path: Path) -> None:
    data = mixture(tmp_path, {"books": 0.7, "code": 0.2, "web": 0.1})
    numbered = np.arange(10_000)
    stream = Stream(tokenise_corpus(data, 257), "train", CONTEXT, seed=7)
    for place, (name, source) in enumerate(stream.sources.items()):
        assert source.windows == 45 and list(LETTERS)[place] == name
    # The position of a read identifies its window.
    read: dict[str, list[int]] = {}
    for name, source in stream.sources.items():

        def at(split: str, start: int, count: int, name: str = name) -> Any:
            read.setdefault(name, []).append(start // CONTEXT)
            return numbered[start : start + count]

        source._dataset.read = at  # type: ignore[method-assign, assignment]
    stream.batch(0, 150)
    assert {name: len(windows) for name, windows in read.items()} == {"books": 105, "code": 30, "web": 15}
    for windows in read.values():
        for epoch in range(0, len(windows), 45):
            part = windows[epoch : epoch + 45]
            assert len(set(part)) == len(part)
    assert sorted(read["books"][:45]) == sorted(read["books"][45:90]) == list(range(45))
    assert read["books"][:45] != read["books"][45:90] != list(range(45))


def test_a_reopened_mixture_has_the_same_samples(tmp_path: Path) -> None:
    data = mixture(tmp_path, {"books": 0.5, "code": 0.5})
    made = tokenise_corpus(data, 257)
    assert isinstance(made, Mixture)
    one, other = (Stream(d, "train", CONTEXT, 5) for d in (made, open_data(made.folder)))
    for n in (0, 3, 17, 1000):
        assert one.sample(n).tolist() == other.sample(n).tolist()
    letters = Counter(chr(int(one.sample(n)[0])) for n in range(40))
    assert letters == {"b": 20, "c": 20}
    assert made.windows("validation", CONTEXT) == 10 and made.windows("validation", 50) == 0


def test_sources_are_tokenised_once_for_all_mixtures(tmp_path: Path) -> None:
    reports: list[str] = []
    first = tokenise_corpus(mixture(tmp_path, {"books": 0.5, "code": 0.5}), 257, reports.append)
    assert len([line for line in reports if line.startswith("tokenising")]) == 2
    reports.clear()
    second = tokenise_corpus(mixture(tmp_path, {"web": 2, "books": 1}), 257, reports.append)
    assert [line for line in reports if line.startswith("tokenising")] == [f"tokenising {tmp_path / 'web.txt'}"]
    assert first.parts["books"].folder == second.parts["books"].folder
    alone = tokenise_corpus(
        DataConfig(source=str(tmp_path / "web.txt"), tokenizer="bytes", validation=0.1, cache=str(tmp_path / "cache")),
        257,
    )
    assert alone.folder == second.parts["web"].folder
    assert [folder.exists() for folder in second.folders] == [True] * 3


def test_a_damaged_source_is_refused_and_prepared_again(tmp_path: Path) -> None:
    data = mixture(tmp_path, {"books": 0.5, "code": 0.5})
    made = tokenise_corpus(data, 257)
    (made.parts["code"].folder / "train.bin").write_bytes(b"x")
    with pytest.raises(CorruptDataset, match=r"train\.bin has 1 bytes"):
        open_data(made.folder)
    tokenise_corpus(data, 257)
    open_data(made.folder)
    (made.folder / "mixture.json").write_text('{"format": 1, "parts": {"x": {"folder": "../up", "quota": 1}}}')
    with pytest.raises(CorruptDataset, match=r"mixture\.json: parts\.x\.folder"):
        open_data(made.folder)
    assert open_data(tokenise_corpus(data, 257).folder).folder == made.folder


def test_the_tokenizer_is_trained_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short source counts by its share, as if it were as long as the others."""
    texts: list[list[str]] = []

    def trained(given: Any, vocab: int) -> Any:
        texts.append(list(given))
        return train_bpe(texts[-1], vocab)

    monkeypatch.setattr(tokenizer, "train_bpe", trained)
    data = mixture(tmp_path, {"books": 0.75, "code": 0.25}, {"books": 3000, "code": 100}, tokenizer="bpe")
    load_tokenizer(data, 300, tmp_path / "cache")
    counted = Counter("".join(texts[0]))
    assert counted == {"b": 3000, "c": 1000}
    load_tokenizer(data, 300, tmp_path / "cache")
    heavier = mixture(tmp_path, {"books": 0.5, "code": 0.5}, {"books": 3000, "code": 100}, tokenizer="bpe")
    load_tokenizer(heavier, 300, tmp_path / "cache")
    assert len(texts) == 2 and Counter("".join(texts[1])) == {"b": 3000, "c": 3000}


def test_errors_name_the_source_of_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "books.jsonl").write_text(json.dumps({"body": "text " * 99}) + "\n")
    entries: Given = {"books": {"source": str(tmp_path / "books.jsonl"), "weight": 1}}
    given: Given = {"tokenizer": "bytes", "cache": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"no field 'text' .*; set data\.mixture\.books\.field"):
        tokenise_corpus(DataConfig.model_validate({"mixture": entries, **given}), 257)
    entries["books"]["field"] = "body"
    tokenise_corpus(DataConfig.model_validate({"mixture": entries, **given}), 257)
    entries["code"] = {"source": str(tmp_path / "nowhere"), "weight": 1}
    with pytest.raises(UserError, match=r"data\.mixture\.code\.source = .*nowhere'"):
        tokenise_corpus(DataConfig.model_validate({"mixture": entries, **given}), 257)
    short = mixture(tmp_path, {"books": 1, "web": 1}, {"web": 5})
    with pytest.raises(UserError, match=r"the train split of data\.mixture\.web has 6 tokens.*use a longer source"):
        Stream(tokenise_corpus(short, 257), "train", CONTEXT, seed=1)


def test_the_order_of_a_single_source_is_pinned(tmp_path: Path) -> None:
    """Resumed runs depend on it."""
    (tmp_path / "a.txt").write_bytes(bytes(33 + i % 90 for i in range(900)))
    data = DataConfig(source=str(tmp_path / "a.txt"), tokenizer="bytes", cache=str(tmp_path / "cache"))
    made = tokenise_corpus(data, 257)
    assert isinstance(made, Dataset)
    stream = Stream(made, "train", CONTEXT, seed=11)
    assert [int(stream.sample(n)[0]) for n in (0, 1, 2, 109, 110, 250)] == PINNED
    assert shards.FORMAT == 1


PINNED = [97, 77, 33, 99, 73, 51]
