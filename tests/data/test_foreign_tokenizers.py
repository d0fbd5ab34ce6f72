"""Hostile tokenizers are refused in one line, without harm to this process."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from planaria.common import child_process
from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data import foreign_tokenizers
from planaria.data.tokenizer import Tokenizer, load_tokenizer
from planaria.data.tokenizer_check import is_plain
from support.examples import examples
from support.hostile_json import spoilt
from support.tokenizer_kinds import KINDS, source


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def sequence(part: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", part: [*steps]}


def charsmap(content: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "normalizer bomb": (
        {"normalizer": sequence("normalizers", *[replace("l", "l" * 400)] * 5)},
        "its normalizer can make a text .* times as long, beyond the limit",
    ),
    "a bomb on one rare word": (
        {"normalizer": replace("zyzzyva", "z" * (1 << 20))},
        "its normalizer can make a text .* times as long",
    ),
    "regex bomb": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ".*?"}, "content": "x" * 70_000}},
        "its normalizer can make a text 7e\\+04 times as long",
    ),
    "prefix bomb": ({"normalizer": {"type": "Prepend", "prepend": "x" * 70_000}}, "its normalizer can make"),
    "bytes of bytes": (
        {"pre_tokenizer": sequence("pretokenizers", *[{"type": "ByteLevel", "add_prefix_space": False}] * 30)},
        "its pre_tokenizer can make|not a tokenizer.json",
    ),
    "decoder bomb": (
        {"decoder": sequence("decoders", *[replace("a", "ab" * 200)] * 4)},
        "its decoder can make a text .* times as long",
    ),
    "an invalid map": ({"normalizer": charsmap(b"\0\0\0")}, "PanicException|not a tokenizer.json"),
    "a map that points outside": ({"normalizer": charsmap(b"\xff\xff\xff\xff\0\0\0\0")}, "memory|PanicException"),
    "a map with a long entry": ({"normalizer": charsmap(b"\0\0\0\0" + b"x" * 70_000)}, "its normalizer can make|Panic"),
    "a word level without its unknown token": (
        {"model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "zz"}, "added_tokens": []},
        "its model's vocabulary lacks unk_token = 'zz'",
    ),
    "word pieces without their unknown token": (
        {
            "model": {
                "type": "WordPiece",
                "vocab": {"</s>": 0},
                "unk_token": "zz",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
            "added_tokens": [],
        },
        "its model's vocabulary lacks unk_token = 'zz'",
    ),
    "a unigram without its unknown token": (
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["</s>", 0.0]]}, "added_tokens": []},
        "its model has no unk_id",
    ),
    "a token of a megabyte": (
        {"model": {"type": "WordLevel", "vocab": {"</s>": 0, "u": 1, "x" * (1 << 20): 2}, "unk_token": "u"}},
        "one of its tokens has 1048576 characters",
    ),
    "a template of thousands": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "s", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"s": {"id": "s", "ids": [1] * 5000, "tokens": ["<s>"] * 5000}},
            }
        },
        "its template adds 5000 tokens",
    ),
    "no tokenizer": ({"model": {"type": "BPE"}}, "is not a tokenizer.json"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    change, reason = HOSTILE[name]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(source("byte level")) | change))
    with pytest.raises(UserError, match=reason) as caught:
        Tokenizer.open(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=examples(15))
@given(spoilt(*(json.loads(source(kind)) for kind in KINDS)))
def test_a_corrupted_tokenizer_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("any") / "tokenizer.json"
    file.write_bytes(content)
    try:
        tokenizer = Tokenizer.open(file)
        tokenizer.decode(tokenizer.encode("ab cd"))
    except UserError as error:
        assert str(file) in str(error) and "\n" not in str(error)


def test_planarias_own_tokenizers_start_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(child_process, "call", lambda *_: pytest.fail("a child process"))
    load_tokenizer(DataConfig(tokenizer="bytes"), 257, tmp_path).save(tmp_path / "t.json")
    assert Tokenizer.open(tmp_path / "t.json").encode("ab") == [97, 98]
    own = json.loads((tmp_path / "t.json").read_text())
    for part in ("normalizer", "post_processor"):
        assert not is_plain(own | {part: {"type": "NFC"}})
    assert not is_plain(own | {"model": own["model"] | {"unk_token": "zz"}}) and not is_plain([])


@pytest.mark.slow
def test_a_normalizer_that_may_grow_texts_is_measured_per_text(tmp_path: Path) -> None:
    """Moderate growth is allowed, as in Unicode maps; a text that grows too much is refused."""
    file = tmp_path / "tokenizer.json"
    change = {"normalizer": replace("q", "q" * 1000)}
    file.write_text(json.dumps(json.loads(source("byte level")) | change))
    tokenizer = Tokenizer.open(file)
    assert len(tokenizer.encode("ab " * 1000 + "q")) > 1000
    with pytest.raises(UserError, match=r"its normalizer makes .* bytes of .*, beyond the limit of 16 times"):
        tokenizer.encode("q" * 20_000)


def test_the_librarys_exceptions_become_user_errors(tmp_path: Path) -> None:
    class PanicException(BaseException):
        pass

    for error in (PanicException("index out of bounds\nat line 3"), Exception("WordLevel error: Missing [UNK]")):
        with (
            pytest.raises(UserError, match=r"^t\.json: fails on a text \(.*\); use another tokenizer$"),
            foreign_tokenizers.tokenizer_errors("t.json"),
        ):
            raise error
    with pytest.raises(KeyboardInterrupt), foreign_tokenizers.tokenizer_errors("t.json"):
        raise KeyboardInterrupt
