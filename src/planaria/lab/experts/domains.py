"""The text of each domain, split by document into training, held-out and test parts.

A document is a file, a record, or a section that starts where a domain's expression matches. Documents are ordered by
digest: a tenth is test text, which no training, probe or prior reads; a tenth is held out for probes and priors; the
rest is for training. A document of several domains stays in the part it was first assigned to; documents of untrained
domains are never trained on. The parts are copied into the run's folder in pieces of some thousand characters, so the
training text stays known when its source changes.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.config.names import expand_home
from planaria.config.schema import DataConfig
from planaria.data.corpus import iter_documents, iter_file_documents
from planaria.data.listing import STDLIB
from planaria.data.records import format_of, read_records
from planaria.data.tokenizer import every_nth, pieces
from planaria.lab.experts.budget import GENERALIST
from planaria.lab.experts.embedding import k_means_groups
from planaria.lab.experts.experts_spec import ExpertsSpec, TextSpec

PIECE = 4_000
"""characters of a piece"""
SPLIT_PARTS = 10
"""one in this many documents is test text, and one is held out"""
GLOB_CHARACTERS = "*?["
"""characters that make a source a glob"""
TRAINED, HELD_OUT, TEST = "domains", "held-out", "test"
"""folders of a run: text for experts, one file for each domain; for probes and priors; for tests"""
GENERAL = "general"
"""folder, and file, of the parents' text if it is not that of the domains"""
RULE = "by document"
"""rule by which documents are split; part of a run's identity"""


class DocumentPart(NamedTuple):
    """A part of a document."""

    document: str
    """its SHA-256 (hex) without surrounding white space: equal texts are the same document"""
    text: str


