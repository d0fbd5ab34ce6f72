"""Tokenizers: byte-level BPE trained on the corpus, plain bytes, or a tokenizer.json."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.config.names import expand_home
from planaria.config.schema import DataConfig
from planaria.data import control_tokens, foreign_tokenizers, windows
from planaria.data.control_tokens import DisguisedTokenizer
from planaria.data.corpus import fingerprint, rename_source_errors
from planaria.data.corpus import iter_documents as texts_of
from planaria.data.mixture import quotas
from planaria.models.gguf_file import is_gguf

END = "<|end|>"
"""the document separator of planaria's tokenizers"""
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[SEP]")
"""separator names of other tokenizers, most specific first"""
MIN_OWN_VOCAB = 257
"""ids of planaria's smallest tokenizer: every byte, and the separator"""
PIECE = 2**18
"""maximum characters tokenised in one call, as memory grows with them"""
GROWTH = 16.0
"""maximum bytes that normalization may make of one; if a tokenizer could exceed it, each text is measured first"""
GROWN = 2**24
"""maximum bytes of such a measurement"""
BATCH = 2**20
"""characters tokenised together, on all cores"""
TRAINING = 2**25
"""maximum characters on which BPE is trained; more make it slower and hardly better"""
Item = TypeVar("Item")


class Tokenizer:
    """A ``tokenizers.Tokenizer`` in which no text yields control tokens.

    ``vocab`` is the number of ids (the largest plus 1), ``end`` the id that separates documents. ``before`` and
    ``after`` are the ids that its template adds around a text, such as BOS.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, end: int, location: object = "tokenizer", growth: float = 1.0
    ) -> None:
        """``growth``: maximum bytes that normalization makes of one byte; ``location``: name in errors.

        :raises UserError: if its template does more than add tokens around a text.
        """
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self._location = location
        self._growth = growth
        self.end = end
        self.vocab = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        with foreign_tokenizers.tokenizer_errors(location):
            self.before, self.after = _template_ids(inner, location)

    @classmethod
    def open(cls, path: Path, end: int | None = None, bare: bool = False) -> Tokenizer:
        """Read a tokenizer.json, or the tokenizer in a GGUF file.

        ``end`` separates documents; default: a token with a known name. ``bare``: without the tokens of its template.

        :raises UserError: if it is missing, damaged, hostile, or has no separator.
        """
        name, fix = f"data.tokenizer: {path}", "use 'bpe', 'bytes' or the path of a tokenizer.json"
        try:
            source = foreign_tokenizers.gguf_as_json(path) if is_gguf(path) else documents.read_bytes(path, fix=fix)
        except UserError as error:
            raise UserError(f"data.tokenizer: {error}") from None
        inner, growth = foreign_tokenizers.open_tokenizer(source, name)
        if bare:
            inner.post_processor = None
        if end is not None:
            if not 0 <= end < 1 << 32 or inner.id_to_token(end) is None:
                raise UserError(f"{name} has no token {end}, which is to separate documents")
            return cls(inner, end, name, growth)
        for candidate in ENDS:
            if (end := inner.token_to_id(candidate)) is not None:
                return cls(inner, end, name, growth)
        raise UserError(f"{name} has no document separator; add one of the tokens {', '.join(ENDS)}")

    @functools.cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Control tokens by name. No text yields them, except the one for unknown characters."""
        return control_tokens.names(self._inner)

    @property
    def added(self) -> list[str]:
        """Names that the tokenizer knows besides its model's tokens, unordered."""
        return [token.content for token in self._inner.get_added_tokens_decoder().values()]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without separators."""
        return [i for ids in self.encode_all([text]) for i in ids.tolist()]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text to be completed, after those that the template puts before a text."""
        return [*self.before, *self.encode(text)]

    def encode_marked(self, text: str, mark: str = "") -> list[int]:
        """Return the ids of a trusted text, in which the name of a control token is that token.

        A name after the character ``mark``, or with it inside, is plain text. ``mark`` itself is removed.
        """
        with foreign_tokenizers.tokenizer_errors(self._location):
            self._require_bounded(text)
            ids: list[int] = self._disguised.encode(text, mark)
            return ids

    def encode_segments(self, texts: Sequence[str], mark: str = "") -> list[tuple[int, int]]:
        """Return the ids of consecutive parts of one trusted text, as :meth:`encode_marked` does for the whole; each id
        with the number of the part in which it begins."""
        with foreign_tokenizers.tokenizer_errors(self._location):
            self._require_bounded("".join(texts))
            return self._disguised.segments(texts, mark)

    def is_control(self, token: int) -> bool:
        """Whether an id is a control token."""
        return token in self.control_tokens.values()

    def encode_all(self, texts: Iterable[str], legacy: bool = False) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the ids of each text, computed on all cores, holding at most one batch and one text's ids.

        A text of more than ``PIECE`` characters is encoded in windows, with the same ids as in one call; ``legacy``:
        cut at line ends, as for data.tokenization = 'legacy'.

        :raises UserError: if the tokenizer fails on a text.
        """
        for batch in _batches(texts):
            short = [text for text in batch if len(text) <= PIECE]
            with foreign_tokenizers.tokenizer_errors(self._location):
                for text in batch:
                    self._require_bounded(text)
                encodings = iter(self._inner.encode_batch_fast(short, add_special_tokens=False))
                for text in batch:
                    ids = (
                        np.array(next(encodings).ids, np.uint32)
                        if len(text) <= PIECE
                        else self._encode_long(text, legacy)
                    )
                    yield ids if legacy else self._ids_as_text(text, ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Separators and ids beyond ``vocab`` are skipped; invalid UTF-8 becomes U+FFFD."""
        with foreign_tokenizers.tokenizer_errors(self._location):
            return self._inner.decode([i for i in ids if 0 <= i < self.vocab], skip_special_tokens=True)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return self._inner.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json atomically."""
        atomic.write_text(path, self.to_json())

    @functools.cached_property
    def _disguised(self) -> DisguisedTokenizer:
        return DisguisedTokenizer(self._inner, self._location)

    @functools.cached_property
    def _barred(self) -> list[int]:
        """The ids that no text may yield."""
        return sorted({*self.control_tokens.values()} - {control_tokens.unknown_token(self._inner)})

    def _ids_as_text(self, text: str, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Return ``ids``; re-encode ``text`` if the model's own vocabulary yielded control tokens."""
        if not np.isin(ids, self._barred).any():
            return ids
        return np.array([i for piece in self._join_windows(self._disguised.plain, text) for i in piece], np.uint32)

    def _encode_long(self, text: str, legacy: bool) -> npt.NDArray[np.uint32]:
        if not legacy:
            return np.concatenate([np.array(piece, np.uint32) for piece in self._join_windows(self._plain, text)])
        encodings = self._inner.encode_batch_fast([*pieces(text, PIECE)], add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.uint32) for encoding in encodings])

    def _join_windows(self, encode: windows.Encode, text: str) -> Iterator[list[int]]:
        try:
            yield from windows.encode_in_windows(encode, text, PIECE)
        except UserError as error:
            raise UserError(f"{self._location}: {error}") from None

    def _plain(self, text: str) -> tokenizers.Encoding:
        return self._inner.encode(text, add_special_tokens=False)

    def _require_bounded(self, text: str) -> None:
        """:raises UserError: if normalization makes a part of the text more than ``GROWTH`` times as long."""
        if self._growth <= GROWTH:
            return
        size = max(1, int(GROWN / self._growth))
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            normalised, size_before = self._inner.normalizer.normalize_str(piece), len(piece.encode())
            if (grown := len(normalised.encode())) > GROWTH * size_before + GROWN // 64:
                raise UserError(
                    f"{self._location}: its normalizer makes {grown} bytes of {size_before}, beyond the limit of "
                    f"{GROWTH:g} times as many; use another tokenizer"
                )


