"""A long text has the same ids in windows as in one call, and no text yields a control token."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import tokenizers
from tokenizer_kinds import KINDS, saved, source, text

from planaria.common.errors import UserError
from planaria.data import tokenizer as module
from planaria.data import windows
from planaria.data.tokenizer import Tokenizer


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