def write_domains(spec: ExpertsSpec, folder: Path) -> None:
    """Copy at most ``spec.max_chars`` characters of each domain into ``folder``; of untrained domains only test text.

    Existing files stay.

    :raises UserError: when a source is missing, unreadable or too short, or has too few documents.
    """
    if all(file.is_file() for file in _files(spec, folder)):
        return
    known: dict[str, str] = {}
    for name, domain in spec.untrained.items():
        kept = every_nth(_pieces(f"experts.untrained.{name}", domain), spec.max_chars // SPLIT_PARTS, _length)
        known |= dict.fromkeys((piece.document for piece in kept), TEST)
        _write(folder / TEST / f"{name}.jsonl", kept)
    if spec.clusters:
        _cut_into_clusters(spec, folder, known)
    for name in () if spec.clusters else spec.parts(GENERALIST):
        location = f"experts.domains.{name}"
        kept = every_nth(_pieces(location, spec.domains[name]), spec.max_chars, _length)
        _require_enough_text(location, kept)
        known |= split_documents([piece.document for piece in kept], known)
        _write_parts(name, location, kept, known, folder)
    if spec.seed.text.source:
        location = "experts.seed.text"
        kept = every_nth(_pieces(location, spec.seed.text), spec.max_chars * len(spec.domains), _length)
        own = [piece for piece in kept if known.get(piece.document, TRAINED) == TRAINED]
        _require_enough_text(location, own)
        _write(folder / GENERAL / f"{GENERAL}.jsonl", own)


def split_documents(document_digests: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return document → its part, for a domain's digests. ``known``: parts of other domains' documents.

    New documents are ordered by digest: the first tenth (rounded up) is test text, the second is held out. The split is
    effectively random, and the same for the same documents.
    """
    new = sorted(set(document_digests) - known.keys())
    tenth = -(-len(new) // SPLIT_PARTS)
    parts = dict.fromkeys(new, TRAINED) | dict.fromkeys(new[:tenth], TEST)
    return parts | dict.fromkeys(new[tenth : 2 * tenth], HELD_OUT)


def domains_with_text(folder: Path) -> list[str]:
    """Return the domains with training text in the run's ``folder``."""
    return sorted(file.stem for file in (folder / TRAINED).glob("*.jsonl"))


def read_pieces(folder: Path, split: str, name: str) -> list[str]:
    """Return the pieces of a domain in a ``split`` of a run."""
    return list(read_records(folder / split / f"{name}.jsonl", "text"))


def _files(spec: ExpertsSpec, folder: Path) -> Iterator[Path]:
    """Yield all files that :func:`write_domains` writes."""
    for name in spec.parts(GENERALIST):
        yield from (folder / split / f"{name}.jsonl" for split in (TRAINED, HELD_OUT, TEST))
    yield from (folder / TEST / f"{name}.jsonl" for name in spec.untrained)
    if spec.seed.text.source:
        yield folder / GENERAL / f"{GENERAL}.jsonl"


def _cut_into_clusters(spec: ExpertsSpec, folder: Path, known: dict[str, str]) -> None:
    """Cut one body of unlabelled text into domains by the content of its pieces."""
    name, domain = next(iter(spec.domains.items()))
    location = f"experts.domains.{name.rpartition('-')[0]}"
    kept = every_nth(_pieces(location, domain), spec.max_chars, _length)
    groups = k_means_groups([piece.text for piece in kept], spec.clusters)
    known |= split_documents([piece.document for piece in kept], known)
    for number, name in enumerate(spec.domains):
        own = [piece for piece, group in zip(kept, groups, strict=True) if group == number]
        _require_enough_text(f"experts.domains.{name}", own, ", or ask for fewer experts.clusters")
        _write_parts(name, f"experts.domains.{name}", own, known, folder)


def _require_enough_text(location: str, kept: Sequence[DocumentPart], hint: str = "") -> None:
    if len(kept) < SPLIT_PARTS:
        raise UserError(
            f"{location}: {sum(map(_length, kept))} characters are too few to learn from and be tested on; "
            f"use {SPLIT_PARTS * PIECE} or more{hint}"
        )


def _write_parts(
    name: str, location: str, kept: Sequence[DocumentPart], known: Mapping[str, str], folder: Path
) -> None:
    """Write a domain's pieces, each into the part of its document."""
    parts = {part: [p for p in kept if known[p.document] == part] for part in (TRAINED, HELD_OUT, TEST)}
    if empty_parts := [part for part, own in parts.items() if not own]:
        count = len({piece.document for piece in kept})
        raise UserError(
            f"{location}: none of its {count} documents is left for {empty_parts[0]!r}, and no document is cut into "
            f"training and test text; use more files or records that no other domain has, or set {location}.begins, "
            "which marks where documents begin within a file"
        )
    for part, own in parts.items():
        _write(folder / part / f"{name}.jsonl", own)


def _pieces(location: str, spec: TextSpec) -> Iterator[DocumentPart]:
    """Yield the pieces of all documents at ``location`` in the recipe."""
    for text in _texts(location, spec):
        for document in _sections(text, spec.begins):
            digest = hashlib.sha256(document.strip().encode()).hexdigest()
            yield from (DocumentPart(digest, piece) for piece in pieces(document, PIECE) if not piece.isspace())


def _sections(text: str, begins: str) -> Iterator[str]:
    """Split a text where documents begin."""
    starts = [match.start() for match in re.finditer(begins, text, re.MULTILINE)] if begins else []
    for start, stop in zip([0, *starts], [*starts, len(text)], strict=True):
        if not (section := text[start:stop]).isspace() and section:
            yield section


def _length(piece: DocumentPart) -> int:
    return len(piece.text)


def _texts(location: str, spec: TextSpec) -> Iterator[str]:
    """Yield all files or records that ``location`` in the recipe names."""
    if spec.where:
        path = expand_home(spec.source)
        if format_of(path) is None:
            raise UserError(f"{location}.where: applies to a file of records such as .jsonl, not to {spec.source!r}")
        texts = list(read_records(path, spec.field, spec.where))
        if not texts:
            conditions = ", ".join(f"{key} = {wanted!r}" for key, wanted in spec.where.items())
            raise UserError(f"{location}: {path} has no record with {conditions}; fix {location}.where")
        yield from texts
        return
    try:
        files = _glob(spec.source)
        if files is None:
            yield from iter_documents(DataConfig(source=spec.source, field=spec.field))
            return
        if not files:
            raise UserError(f"source = {spec.source!r}: no file matches")
        texts = [text for file in files for text in iter_file_documents(file, spec.field)]
        if not texts:
            raise UserError(f"source = {spec.source!r}: none of its {len(files)} files holds UTF-8 text")
        yield from texts
    except UserError as error:
        raise UserError(f"{location}: {str(error).removeprefix('data.')}") from None


def _glob(source: str) -> list[Path] | None:
    """Return the files that a glob matches, sorted, or None if ``source`` is not a glob.

    ``stdlib:GLOB`` searches Python's library. Broken links are included, so that reading them fails.
    """
    if source.startswith(f"{STDLIB}:"):
        path = Path(sysconfig.get_paths()["stdlib"]) / source.partition(":")[2]
    elif set(source) & set(GLOB_CHARACTERS) and not expand_home(source).exists():
        path = expand_home(source).absolute()
    else:
        return None
    root, components = Path(path.anchor), list(path.parts[1:])
    while components and (not set(components[0]) & set(GLOB_CHARACTERS) or (root / components[0]).exists()):
        root /= components.pop(0)  # folder names may contain these characters
    matches = root.glob(str(Path(*components))) if components else [root]
    return sorted(file for file in matches if file.is_file() or (file.is_symlink() and not file.exists()))


def _write(file: Path, kept: Iterable[DocumentPart]) -> None:
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(file, "".join(f"{json.dumps({'text': piece.text}, ensure_ascii=False)}\n" for piece in kept))
