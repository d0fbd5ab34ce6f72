"""Text to ids and back: byte-level BPE trained on the corpus, plain bytes, or somebody else's tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from planaria import atomic
from planaria.config import DataConfig
from planaria.data.corpus import documents, fingerprint, of_source
from planaria.data.mixture import quotas
from planaria.errors import UserError
from planaria.model.gguf import gguf_tokenizer
from planaria.model.gguf_file import is_gguf

END = "<|end|>"
"""the document separator of our own tokenizers"""
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[SEP]")
"""names under which other people's tokenizers keep theirs, most telling first"""
OWN_LEAST = 257
"""ids of the smallest tokenizer of our own: every byte, and the separator"""
PIECE = 2**18
"""longest text tokenised in one go, in characters; documents beyond it are cut, as the memory needed grows with it"""
BATCH = 2**20
"""characters tokenised at once, on all cores"""
TRAINING = 2**25
"""characters BPE is trained on; more of them make it slower and hardly better"""
Item = TypeVar("Item")


class Tokenizer:
    """A ``tokenizers.Tokenizer`` that adds nothing of its own and cannot be made to: text never yields special ids.

    ``vocab`` is the number of ids (the largest one plus 1), ``end`` the id that separates documents.
    """

    def __init__(self, inner: tokenizers.Tokenizer, end: int) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self.end = end
        self.vocab = max(inner.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def open(cls, path: Path, end: int | None = None) -> Tokenizer:
        """Read a tokenizer.json, or the tokenizer in a GGUF file; ``end`` separates documents or else a token with a
        known name.

        Raises UserError if it is missing, not one, or has no such separator.
        """
        try:
            inner = gguf_tokenizer(path) if is_gguf(path) else tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise UserError(
                f"data.tokenizer: cannot read {str(path)!r} ({error.strerror}); "
                "give 'bpe', 'bytes' or the path of a tokenizer.json"
            ) from error
        except ValueError as error:
            raise UserError(f"data.tokenizer: {path} is not a tokenizer.json ({error}); give one, or 'bpe'") from error
        if end is not None:
            if inner.id_to_token(end) is None:
                raise UserError(f"data.tokenizer: {path} has no token {end}, which is to separate documents")
            return cls(inner, end)
        for name in ENDS:
            if (end := inner.token_to_id(name)) is not None:
                return cls(inner, end)
        raise UserError(f"data.tokenizer: {path} has no document separator; add one of the tokens {', '.join(ENDS)}")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any separator."""
        return [i for ids in self.encode_all([text]) for i in ids.tolist()]

    def encode_marked(self, text: str) -> list[int]:
        """The ids of a text of our own, in which the name of a control token is that token."""
        self._inner.encode_special_tokens = False
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        finally:
            self._inner.encode_special_tokens = True
        return ids

    def is_control(self, token: int) -> bool:
        """Whether an id is a control token: no text holds it."""
        return token in self._inner.get_added_tokens_decoder() and not self.decode([token])

    def encode_all(self, texts: Iterable[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """The ids of each text, on all cores, never holding more than one batch and one text's ids in memory."""
        parts: list[npt.NDArray[np.uint32]] = []
        for batch in _batches(texts):
            found = self._inner.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
            for encoding, (_, last) in zip(found, batch, strict=True):
                parts.append(np.array(encoding.ids, np.uint32))
                if last:
                    yield np.concatenate(parts)
                    parts = []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Separators and ids beyond ``vocab`` leave nothing; broken UTF-8 becomes U+FFFD."""
        return self._inner.decode([i for i in ids if i < self.vocab], skip_special_tokens=True)

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return self._inner.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json; it appears at once and whole."""
        atomic.write_text(path, self.to_json())


def load_tokenizer(
    data: DataConfig, vocab: int, cache: Path, on_progress: Callable[[str], None] | None = None
) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` asks for; BPE is trained at first use and kept in the folder ``cache``.

    ``vocab`` is the number of ids the model has room for. Raises UserError if the tokenizer has more, cannot be read,
    or cannot be trained for want of a corpus; OSError if ``cache`` cannot be written.
    """
    own = data.tokenizer in ("bpe", "bytes")
    if data.tokenizer == "bpe" and vocab >= OWN_LEAST:
        return _trained(data, vocab, cache, on_progress)
    tokenizer = _byte_tokenizer() if own else Tokenizer.open(Path(data.tokenizer).expanduser())
    if tokenizer.vocab > vocab:
        raise UserError(
            f"data.tokenizer = {data.tokenizer!r} {'needs' if own else 'has'} {tokenizer.vocab} ids but model.vocab = "
            f"{vocab}; set model.vocab to {tokenizer.vocab} or more"
        )
    return tokenizer


def pieces(text: str, longest: int = PIECE) -> Iterator[str]:
    """One or more pieces of at most ``longest`` characters, cut after line ends, or anywhere in a line without any."""
    start = 0
    while len(text) - start > longest:
        stop = text.rfind("\n", start, start + longest) + 1 or start + longest
        yield text[start:stop]
        start = stop
    yield text[start:]


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of texts, and whether each is its text's last, in lists of ``BATCH`` characters or a bit more."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        left = len(text)
        for piece in pieces(text):
            left -= len(piece)
            batch.append((piece, not left))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def spread_sample(texts: Iterable[str], budget: int) -> list[str]:
    """:func:`spread` of texts, each cut to ``budget`` characters."""
    return spread((text[:budget] for text in texts), budget, len)


def spread(items: Iterable[Item], budget: int, size: Callable[[Item], int]) -> list[Item]:
    """Every 2^k-th item, with the smallest k that keeps them within ``budget`` together, by the ``size`` of each.

    One pass and O(budget) memory: whenever what is kept grows too large, every second one is dropped.
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
    """Byte-level BPE of at most ``vocab`` ids (fewer when no pair of tokens is left that occurs twice).

    Byte-pair encoding over bytes: Sennrich et al. 2016, Radford et al. 2019. The same texts give the same tokenizer.
    """
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Tokenizer(inner, inner.get_vocab()[END])


def _trained(data: DataConfig, vocab: int, cache: Path, on_progress: Callable[[str], None] | None) -> Tokenizer:
    facts = [fingerprint(source) for source in data.sources.values()]
    if len(facts) > 1:
        facts += map(str, quotas(data))
    key = hashlib.sha256(f"bpe 1 {vocab} {TRAINING} {' '.join(facts)}".encode()).hexdigest()
    file = cache / f"tokenizer-{key[:16]}.json"
    if file.exists():
        try:
            return Tokenizer.open(file)
        except UserError:
            file.unlink(missing_ok=True)  # a damaged copy of what can be had again
    if on_progress:
        read = ", ".join(source.source for source in data.sources.values())
        on_progress(f"training a tokenizer of {vocab} ids on {read}")
    tokenizer = train_bpe(_by_weight(data), vocab)
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(file)
    return tokenizer


def _by_weight(data: DataConfig) -> Iterator[str]:
    """What a tokenizer for ``data`` is trained on: of a mixture's sources by their shares, short ones several times."""
    given = quotas(data)
    shares = dict(zip(data.sources, (quota / sum(given) for quota in given), strict=True))
    kept: dict[str, list[str]] = {}
    for name, source in data.sources.items():
        with of_source(name):
            kept[name] = spread_sample(documents(source), int(TRAINING * shares[name]))
    sizes = {name: sum(map(len, texts)) for name, texts in kept.items()}
    whole = max(sizes[name] / share for name, share in shares.items())
    for name, texts in kept.items():
        for _ in range(max(1, round(whole * shares[name] / sizes[name]))):
            yield from texts


def _byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are bytes, 256 is the separator."""
    inner = _byte_level(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    inner.add_special_tokens([END])
    return Tokenizer(inner, inner.get_vocab()[END])


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_letters() -> list[str]:
    """The visible character that stands for each byte in byte-level vocabularies: itself, or else one from U+0100 on.

    Follows from the alphabet: sorted, it holds the bytes that stand for themselves and then the others in order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(letter for letter in alphabet if ord(letter) > 255)
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
