"""Tokenizers: lossless round trips, reproducible training, windows of long texts, and refusal of invalid files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data import tokenizer as module
from planaria.data import windows
from planaria.data.tokenizer import Tokenizer, load_tokenizer, pieces, sample_evenly, train_bpe
from support.tokenizer_kinds import KINDS, saved, source, text

CORPUS = ["the cat sat on the mat, and the dog on the log\n" * 20, "été à la plage\n" * 20]
characters = st.characters(exclude_categories=["Cs"])


def byte_tokenizer() -> Tokenizer:
    return load_tokenizer(DataConfig(tokenizer="bytes"), 257, Path("/nowhere"))


@pytest.fixture
def corpus(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text(CORPUS[0])
    (tmp_path / "b.txt").write_text(CORPUS[1])
    return DataConfig(source=str(tmp_path))


@settings(deadline=None)
@given(st.text(characters))
def test_byte_ids_are_the_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab, tokenizer.end) == (257, 256)


@settings(deadline=None)
@given(st.text(characters))
def test_bpe_is_lossless(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


BPE = train_bpe(CORPUS, 300)


def test_bpe_compresses_within_its_vocabulary() -> None:
    assert 257 < BPE.vocab <= 300
    assert len(BPE.encode(CORPUS[0])) < len(CORPUS[0]) / 2


@pytest.mark.parametrize("tokenizer", [BPE, byte_tokenizer()])
def test_text_yields_no_separator(tokenizer: Tokenizer) -> None:
    text = f"one{module.END}two"
    assert tokenizer.end not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode("one"), tokenizer.end, tokenizer.vocab + 5]) == "one"


def test_invalid_utf8_is_replaced() -> None:
    assert byte_tokenizer().decode([104, 105, 0xC3]) == "hi\ufffd"


def test_a_saved_tokenizer_is_equal_when_opened(tmp_path: Path) -> None:
    for tokenizer in (BPE, byte_tokenizer()):
        tokenizer.save(tmp_path / "tokenizer.json")
        again = Tokenizer.open(tmp_path / "tokenizer.json")
        assert again.encode(CORPUS[1]) == tokenizer.encode(CORPUS[1])
        assert (again.vocab, again.end, again.to_json()) == (tokenizer.vocab, tokenizer.end, tokenizer.to_json())
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.slow
def test_training_is_reproducible_in_another_process() -> None:
    code = f"from planaria.data.tokenizer import train_bpe; print(train_bpe({CORPUS!r}, 300).to_json())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == BPE.to_json()


def test_long_texts_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 50)
    monkeypatch.setattr(module, "BATCH", 120)
    encoded = [ids.tolist() for ids in byte_tokenizer().encode_all(["short", CORPUS[0], "", "x" * 500])]
    assert encoded == [list(text.encode()) for text in ("short", CORPUS[0], "", "x" * 500)]


@given(st.text("ab\n", max_size=2000))
def test_pieces_join_to_the_text(text: str) -> None:
    with patch.object(module, "PIECE", 100):
        cut = list(pieces(text))
    assert "".join(cut) == text
    assert all(len(piece) <= 100 for piece in cut)
    assert all(piece.endswith("\n") or "\n" not in piece for piece in cut[:-1])


@given(st.lists(st.text("ab", max_size=30), max_size=60), st.integers(1, 200))
def test_a_sample_is_every_2k_th_text_within_the_budget(texts: list[str], budget: int) -> None:
    kept = sample_evenly(texts, budget)
    strides = (2**k for k in range(7))
    cut = [text[:budget] for text in texts]
    fitting = next((cut[::stride] for stride in strides if sum(map(len, cut[::stride])) <= budget), None)
    assert kept == fitting


def test_a_trained_tokenizer_is_cached(corpus: DataConfig, tmp_path: Path) -> None:
    reports: list[str] = []
    cache = tmp_path / ".cache"
    first = load_tokenizer(corpus, 280, cache, reports.append)
    assert load_tokenizer(corpus, 280, cache, reports.append).to_json() == first.to_json()
    assert len(reports) == 1
    (kept,) = cache.iterdir()
    kept.write_text("{")
    assert load_tokenizer(corpus, 280, cache, reports.append).to_json() == first.to_json()
    assert load_tokenizer(corpus, 290, cache, reports.append).vocab > first.vocab
    assert len(reports) == 3


def test_a_foreign_tokenizer_is_opened_without_truncation(tmp_path: Path) -> None:
    foreign = tmp_path / "tokenizer.json"
    written = json.loads(BPE.to_json())
    written["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    foreign.write_text(json.dumps(written).replace(module.END, "</s>"))
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(foreign)), 300, tmp_path)
    assert tokenizer.encode(CORPUS[0]) == BPE.encode(CORPUS[0])
    assert tokenizer.end == BPE.end


@pytest.mark.parametrize(
    ("kind", "vocab", "complaint"),
    [
        ("bpe", 256, "'bpe' needs 257 ids but model.vocab = 256; set model.vocab to 257"),
        ("bytes", 256, "'bytes' needs 257 ids but model.vocab = 256; set model.vocab to 257"),
        ("t.json", 260, f"has {BPE.vocab} ids but model.vocab = 260"),
    ],
)
def test_a_tokenizer_with_too_many_ids_is_refused(
    corpus: DataConfig, tmp_path: Path, kind: str, vocab: int, complaint: str
) -> None:
    BPE.save(tmp_path / "t.json")
    data = corpus.model_copy(update={"tokenizer": str(tmp_path / kind) if kind == "t.json" else kind})
    with pytest.raises(UserError, match=complaint):
        load_tokenizer(data, vocab, tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read .* use 'bpe', 'bytes' or the path"),
        ("{", "is not a tokenizer.json"),
        ('{"model": {"type": "BPE"}}', "is not a tokenizer.json"),
        (BPE.to_json().replace(module.END, "<|nothing|>"), "no document separator; add one of the tokens"),
    ],
)
def test_an_invalid_tokenizer_file_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    file = tmp_path / "t.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=complaint) as caught:
        load_tokenizer(DataConfig(tokenizer=str(file)), 300, tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_have_the_ids_of_the_whole(kind: str) -> None:
    """Windows of 500 characters; runs of one character only where no two divisions of a run cost the same."""
    inner = tokenizers.Tokenizer.from_str(source(kind))
    inner.encode_special_tokens = True
    runs = not kind.startswith("metaspace")
    with patch.multiple(windows, MARGIN=48, AGREED=32):
        for seed in range(25):
            whole = text(1000 + seed, 400 + 100 * seed, runs)
            found = windows.encode_in_windows(lambda part: inner.encode(part, add_special_tokens=False), whole, 500)
            assert [i for part in found for i in part] == inner.encode(whole, add_special_tokens=False).ids


def test_a_text_without_a_joint_is_encoded_whole_or_refused() -> None:
    inner = tokenizers.Tokenizer.from_str(source("wordpiece"))
    whole = "ab " * 300 + " " * 5000 + "cde " * 300  # spaces have no tokens
    with patch.multiple(windows, MARGIN=48, AGREED=32):
        found = windows.encode_in_windows(inner.encode, whole, 500)
        assert [i for part in found for i in part] == inner.encode(whole).ids
        with patch.object(windows, "MAX_WINDOW_CHARS", 2000), pytest.raises(UserError, match="break it into lines"):
            list(windows.encode_in_windows(inner.encode, whole, 500))


def test_long_documents_are_not_cut_at_a_length(tmp_path: Path) -> None:
    """With this kind, each cut would add a space."""
    tokenizer = Tokenizer.open(saved("prepend", tmp_path))
    whole = text(7, 9000).replace("\n", " ")
    expected = tokenizer.encode(whole)
    with patch.object(module, "PIECE", 700), patch.multiple(windows, MARGIN=48, AGREED=32):
        assert tokenizer.encode(whole) == expected
        (legacy,) = tokenizer.encode_all([whole], legacy=True)
    assert legacy.tolist() != expected and tokenizer.decode(expected) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_yields_a_control_token(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(saved(kind, tmp_path))
    begin, end = tokenizer.control_tokens["<s>"], tokenizer.control_tokens["</s>"]
    for forged in ("</s>", "ab </s> cd<s>", "＜/s＞", "</s></s>"):
        assert {begin, end}.isdisjoint(tokenizer.encode(forged))
    assert tokenizer.encode_marked("<s>ab</s>")[0] == begin and tokenizer.encode_marked("<s>ab</s>")[-1] == end
    assert {begin, end}.isdisjoint(tokenizer.encode_marked("\ue000<s>ab<\ue000/s>", "\ue000"))
