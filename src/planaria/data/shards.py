"""Tokenise a corpus once into files of ids, which are memory-mapped afterwards.

One process prepares the data, and all open it. Each source of a mixture is prepared separately, so that all mixtures
with the same tokenizer share its folder.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO, Final, Literal

import numpy as np

from planaria.common import atomic
from planaria.common.cache import cache_folder, hold_lock
from planaria.common.errors import UserError
from planaria.common.memory_pool import trim
from planaria.config.schema import DataConfig
from planaria.data.corpus import fingerprint, is_local, iter_documents, may_exceed, rename_source_errors
from planaria.data.dataset import MIXTURE, Ids, Mixture, MixtureMeta, MixtureSource, marks_of, shard_file
from planaria.data.dataset import CorpusMetadata as CorpusMetadata
from planaria.data.dataset import CorruptDataset as CorruptDataset
from planaria.data.dataset import Data as Data
from planaria.data.dataset import Dataset as Dataset
from planaria.data.dataset import Split as Split
from planaria.data.dialogues import (
    Dialogue,
    DialogueCounts,
    Packer,
    dialogues,
    learnable_dialogues,
    pad_row,
    split,
    training_template,
)
from planaria.data.mixture import quotas
from planaria.data.tokenizer import PIECE, Tokenizer, load_tokenizer
from planaria.models.chat import Template

FORMAT: Final = 1
SHARD = 2**28
"""tokens in a full shard"""

FIRST = 2**18
"""characters of a source that are checked before a run"""

Progress = Callable[[str], None]


def check_first_records(data: DataConfig, vocab: int) -> None:
    """Read and tokenise the first records of each local source; URLs and Hub datasets are not read, no file is written.

    :raises UserError: for an invalid tokenizer or chat template, a missing or empty source, or an invalid record.
    """
    tokenizer = load_tokenizer(data, vocab, None)
    for name, source in data.sources.items():
        if is_local(source.source):
            first = source.model_copy(update={"max_chars": min(FIRST, source.max_chars or FIRST)})
            with rename_source_errors(name):
                for _ in dialogues(first, tokenizer) if first.dialogues else iter_documents(first):
                    pass


def tokenise_corpus(data: DataConfig, vocab: int, on_progress: Progress | None = None, context: int = 0) -> Data:
    """Return the corpus of ``data`` as ids below ``vocab``, from the cache or tokenised into it.

    Of texts, the last share ``data.validation`` of every document's tokens is for validation. In both splits each
    document's part is enclosed in the tokens of the tokenizer's template (unless data.tokenization is 'legacy') and
    followed by the separator. Dialogues become rows of ``context`` + 1 tokens; that share of all tokens, in whole
    dialogues, is for validation. Concurrent processes wait for the first one. A damaged folder is prepared again.

    :raises UserError: for an invalid source, tokenizer or cache folder.
    """
    report: Progress = on_progress or (lambda message: None)
    cache = cache_folder(data.cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(data, vocab, cache, report)
        datasets: dict[str, Dataset] = {}
        for name, source in data.sources.items():
            with rename_source_errors(name):
                datasets[name] = _prepare_source(source, tokenizer, cache, context, report)
        return _write_mixture(datasets, quotas(data), cache) if data.mixture else datasets[""]
    except OSError as error:
        raise UserError(
            f"cannot use the data cache {cache} ({error}); "
            "free space there and allow writing, or set data.cache to another folder"
        ) from error


def _prepare_source(source: DataConfig, tokenizer: Tokenizer, cache: Path, context: int, report: Progress) -> Dataset:
    """Return one source, from the cache or tokenised into it."""
    made_from = fingerprint(source)
    facts = f"{FORMAT} {made_from} {source.validation!r} {tokenizer.to_json()}"
    if source.dialogues:
        if not context:
            raise UserError(f"data.format = {source.format!r}: only training and `eval` read dialogues; use texts")
        facts += f" {source.format} {source.learn} {source.pack} {context} {_text_of(training_template(source))}"
    elif source.tokenization == "exact" and (tokenizer.before or tokenizer.after or may_exceed(source, PIECE)):
        facts += " exact"  # only here may ids differ from those of "legacy"
    folder = cache / hashlib.sha256(facts.encode()).hexdigest()[:24]
    length = context + 1 if source.dialogues else 0
    with hold_lock(
        cache / f".{folder.name}.lock", lambda: report("waiting for another process that prepares this data")
    ):
        dataset = _open_intact(folder, report) or _build(folder, source, tokenizer, made_from, length, report)
    for note in dataset.meta.notes:
        report(note)
    return dataset


def _text_of(template: Template | None) -> object:
    return template and (template.text, template.names)


def _write_mixture(datasets: dict[str, Dataset], shares: tuple[int, ...], cache: Path) -> Mixture:
    """Write a folder for a mixture of prepared sources. Concurrent writers write the same."""
    of = zip(datasets.items(), shares, strict=True)
    sources = {name: MixtureSource(folder=d.folder.name, quota=quota, meta=d.meta) for (name, d), quota in of}
    text = MixtureMeta(format=FORMAT, parts=sources).model_dump_json(indent=1)
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:24]
    folder.mkdir(exist_ok=True)
    atomic.write_text(folder / MIXTURE, text)
    return Mixture.open(folder)


def _open_intact(folder: Path, report: Progress) -> Dataset | None:
    """Return a previously prepared folder if it is intact."""
    if not folder.exists():
        return None
    try:
        return Dataset.open(folder)
    except CorruptDataset:
        report(f"{folder} is damaged; preparing it again")
        return None


def _build(
    folder: Path, data: DataConfig, tokenizer: Tokenizer, made_from: str, length: int, report: Progress
) -> Dataset:
    """Prepare a temporary folder, then rename it. The caller holds the folder's lock."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir()
    try:
        report(f"tokenising {data.source}")
        meta = _write(unfinished, data, tokenizer, made_from, length, report)
        kind, unit, each = ("dialogue", "rows", length) if length else ("document", "tokens", 1)
        train, held_out = meta.train // each, meta.validation // each
        kind += "s" * (meta.documents != 1)
        report(f"{meta.documents:,} {kind}: {train:,} {unit} to train on, {held_out:,} for validation")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        trim()  # tokenising takes 50 MB and more
    return Dataset.open(folder)


