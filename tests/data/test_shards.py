"""Preparing a corpus: ids on disk, caching, damage, concurrency, and rows of dialogues."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data import shards
from planaria.data.dataset import LEARNED, START
from planaria.data.dialogues import Dialogue, DialogueCounts, Packer, learnable_dialogues, pad_row, split
from planaria.data.shards import CorruptDataset, Dataset, tokenise_corpus
from planaria.data.tokenizer import Tokenizer

END = 256


def config(tmp_path: Path, *texts: str, validation: float = 0.1) -> DataConfig:
    """A corpus of these documents, tokenised as bytes."""
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(source=str(file), tokenizer="bytes", validation=validation, cache=str(tmp_path / "cache"))


def everything(dataset: Dataset, split: shards.Split) -> list[int]:
    return dataset.read(split, 0, dataset.tokens(split)).tolist()


def test_the_end_of_every_document_is_held_out(tmp_path: Path) -> None:
    dataset = tokenise_corpus(config(tmp_path, "a" * 20, "b" * 40, validation=0.25), 257)
    assert everything(dataset, "train") == [97] * 15 + [END] + [98] * 30 + [END]
    assert everything(dataset, "validation") == [97] * 5 + [END] + [98] * 10 + [END]
    assert dataset.windows("train", 4) == 11  # 47 tokens, and the 48th as the last target
    assert dataset.windows("train", 46) == 1
    assert dataset.windows("train", 47) == 0


def test_short_documents_are_held_out_too(tmp_path: Path) -> None:
    dataset = tokenise_corpus(config(tmp_path, *["abcd"] * 100, validation=0.02), 257)
    assert everything(dataset, "validation") == [ord("d"), END] * 8


def test_nothing_is_held_out_at_zero(tmp_path: Path) -> None:
    dataset = tokenise_corpus(config(tmp_path, "abc", validation=0.0), 257)
    assert (dataset.tokens("train"), dataset.tokens("validation"), dataset.windows("validation", 1)) == (4, 0, 0)
    assert not (dataset.folder / "validation.bin").exists()


def test_reads_across_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokenise_corpus(config(tmp_path, "abcdefghij" * 10, "k" * 23), 257)
    monkeypatch.setattr(shards, "SHARD", 16)
    (tmp_path / "cut").mkdir()
    cut = tokenise_corpus(config(tmp_path / "cut", "abcdefghij" * 10, "k" * 23), 257)
    assert (cut.folder / "train.6.bin").exists() and not (whole.folder / "train.1.bin").exists()
    assert cut.tokens("train") == whole.tokens("train")
    for start in range(0, 60, 7):
        assert np.array_equal(cut.read("train", start, 50), whole.read("train", start, 50))


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 5), (4, 1)])
def test_reading_beyond_the_ends_is_an_error(tmp_path: Path, start: int, count: int) -> None:
    dataset = tokenise_corpus(config(tmp_path, "abc", validation=0.0), 257)
    with pytest.raises(IndexError):
        dataset.read("train", start, count)


def test_large_vocabularies_have_32_bit_ids(tmp_path: Path) -> None:
    data = config(tmp_path, "word " * 30)
    written = json.loads(Tokenizer.open(tokenise_corpus(data, 257).tokenizer_file).to_json())
    vocabulary = written["model"]["vocab"]
    vocabulary["w"] = 70_000
    (tmp_path / "wide.json").write_text(json.dumps(written))
    wide = tokenise_corpus(data.model_copy(update={"tokenizer": str(tmp_path / "wide.json")}), 70_001)
    assert wide.meta.dtype == "uint32"
    assert everything(wide, "train")[:5] == [70_000, *b"ord "]


def test_prepared_data_is_cached(tmp_path: Path) -> None:
    data, reports = config(tmp_path, "hello"), list[str]()
    first = tokenise_corpus(data, 257, reports.append)
    assert reports
    reports.clear()
    again = tokenise_corpus(data, 300, reports.append)  # ids do not depend on the model's vocabulary
    assert again.folder == first.folder and not reports
    other = tokenise_corpus(data.model_copy(update={"validation": 0.5}), 257)
    assert other.folder != first.folder
    assert not list(first.folder.parent.glob(".*.unfinished"))


def test_a_bpe_tokenizer_is_trained_by_default(tmp_path: Path) -> None:
    data = config(tmp_path, "the cat sat on the mat\n" * 50).model_copy(update={"tokenizer": "bpe"})
    dataset = tokenise_corpus(data, 300)
    tokenizer = Tokenizer.open(dataset.tokenizer_file)
    ids = everything(dataset, "train")
    assert ids[-1] == tokenizer.end and max(ids) < tokenizer.vocab <= 300
    assert tokenizer.decode(ids).startswith("the cat sat on the mat\nthe cat")


DAMAGES: list[tuple[str, Callable[[bytes], bytes] | None, str]] = [
    ("train.bin", lambda content: content[:-2], "train.bin has"),
    ("meta.json", lambda _: b'{"format": 1', "meta.json"),
    ("meta.json", lambda content: json.dumps(json.loads(content) | {"format": 99}).encode(), "meta.json: format"),
    ("tokenizer.json", lambda content: content + b" ", "tokenizer.json is not the one"),
    ("validation.bin", None, "validation.bin cannot be read"),
]
"""file, change of its content (None: remove it), complaint"""


@pytest.mark.parametrize(("name", "change", "complaint"), DAMAGES)
def test_a_damaged_folder_is_refused_and_prepared_again(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes] | None, complaint: str
) -> None:
    data, reports = config(tmp_path, "hello world, hello"), list[str]()
    dataset = tokenise_corpus(data, 257)
    before, file = everything(dataset, "train"), dataset.folder / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CorruptDataset, match=complaint) as caught:
        Dataset.open(dataset.folder)
    assert str(dataset.folder) in str(caught.value) and "delete that folder" in str(caught.value)
    assert everything(tokenise_corpus(data, 257, reports.append), "train") == before
    assert "damaged" in reports[0]


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    data = config(tmp_path, "hello")
    folder = tokenise_corpus(data, 257).folder
    leftover = folder.with_name(f".{folder.name}.unfinished")
    folder.rename(leftover)
    (leftover / "train.7.bin").touch()
    assert not (tokenise_corpus(data, 257).folder / "train.7.bin").exists()
    assert not leftover.exists()


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    data = config(tmp_path, "hello")
    with Path(data.source).open("a") as file:
        file.write("{broken")
    with pytest.raises(UserError, match=r"corpus\.jsonl:2"):
        tokenise_corpus(data, 257)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_an_unwritable_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cannot use the data cache .*cache.*; .* set data\.cache"):
        tokenise_corpus(config(tmp_path, "hello"), 257)


RACER = """
import sys
from planaria.config.schema import DataConfig
from planaria.data.shards import tokenise_corpus
dataset = tokenise_corpus(DataConfig(source=sys.argv[1], cache=sys.argv[2], tokenizer="bpe"), 400)
print(dataset.folder, dataset.read("train", 0, dataset.tokens("train")).sum())
"""


@pytest.mark.slow
def test_concurrent_processes_prepare_the_same_data(tmp_path: Path) -> None:
    data = config(tmp_path, *[f"document {i} says hello\n" * 50 for i in range(200)])
    assert data.cache
    command = [sys.executable, "-c", RACER, data.source, data.cache]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    ends = [(*racer.communicate(timeout=60), racer.returncode) for racer in racers]
    assert [(error, code) for _, error, code in ends] == [(b"", 0)] * 3
    assert len({out for out, _, _ in ends}) == 1


@pytest.mark.slow
def test_a_real_text_is_restored(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "tinyshakespeare.txt"
    data = DataConfig(source=str(source), tokenizer="bytes", cache=str(tmp_path))
    dataset = tokenise_corpus(data, 257)
    both = bytes(everything(dataset, "train")[:-1] + everything(dataset, "validation")[:-1])
    assert both == source.read_bytes()


SIZES = st.lists(st.integers(2, 40), max_size=60)


def dialogue(number: int, size: int) -> Dialogue:
    return Dialogue(np.full(size, number, np.uint32), np.ones(size, np.bool_))


@given(sizes=SIZES, length=st.integers(4, 40))
def test_every_dialogue_is_in_one_row_whole_or_cut(sizes: list[int], length: int) -> None:
    packer, count, rows = Packer(length, together=True), DialogueCounts(), []
    for one in learnable_dialogues((dialogue(n, size) for n, size in enumerate(sizes)), length, count):
        rows += [content] if (content := packer.add(one)) else []
    rows += packer.rest()
    placed = sorted(int(one.ids[0]) for content in rows for one in content)
    assert placed == [*range(len(sizes))] and count.taken == len(sizes)
    assert count.cut == sum(size > length for size in sizes)
    for content in rows:
        ids, marks = pad_row(content, length, padding=999)
        used = sum(len(one.ids) for one in content)
        assert (ids[used:] == 999).all() and not (marks[used:] & LEARNED).any()
        assert int((marks & START > 0).sum()) == len(content) + (used < length)
        assert int((marks & LEARNED).sum()) == used - len(content), "a first token is no target"


@given(sizes=SIZES)
def test_best_fit_needs_no_more_rows_than_first_come(sizes: list[int]) -> None:
    """The bound of any packing that closes a row only when a dialogue does not fit: neighbours exceed a row."""
    packer = Packer(40, together=True)
    rows = [content for n, size in enumerate(sizes) if (content := packer.add(dialogue(n, size)))] + [*packer.rest()]
    assert len(rows) <= 2 * sum(sizes) / 40 + 1


@given(sizes=SIZES, share=st.floats(0, 0.5))
def test_validation_gets_its_share_of_the_tokens(sizes: list[int], share: float) -> None:
    found = [*split((dialogue(n, size) for n, size in enumerate(sizes)), share)]
    held = sum(len(one.ids) for withheld, one in found if withheld)
    assert len(found) == len(sizes) and held <= share * sum(sizes)
    assert held > share * sum(sizes) - 41