def load_tokenizer(
    data: DataConfig, vocab: int, cache: Path | None, on_progress: Callable[[str], None] | None = None
) -> Tokenizer:
    """Return the tokenizer of ``data.tokenizer``; BPE is trained on first use and cached in ``cache``.

    ``vocab`` is the number of ids in the model. Without ``cache``, bytes stand in for BPE.

    :raises UserError: if the tokenizer has more ids, cannot be read, or has no corpus to train on.
    :raises OSError: if ``cache`` cannot be written.
    """
    trained = data.tokenizer in ("bpe", "bytes")
    if data.tokenizer == "bpe" and vocab >= MIN_OWN_VOCAB and cache is not None:
        return _train_cached(data, vocab, cache, on_progress)
    tokenizer = _byte_tokenizer() if trained else Tokenizer.open(expand_home(data.tokenizer))
    if tokenizer.vocab > vocab:
        raise UserError(
            f"data.tokenizer = {data.tokenizer!r} {'needs' if trained else 'has'} {tokenizer.vocab} ids but "
            f"model.vocab = {vocab}; set model.vocab to {tokenizer.vocab} or more"
        )
    return tokenizer


def pieces(text: str, longest: int = PIECE) -> Iterator[str]:
    """Yield pieces of at most ``longest`` characters, cut after line ends, or anywhere in a longer line."""
    start = 0
    while len(text) - start > longest:
        stop = text.rfind("\n", start, start + longest) + 1 or start + longest
        yield text[start:stop]
        start = stop
    yield text[start:]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts, of ``BATCH`` characters or slightly more."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _template_ids(inner: tokenizers.Tokenizer, location: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer's template adds before and after a text."""
    if inner.post_processor is None or not inner.post_processor.num_special_tokens_to_add(False):
        return (), ()
    bare, whole = inner.encode("a", add_special_tokens=False).ids, inner.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise UserError(f"{location}: its template does not keep a text whole; remove post_processor from it")