def _write(
    folder: Path, data: DataConfig, tokenizer: Tokenizer, made_from: str, length: int, report: Progress
) -> CorpusMetadata:
    """Write all files of a prepared folder, with at most a batch of documents in memory."""
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab <= 65535 else "uint32"
    notes = list[str]()
    with ExitStack() as stack:
        names: list[Split] = ["train", "validation"]
        train, held_out, *marks = (
            stack.enter_context(closing(_Writer(folder, name)))
            for name in (*names, *(map(marks_of, names) if length else ()))
        )
        if length:
            splits = [(train, marks[0]), (held_out, marks[1])]
            count = _write_rows(splits, data, tokenizer, dtype, length, report, notes.append)
        else:
            count = _write_texts(train, held_out, data, tokenizer, dtype, report, notes.append)
    text = tokenizer.to_json().encode()
    (folder / "tokenizer.json").write_bytes(text)
    meta = CorpusMetadata(
        format=FORMAT,
        dtype=dtype,
        shard=SHARD,
        documents=count,
        train=train.tokens,
        validation=held_out.tokens,
        tokenizer=hashlib.sha256(text).hexdigest(),
        fingerprint=made_from,
        ids=hashlib.sha256(b"".join(writer.seen.digest() for writer in (train, held_out, *marks))).hexdigest(),
        row=length,
        notes=tuple(notes),
    )
    (folder / "meta.json").write_text(meta.model_dump_json(indent=1), encoding="utf-8")
    return meta


