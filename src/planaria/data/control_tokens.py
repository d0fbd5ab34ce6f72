"""Control tokens: a tokenizer in which no text can name one.

A tokenizer finds control tokens by names such as ``<s>``, also in untrusted text. In a disguised copy the names are
random, so that only callers that know them can write the tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tokenizers
from tokenizers import models

from planaria.common.errors import UserError

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def names(inner: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the special tokens by name, except those of bytes, which a model emits for unknown characters."""
    added = inner.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    return {name: number for name, number in special.items() if not _BYTE.fullmatch(name)}


def unknown_token(inner: tokenizers.Tokenizer) -> int | None:
    """Return the id that a model emits for unknown characters, if any."""
    if isinstance(inner.model, models.Unigram):
        unknown: int | None = json.loads(inner.to_str())["model"]["unk_id"]
        return unknown
    name = inner.model.unk_token
    return None if name is None else inner.token_to_id(name)


class DisguisedTokenizer:
    """A copy of a tokenizer whose control tokens have random names."""

    def __init__(self, inner: tokenizers.Tokenizer, location: object) -> None:
        """:raises UserError: if the copy would have other ids."""
        self._names = {name: f"<{secrets.token_hex(16)}>" for name in names(inner)}
        tree = json.loads(inner.to_str())
        added = tree["added_tokens"]
        self._pattern = "|".join(map(_pattern, sorted(added, key=lambda token: -len(token["content"]))))
        # A model emits byte tokens itself; as added tokens, a text could name them.
        tree["added_tokens"] = [t for t in added if not t["special"] or t["content"] in self._names]
        for token in tree["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        tree["post_processor"] = None
        _rename(tree["model"], self._names)
        self._inner = tokenizers.Tokenizer.from_buffer(json.dumps(tree).encode())
        for name, number in names(inner).items():
            if self._inner.token_to_id(self._names[name]) != number:
                raise UserError(f"{location}: its token {name!r} has an id that depends on its name; use another name")

    def plain(self, text: str) -> tokenizers.Encoding:
        """Encode a text without control tokens."""
        return self._inner.encode(text, add_special_tokens=False)

    def encode(self, text: str, mark: str = "") -> list[int]:
        """Return the ids of a text; see :meth:`planaria.data.tokenizer.Tokenizer.encode_marked`."""
        return [number for number, _ in self.segments([text], mark)]

    def segments(self, texts: Sequence[str], mark: str = "") -> list[tuple[int, int]]:
        """Return the ids of consecutive texts, encoded as one; each id with the number of the text it begins in."""
        written = [self._write_text(text, mark) for text in texts]
        encoding, ends = self.plain("".join(written)), list(accumulate(map(len, written)))
        last = len(texts) - 1
        return [
            (number, min(bisect_right(ends, start), last))
            for number, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def _write_text(self, text: str, mark: str) -> str:
        """Return a text with the random names, without ``mark``."""
        behind = f"(?<!{re.escape(mark)})" if mark else ""
        if self._pattern:
            text = re.sub(f"{behind}(?:{self._pattern})", lambda match: self._names.get(match[0], match[0]), text)
        return text.replace(mark, "") if mark else text


def _pattern(token: dict[str, Any]) -> str:
    name = re.escape(token["content"])
    return rf"(?<!\w){name}(?!\w)" if token["single_word"] else name


def _rename(model: dict[str, Any], new: dict[str, str]) -> None:
    """Rename tokens of a model, so that it does not emit them for plain text either."""
    vocab = model["vocab"]
    if "unk_token" in model:
        model["unk_token"] = new.get(model["unk_token"], model["unk_token"])
    if isinstance(vocab, list):
        model["vocab"] = [[new.get(token, token), score] for token, score in vocab]
        return
    model["vocab"] = {new.get(token, token): number for token, number in vocab.items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if new.keys().isdisjoint((*pair, "".join(pair)))]
