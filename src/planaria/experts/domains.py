"""The text of each domain, cut so that nothing is both learned from and tested on.

A domain becomes pieces of some thousand characters. Every tenth is test text, which no training, probe or prior ever
reads; of the others, the last ninth of each is held out by the data room (``data.validation``) for probes and priors.
Both are copied into the run's folder: what it was trained on stays known when the source changes.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from planaria import atomic
from planaria.config import DataConfig
from planaria.data.corpus import STDLIB, documents, file_documents
from planaria.data.records import is_jsonl, read_jsonl
from planaria.data.tokenizer import pieces, spread_sample
from planaria.errors import UserError
from planaria.experts.embedding import clustered
from planaria.experts.experts_spec import DomainSpec, ExpertsSpec

PIECE = 4_000
"""characters of a piece"""
TENTH = 10
"""one piece of so many is test text"""
HELD_OUT = 1 / 9
"""of the other pieces: with the test text, 80 / 10 / 10"""
WILD = "*?["
"""what makes a source a glob"""
TRAINED, TEST = "domains", "test"
"""folders of a run: what experts read, one file for each domain, and what they are tested on"""


def write_domains(spec: ExpertsSpec, folder: Path) -> None:
    """Copy at most ``spec.most`` characters of each domain into ``folder``; of untrained ones test text only.

    What lies there already stays.

    :raises UserError: when a source is missing, unreadable or too short.
    """
    if spec.clusters:
        _cut_into_clusters(spec, folder)
    for name, domain in {**({} if spec.clusters else spec.domains), **spec.untrained}.items():
        train = name in spec.domains
        wanted = (TRAINED, TEST) if train else (TEST,)
        if not all((folder / part / f"{name}.jsonl").is_file() for part in wanted):
            kept = spread_sample(_pieces(name, domain), spec.most if train else spec.most // TENTH)
            _write_pieces(name, kept, folder, train)


def _cut_into_clusters(spec: ExpertsSpec, folder: Path) -> None:
    """Cut one body of unlabelled text into domains by what its pieces say."""
    if all((folder / part / f"{name}.jsonl").is_file() for name in spec.domains for part in (TRAINED, TEST)):
        return
    name, domain = next(iter(spec.domains.items()))
    kept = spread_sample(_pieces(name, domain), spec.most)
    groups = clustered(kept, spec.clusters)
    for number, name in enumerate(spec.domains):
        own = [text for text, group in zip(kept, groups, strict=True) if group == number]
        _write_pieces(name, own, folder, train=True, clusters=True)


def _write_pieces(name: str, kept: list[str], folder: Path, train: bool, clusters: bool = False) -> None:
    """Part pieces into test text and the rest, and write them down."""
    if train and len(kept) < TENTH:
        raise UserError(
            f"experts.domains.{name}: {sum(map(len, kept))} characters are too few to learn from and be tested on; "
            f"give {TENTH * PIECE} or more{', or ask for fewer experts.clusters' if clusters else ''}"
        )
    test = kept[TENTH - 1 :: TENTH] if train else kept
    _write(folder / TEST / f"{name}.jsonl", test)
    if train:
        _write(folder / TRAINED / f"{name}.jsonl", [p for n, p in enumerate(kept) if n % TENTH != TENTH - 1])


def with_text(folder: Path) -> list[str]:
    """The domains whose text experts of the run in ``folder`` learn from."""
    return sorted(file.stem for file in (folder / TRAINED).glob("*.jsonl"))


def read_pieces(folder: Path, part: str, name: str) -> list[str]:
    """The pieces of a domain that were written into this part of a run."""
    return list(read_jsonl(folder / part / f"{name}.jsonl", "text"))


def _pieces(name: str, spec: DomainSpec) -> list[str]:
    return [piece for text in _texts(name, spec) for piece in pieces(text, PIECE) if not piece.isspace()]


def _texts(name: str, spec: DomainSpec) -> Iterator[str]:
    """All documents of a domain."""
    if spec.where:
        path = Path(spec.source).expanduser()
        if not is_jsonl(path):
            raise UserError(f"experts.domains.{name}.where: goes with a .jsonl file, not with {spec.source!r}")
        found = list(read_jsonl(path, spec.field, spec.where))
        if not found:
            said = ", ".join(f"{key} = {value!r}" for key, value in spec.where.items())
            raise UserError(
                f"experts.domains.{name}: {path} has no record with {said}; mend experts.domains.{name}.where"
            )
        yield from found
        return
    try:
        files = _globbed(spec.source)
        if files is None:
            yield from documents(DataConfig(source=spec.source, field=spec.field))
            return
        if not files:
            raise UserError(f"source = {spec.source!r}: no file has such a name")
        found = [text for file in files for text in file_documents(file, spec.field)]
        if not found:
            raise UserError(f"source = {spec.source!r}: none of its {len(files)} files holds UTF-8 text")
        yield from found
    except UserError as error:
        raise UserError(f"experts.domains.{name}: {str(error).removeprefix('data.')}") from None


def _globbed(source: str) -> list[Path] | None:
    """The files that a glob names, in order; None for what is none. ``stdlib:GLOB`` looks in Python's library."""
    if source.startswith(f"{STDLIB}:"):
        path = Path(sysconfig.get_paths()["stdlib"]) / source.partition(":")[2]
    elif set(source) & set(WILD) and not Path(source).expanduser().exists():
        path = Path(source).expanduser().absolute()
    else:
        return None
    root, parts = Path(path.anchor), list(path.parts[1:])
    while parts and (not set(parts[0]) & set(WILD) or (root / parts[0]).exists()):
        root /= parts.pop(0)  # folders may have such characters in their names
    found = root.glob(str(Path(*parts))) if parts else [root]
    return sorted(file for file in found if file.is_file())


def _write(file: Path, texts: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(file, "".join(f"{json.dumps({'text': text}, ensure_ascii=False)}\n" for text in texts))
