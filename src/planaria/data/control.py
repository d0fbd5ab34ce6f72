"""Control tokens: a tokenizer in which no text can name one.

A tokenizer knows its control tokens by names such as ``<s>``, and a text that holds a name is taken for the token. In a
disguised copy the names are random, so that only those who know them can write the tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import tokenizers
from tokenizers import models

from planaria.common.errors import UserError

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def names(inner: tokenizers.Tokenizer) -> dict[str, int]:
    """The special tokens by name, but for those of bytes, which a model writes for characters it does not know."""
    added = inner.get_added_tokens_decoder()
    found = {token.content: number for number, token in added.items() if token.special}
    return {name: number for name, number in found.items() if not _BYTE.fullmatch(name)}


def unknown(inner: tokenizers.Tokenizer) -> int | None:
    """The id that a model writes for characters it does not know, if it has one."""
    if isinstance(inner.model, models.Unigram):
        found: int | None = json.loads(inner.to_str())["model"]["unk_id"]
        return found
    name = inner.model.unk_token
    return None if name is None else inner.token_to_id(name)


class Disguised:
    """A copy of a tokenizer whose control tokens have random names."""

    def __init__(self, inner: tokenizers.Tokenizer, place: object) -> None:
        """:raises UserError: when the copy would have other ids."""
        self._names = {name: f"<{secrets.token_hex(16)}>" for name in names(inner)}
        tree = json.loads(inner.to_str())
        added = tree["added_tokens"]
        self._pattern = "|".join(map(_pattern, sorted(added, key=lambda token: -len(token["content"]))))
        # A model writes those of bytes itself; as added tokens, a text could name them.
        tree["added_tokens"] = [t for t in added if not t["special"] or t["content"] in self._names]
        for token in tree["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        tree["post_processor"] = None
        _rename(tree["model"], self._names)
        self._inner = tokenizers.Tokenizer.from_buffer(json.dumps(tree).encode())
        for name, number in names(inner).items():
            if self._inner.token_to_id(self._names[name]) != number:
                raise UserError(f"{place}: its token {name!r} has an id that depends on its name; give another")

    def plain(self, text: str) -> tokenizers.Encoding:
        """A text as letters alone."""
        return self._inner.encode(text, add_special_tokens=False)

    def encode(self, text: str, mark: str = "") -> list[int]:
        """The ids of a text; :meth:`planaria.data.tokenizer.Tokenizer.encode_marked`."""
        behind = f"(?<!{re.escape(mark)})" if mark else ""
        if self._pattern:
            text = re.sub(f"{behind}(?:{self._pattern})", lambda found: self._names.get(found[0], found[0]), text)
        return self.plain(text.replace(mark, "") if mark else text).ids


def _pattern(token: dict[str, Any]) -> str:
    name = re.escape(token["content"])
    return rf"(?<!\w){name}(?!\w)" if token["single_word"] else name


def _rename(model: dict[str, Any], new: dict[str, str]) -> None:
    """Rename tokens of a model, so that it does not write them for letters either."""
    vocab = model["vocab"]
    if "unk_token" in model:
        model["unk_token"] = new.get(model["unk_token"], model["unk_token"])
    if isinstance(vocab, list):
        model["vocab"] = [[new.get(token, token), score] for token, score in vocab]
        return
    model["vocab"] = {new.get(token, token): number for token, number in vocab.items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if new.keys().isdisjoint((*pair, "".join(pair)))]
