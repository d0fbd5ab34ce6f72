"""Small tokenizers of the kinds of published models, trained on artificial words."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = ["<unk>", "<s>", "</s>"]
KINDS = ("byte level", "split", "prepend", "metaspace", "metaspace first", "wordpiece")


def text(seed: int, size: int, runs: bool = True) -> str:
    """Words, digits, line ends and spaces; ``runs``: also long stretches of one character."""
    rng = random.Random(seed)
    words = ["".join(random.Random(n).choices("abcdeé的", k=1 + n % 7)) for n in range(60)]
    ends = [" ", "  ", "\n", "\n\n  ", ". ", ", ", "\t"]
    parts: list[str] = []
    while sum(map(len, parts)) < size:
        if runs and rng.random() < 0.05:
            parts.append(rng.choice("x7 \n") * rng.randint(1, 90))
        parts.append(rng.choice(words) + rng.choice(ends))
    return "".join(parts)


@cache
def source(kind: str) -> str:
    """Return a tokenizer.json."""
    trainer: trainers.Trainer
    if kind in ("byte level", "split"):
        inner = tokenizers.Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "byte level")
        split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
        inner.pre_tokenizer = level if kind == "byte level" else pre_tokenizers.Sequence([split, level])
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "prepend":
        inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(steps)
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=MARKS + pieces, show_progress=False)
    elif kind.startswith("metaspace"):
        inner = tokenizers.Tokenizer(models.Unigram())
        inner.normalizer = normalizers.NFKC()
        scheme = "first" if kind.endswith("first") else "always"
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=MARKS, unk_token="<unk>", show_progress=False)
    else:
        inner = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=MARKS, show_progress=False)
    inner.train_from_iterator([text(seed, 2000) for seed in range(20)], trainer)
    return inner.to_str()


def saved(kind: str, folder: Path, template: str = "") -> Path:
    """Save a tokenizer.json in ``folder``; its ``template`` adds tokens, such as "<s> $A"."""
    inner = tokenizers.Tokenizer.from_str(source(kind))
    if template:
        named = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
