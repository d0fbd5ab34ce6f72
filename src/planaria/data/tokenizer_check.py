"""Check an untrusted tokenizer.json: bound its growth of texts, then try it. Runs in a child process.

Growth is the maximum factor of a text's bytes. It is derived from the tokenizer's parts, because a trial may miss a
rule that applies to one rare word.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from planaria.common.errors import UserError

MAX_GROWTH = 1 << 16
"""maximum growth by all normalizers"""
MAX_AFTER = 16.0
"""maximum growth by pre-tokenizers, and by decoders; known tokenizers have at most 4"""
LONGEST = 4096
"""maximum characters of one token"""
ADDED = 64
"""maximum tokens that a template adds to a text"""
FIX = "use another tokenizer"
_UNICODE = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "ByteLevel": 2.0,
    "BertNormalizer": 3.0,
}
"""maximum growth of any character"""
_NEUTRAL = frozenset({"Strip", "StripAccents", "Nmt"})
_PRE = {
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit", "Punctuation"), 1.0),
    **dict.fromkeys(("Digits", "UnicodeScripts", "Split", "FixedLength"), 1.0),
    "ByteLevel": 2.0,
    "Metaspace": 4.0,
}
_DECODERS = {
    **dict.fromkeys(("ByteFallback", "ByteLevel", "Fuse", "Strip", "Metaspace"), 1.0),
    **dict.fromkeys(("BPEDecoder", "CTC", "WordPiece"), 2.0),
}
_INNER = ("normalizers", "pretokenizers", "decoders")
_TEXT = (
    "The quick brown fox can't jump over 13 lazy dogs; it's 3.14159 o'clock!\n\n\tdef f(x): return x**2 # ok\r\n"
    "Où était-ce? Größe, naïve, señor. Быстрая лиса. 快速的棕色狐狸。ข้อความ. النص ﷺ עברית. 각 e\u0301 ﬁ İ 👩‍👩‍👧 🇩🇪 "
    "\0\u200b\ufeff\ue000\U000f0000\u0301 <s> </s> <|end|> [UNK] ▁ Ġ   a  b"
)


def check_tokenizer(argument: bytes) -> bytes:
    """Take a name, NUL, and a tokenizer.json; return {"growth": of its normalizers} as JSON.

    :raises UserError: naming the first part that is unbounded, unknown, or missing.
    """
    location, _, source = argument.partition(b"\0")
    try:
        return json.dumps({"growth": _check_cached(source)}).encode()
    except UserError as error:
        raise UserError(f"{location.decode(errors='replace')}: {error}; {FIX}") from None
    except ValueError as error:
        raise UserError(f"{location.decode(errors='replace')} is not a tokenizer.json ({error}); {FIX}") from None


def _check_cached(source: bytes) -> float:
    inner = tokenizers.Tokenizer.from_buffer(source)
    tree = json.loads(inner.to_str())
    growth = _max_growth(tree["normalizer"], _normalizer_growth)
    for part, limit, growth_of in (
        ("normalizer", MAX_GROWTH, _normalizer_growth),
        ("pre_tokenizer", MAX_AFTER, lambda part: _known_growth(part, _PRE)),
        ("decoder", MAX_AFTER, lambda part: _known_growth(part, _DECODERS)),
    ):
        if (times := _max_growth(tree[part], growth_of)) > limit:
            raise UserError(f"its {part} can make a text {times:.3g} times as long, beyond the limit of {limit:g}")
    _check_tokens(inner, tree["model"])
    inner.no_truncation()
    inner.no_padding()
    _try(inner, [*_test_texts(), *_rule_texts(tree["normalizer"]), *_rule_texts(tree["decoder"])])
    return growth


def _max_growth(part: Mapping[str, Any] | None, growth_of: Callable[[Mapping[str, Any]], float]) -> float:
    """Return the maximum growth by a part, or a sequence of parts."""
    if part is None:
        return 1.0
    for name in _INNER:
        if isinstance(part.get(name), list):
            return math.prod(_max_growth(each, growth_of) for each in part[name])
    return growth_of(part)


def _known_growth(part: Mapping[str, Any], growths: Mapping[str, float]) -> float:
    if part["type"] == "Replace":
        return _replacement_growth(part)
    if part["type"] not in growths:
        raise UserError(f"its part {part['type']} is not known")
    return growths[part["type"]]


def _normalizer_growth(part: Mapping[str, Any]) -> float:
    kind = part["type"]
    if kind in _NEUTRAL:
        return 1.0
    if kind == "Prepend":
        return 1.0 + len(part["prepend"].encode())
    if kind == "Precompiled":
        return _longest_entry(part["precompiled_charsmap"])
    return _known_growth(part, _UNICODE)


def _replacement_growth(part: Mapping[str, Any]) -> float:
    """Return the growth of a replacement; a regular expression may match between any two bytes, as an empty pattern
    does."""
    size, pattern = len(part["content"].encode()), part["pattern"].get("String", "")
    return max(1.0, size / len(pattern.encode())) if pattern else 1.0 + size


def _longest_entry(charsmap: str) -> float:
    """Return the bytes of the longest replacement in a SentencePiece map; after a trie, each ends with NUL."""
    content = base64.b64decode(charsmap)
    trie = int.from_bytes(content[:4], "little")
    return float(max(1, *map(len, content[4 + trie :].split(b"\0"))))


def _check_tokens(inner: tokenizers.Tokenizer, model: Mapping[str, Any]) -> None:
    """:raises UserError: if a token is too long, or the token for unknown characters is missing."""
    vocab = inner.get_vocab(with_added_tokens=True)
    longest = max(map(len, vocab), default=0)
    if longest > LONGEST:
        raise UserError(f"one of its tokens has {longest} characters; the limit is {LONGEST}")
    if not vocab:
        raise UserError("it has no tokens")
    kind, own = model["type"], model["vocab"]
    if kind == "Unigram":
        if model.get("unk_id") is None and not (model.get("byte_fallback") and len(own) >= 256):
            raise UserError("its model has no unk_id, the token for unknown characters")
    elif (unknown := model.get("unk_token")) is not None and unknown not in own:
        raise UserError(f"its model's vocabulary lacks unk_token = {unknown!r}")
    elif unknown is None and kind != "BPE":
        raise UserError("its model has no unk_token")


def _test_texts() -> Iterator[str]:
    yield from (_TEXT, "", "a", " ", "a" * 2000, " " * 2000, "\n" * 500, "7" * 500, "ab " * 700)
    letters = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000]
    letters += [chr(code) for code in range(0x10000, 0x110000, 97)]
    for start in range(0, len(letters), 4096):
        some = letters[start : start + 4096]
        yield "".join(some)
        yield " ".join(some[:512])


def _rule_texts(part: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield texts to which a part's rules apply."""
    if part is None:
        return
    for name in _INNER:
        for each in part.get(name) or ():
            yield from _rule_texts(each)
    for text in (part.get("content"), *(part.get("pattern") or {}).values()):
        if isinstance(text, str):
            yield f"{text[:256]} a{text[:256]}"