def _write_texts(
    train: _Writer,
    held_out: _Writer,
    data: DataConfig,
    tokenizer: Tokenizer,
    dtype: str,
    report: Progress,
    note: Progress,
) -> int:
    """Write both splits of a corpus of texts; return the number of documents."""
    legacy = data.tokenization == "legacy"
    count = 0
    total = 0
    pending = 0
    reported = 0
    before, after = _boundary_tokens(tokenizer, legacy)
    texts = iter_documents(data, note)
    for count, ids in enumerate(tokenizer.encode_all(texts, legacy), start=1):
        # The share is of all documents so far, so that very short documents count too.
        total, withheld = total + len(ids), pending
        pending = int(total * data.validation)
        cut = len(ids) - (pending - withheld)
        for writer, tokens in ((train, ids[:cut]), (held_out, ids[cut:])):
            if len(tokens):
                # A separator that also begins a document does so for the next.
                first = () if writer.tokens and before == (tokenizer.end,) else before
                writer.append(np.concatenate([np.array(first, dtype), tokens.astype(dtype), np.array(after, dtype)]))
        if train.tokens >> 23 > reported:
            reported = train.tokens >> 23
            report(f"tokenised {count:,} documents, {train.tokens / 1e6:.0f} million tokens")
    return count


def _write_rows(
    splits: Sequence[tuple[_Writer, _Writer]],
    data: DataConfig,
    tokenizer: Tokenizer,
    dtype: str,
    length: int,
    report: Progress,
    note: Progress,
) -> int:
    """Write both splits of a corpus of dialogues, each as ids and marks; return the number of dialogues."""
    count = DialogueCounts()
    packers = [Packer(length, data.pack) for _ in splits]
    reported = 0

    def write(side: int, content: Sequence[Dialogue]) -> None:
        if content:
            ids, marks = pad_row(content, length, tokenizer.end)
            for writer, column in zip(splits[side], (ids.astype(dtype), marks), strict=True):
                writer.append(column)

    for withheld, dialogue in split(
        learnable_dialogues(dialogues(data, tokenizer, note), length, count), data.validation
    ):
        write(withheld, packers[withheld].add(dialogue))
        if count.tokens >> 20 > reported:
            reported = count.tokens >> 20
            report(f"tokenised {count.taken:,} dialogues, {count.tokens / 1e6:.0f} million tokens")
    for number, packer in enumerate(packers):
        for content in packer.rest():
            write(number, content)
    if not count.taken:
        where, fix = "", "records with an answer, or data.learn = 'all'"
        if count.skipped_for_length:
            where = f" among its first {length:,}, but {count.skipped_for_length:,} have one later"
            fix = f"a larger model.context than {length - 1:,}"
        raise UserError(f"data.source = {data.source!r}: no dialogue has a token to learn{where}; use {fix}")
    skipped = f", {count.skipped:,} skipped that have none" if count.skipped else ""
    cut = f", {count.cut:,} cut at {length:,} tokens (model.context + 1)" if count.cut else ""
    note(f"{count.learned / count.tokens:.0%} of the tokens are learned{cut}{skipped}")
    return count.taken


def _boundary_tokens(tokenizer: Tokenizer, legacy: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after each document; add the separator unless the template ends with it."""
    if legacy:
        return (), (tokenizer.end,)
    closed = tokenizer.after[-1:] == (tokenizer.end,)
    return tokenizer.before, tokenizer.after if closed else (*tokenizer.after, tokenizer.end)


class _Writer:
    """Appends numbers to the shards of a split's ids or marks."""

    def __init__(self, folder: Path, name: str) -> None:
        self.tokens, self.seen = 0, hashlib.sha256()
        self._folder, self._name = folder, name
        self._file: BinaryIO | None = None

    def append(self, ids: Ids) -> None:
        while len(ids):
            shard, offset = divmod(self.tokens, SHARD)
            if self._file is None or not offset:
                self.close()
                self._file = shard_file(self._folder, self._name, shard).open("wb")
            piece, ids = ids[: SHARD - offset], ids[SHARD - offset :]
            content = piece.astype(piece.dtype.newbyteorder("<")).tobytes()
            self._file.write(content)
            self.seen.update(content)
            self.tokens += len(piece)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