def sample_evenly(texts: Iterable[str], budget: int) -> list[str]:
    """Return :func:`every_nth` texts, each cut to ``budget`` characters."""
    return every_nth((text[:budget] for text in texts), budget, len)


def every_nth(items: Iterable[Item], budget: int, size: Callable[[Item], int]) -> list[Item]:
    """Return every 2^k-th item, with the smallest k that keeps their total ``size`` within ``budget``.

    One pass, O(budget) memory: every second item is dropped whenever the total is too large.
    """
    kept: list[Item] = []
    stride, total = 1, 0
    for i, item in enumerate(items):
        if i % stride == 0:
            kept.append(item)
            total += size(item)
        while total > budget and len(kept) > 1:
            kept, stride = kept[::2], stride * 2
            total = sum(map(size, kept))
    return kept


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train byte-level BPE of at most ``vocab`` ids (fewer if no pair of tokens occurs twice); deterministic.

    Source: Sennrich et al. 2016, Radford et al. 2019.
    """
    inner = _convert_to_byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Tokenizer(inner, inner.get_vocab()[END])


def _train_cached(data: DataConfig, vocab: int, cache: Path, on_progress: Callable[[str], None] | None) -> Tokenizer:
    facts = [fingerprint(source) for source in data.sources.values()]
    if len(facts) > 1:
        facts += map(str, quotas(data))
    key = hashlib.sha256(f"bpe 1 {vocab} {TRAINING} {' '.join(facts)}".encode()).hexdigest()
    file = cache / f"tokenizer-{key[:16]}.json"
    if file.exists():
        try:
            return Tokenizer.open(file)
        except UserError:
            file.unlink(missing_ok=True)  # damaged, and reproducible
    if on_progress:
        read = ", ".join(source.source for source in data.sources.values())
        on_progress(f"training a tokenizer of {vocab} ids on {read}")
    tokenizer = train_bpe(_weighted_texts(data), vocab)
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(file)
    return tokenizer


def _weighted_texts(data: DataConfig) -> Iterator[str]:
    """Yield the training texts of a tokenizer: a mixture's sources by their shares, with repetitions of short ones."""
    weights = quotas(data)
    shares = dict(zip(data.sources, (quota / sum(weights) for quota in weights), strict=True))
    kept: dict[str, list[str]] = {}
    for name, source in data.sources.items():
        with rename_source_errors(name):
            kept[name] = sample_evenly(texts_of(source), int(TRAINING * shares[name]))
    sizes = {name: sum(map(len, texts)) for name, texts in kept.items()}
    whole = max(sizes[name] / share for name, share in shares.items())
    for name, texts in kept.items():
        for _ in range(max(1, round(whole * shares[name] / sizes[name]))):
            yield from texts


def _byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with bytes as ids 0..255 and the separator as 256."""
    inner = _convert_to_byte_level(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[])
    )
    inner.add_special_tokens([END])
    return Tokenizer(inner, inner.get_vocab()[END])


def _convert_to_byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_letters() -> list[str]:
    """Return the visible character for each byte in byte-level vocabularies: itself, or one from U+0100 on.

    The sorted alphabet has the bytes that represent themselves, then the others in order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(letter for letter in alphabet if ord(letter) > 255)
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