def _try(inner: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Encode texts, and decode every kind of token."""
    if len(added := inner.encode("").ids) > ADDED:
        raise UserError(f"its template adds {len(added)} tokens to a text, beyond the limit of {ADDED}")
    for literal in (True, False):
        inner.encode_special_tokens = literal
        for text in texts:
            ids = inner.encode(text, add_special_tokens=False).ids
            inner.decode(ids[:4096])
    vocab = inner.get_vocab(with_added_tokens=True)
    every = sorted(vocab.values())[: 1 << 16]
    for start in range(0, len(every), 1024):
        inner.decode(every[start : start + 1024], skip_special_tokens=False)
    for token in sorted(vocab, key=len)[-8:]:
        inner.decode([vocab[token]] * 64, skip_special_tokens=False)


def is_plain(tree: object) -> bool:
    """Whether a tokenizer.json is only byte-level BPE, like planaria's own: no part can grow a text or fail."""
    if not isinstance(tree, dict) or not isinstance(model := tree.get("model"), dict):
        return False
    parts = [tree.get(name) for name in ("pre_tokenizer", "decoder")]
    unset = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        all(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts)
        and tree.get("normalizer") is None
        and tree.get("post_processor") is None
        and model.get("type") == "BPE"
        and all(model.get(name) is None for name in unset)
        and not model.get("byte_fallback")
    )
