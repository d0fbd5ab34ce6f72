"""The documents of a source, their order, and errors of invalid sources."""

from __future__ import annotations

import gzip
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data import corpus, records
from planaria.data.corpus import fingerprint, iter_documents
from support.source_texts import refusal, texts


def write_records(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_standard_library_is_read_without_its_tests() -> None:
    found = iter_documents(DataConfig())
    first = [next(found) for _ in range(40)]
    assert first == [text for text, _ in zip(iter_documents(DataConfig()), range(40), strict=False)]
    root = Path(sysconfig.get_paths()["stdlib"])
    assert (root / "abc.py").read_text() in first
    assert all("import pytest" not in text for text in first)


def test_a_text_file_is_one_unchanged_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo \xc3\xa9\n")
    assert texts(file) == ["one\r\n\ntwo é\n"]


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "b" / "z.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    write_records(tmp_path / "c.jsonl", {"text": "third"}, {"text": ""}, {"text": "fourth"})
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as packed:
        packed.write('{"text": "fifth"}\n')
    reports: list[str] = []
    found = list(iter_documents(DataConfig(source=str(tmp_path)), reports.append))
    assert found == ["first", "second", "third", "fourth", "fifth"]
    assert reports == ["skipped .git: hidden", "skipped latin.txt, picture.png: not UTF-8 text"]


RECORDS = [{"text": "one"}, {"text": "two é", "id": 2}, {"text": ""}, {"text": "three"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.ndjson", "\n".join(map(json.dumps, RECORDS))),
        ("A.JSONL", "\n\n".join(map(json.dumps, RECORDS))),
        ("a.JsonL.GZ", "\n".join(map(json.dumps, RECORDS))),
        ("a.json", json.dumps(RECORDS)),
        ("a.JSON", json.dumps(RECORDS, indent=4, ensure_ascii=False)),
        ("a.json.gz", json.dumps(RECORDS)),
        ("lines.json", "\n".join(map(json.dumps, RECORDS))),
        ("objects.json", "\ufeff" + "\n".join(json.dumps(record, indent=2) for record in RECORDS)),
    ],
)
def test_record_formats_are_recognised_by_suffix_in_any_case(tmp_path: Path, name: str, content: str) -> None:
    raw = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.lower().endswith(".gz") else raw)
    assert texts(tmp_path / name) == ["one", "two é", "three"] == texts(tmp_path)
    assert "field 'id'" in refusal(tmp_path / name, "id")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1, 2]", "a JSON int, not an object"),
        ('{"name": "a package", "version": 1}', "no records with a field 'text' (known here: name, version)"),
        ('// a comment\n{"text": "x"}', "not JSON records (Expecting value"),
        ("[", "not JSON records (the array does not end)"),
        ("[" * 100_000, "not JSON records (maximum recursion"),
    ],
)
def test_json_without_records_is_refused_alone_and_skipped_in_a_folder(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert f"data.source: {tmp_path / 'a.json'}: {reason}" in refusal(tmp_path / "a.json")
    (tmp_path / "b.txt").write_text("text")
    reports: list[str] = []
    assert list(iter_documents(DataConfig(source=str(tmp_path)), reports.append)) == ["text"]
    assert len(reports) == 1 and reports[0].startswith(f"skipped a.json: {reason}")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('[{"text": "good"}, 3]', "record 2: a JSON int"),
        ('[{"text": "good"}, {"text": 3}]', "record 2: field 'text' holds int"),
        ('[{"text": "good"}', "record 2: not a JSON record (the array does not end)"),
        ('[{"text": "good"} {"text": "x"}]', "record 2: not a JSON record (no comma"),
        ('[{"text": "good"}] x', "record 2: not a JSON record (text after the array)"),
        ('{"text": "good"}\n{"text": ', "record 2: not a JSON record (Expecting value"),
        ('{"text": "good"}\n{"txt": "x"}', "record 2: no field 'text' (did you mean 'txt'?)"),
    ],
)
def test_invalid_records_of_a_json_file_are_refused(tmp_path: Path, content: str, complaint: str) -> None:
    (file := tmp_path / "a.json").write_text(content)
    assert f"{file}, {complaint}" in refusal(file) and f"{file}, {complaint}" in refusal(tmp_path)


@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=200) | st.integers(), max_size=4), max_size=9),
    st.sampled_from([None, 1]),
    st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_json_read_in_pieces_has_the_same_records(
    tmp_path: Path, rows: list[dict[str, Any]], indent: int | None, array: bool
) -> None:
    rows = [row | {"text": f"text {number}"} for number, row in enumerate(rows)]
    whole = json.dumps(rows, indent=indent) if array else "\n".join(json.dumps(row, indent=indent) for row in rows)
    with patch.object(records, "PIECE", 3):
        (tmp_path / "a.json").write_text(whole)
        assert list(records.read_records(tmp_path / "a.json", "text")) == [row["text"] for row in rows]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("root/a", "root/real", "other/deep"):
        (tmp_path / name).mkdir(parents=True)
    (root / "real" / "x.txt").write_text("real")
    (tmp_path / "other" / "y.txt").write_text("other")
    (tmp_path / "other" / "deep" / "z.txt").write_text("deep")
    links = {
        "a/again": root / "real",
        "b": tmp_path / "other",
        "loop": root,
        "up": tmp_path,
        "nowhere": tmp_path / "no",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    (root / "self").symlink_to("self")
    os.mkfifo(root / "pipe")
    reports: list[str] = []
    assert list(iter_documents(DataConfig(source=str(root)), reports.append)) == ["deep", "other", "real"]
    assert "skipped nowhere, self: a broken link" in reports
    assert "skipped pipe: not a regular file" in reports
    (seen,) = [line for line in reports if line.endswith("a link to a folder that is read already")]
    assert all(name in seen for name in ("a/again", "loop", "up/root", "up/other"))


def test_long_lists_of_skipped_files_are_shortened(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}\n.bin").write_bytes(b"\0")
    assert "skipped '00\\n.bin', '01\\n.bin'" in (message := refusal(tmp_path))
    assert "'07\\n.bin' and 22 more: not UTF-8 text" in message


def test_formats_that_were_read_as_text_have_a_new_fingerprint(tmp_path: Path) -> None:
    """A cache from a version that read them as plain text is not used."""
    seen = set()
    for name in ("a.txt", "a.json", "a.ndjson"):
        (tmp_path / name).write_text('{"text": "x"}')
        os.utime(tmp_path / name, ns=(1, 1))
        with patch.object(corpus, "format_of", lambda _: None):
            as_text = fingerprint(DataConfig(source=str(tmp_path / name)))
        seen.add((name, as_text == fingerprint(DataConfig(source=str(tmp_path / name)))))
    assert seen == {("a.txt", True), ("a.json", False), ("a.ndjson", False)}


def test_parquet_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    line = f"{tmp_path / 'a.parquet'}: reading Parquet files needs the package 'pyarrow'; install it with: "
    assert refusal(tmp_path) == f"{line}pip install 'planaria[hub]'" == refusal(tmp_path / "a.parquet")


def test_parquet_files_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"text": [f"document {n}" for n in range(1000)], "label": ["a", "b"] * 500, "number": [*range(1000)]}
    parquet.write_table(pyarrow.table(rows), file := tmp_path / "A.Parquet", row_group_size=300)
    assert texts(file) == rows["text"] == texts(tmp_path)
    assert list(records.read_records(file, "text", {"label": "b"})) == rows["text"][1::2]
    assert "no field 'txt' (did you mean 'text'?)" in refusal(file, "txt")
    assert "row 0: field 'number' holds int" in refusal(file, "number")
    with fsspec.open("memory://parquet/a.parquet", "wb") as there:
        there.write(file.read_bytes())
    assert texts("memory://parquet/a.parquet") == rows["text"]
    for cut in (b"", b"PAR1", file.read_bytes()[:-9], file.read_bytes()[:100] + file.read_bytes()[200:]):
        (tmp_path / "cut.parquet").write_bytes(cut)
        assert "cut.parquet, row 0: unreadable" in refusal(tmp_path / "cut.parquet")


def test_a_cache_inside_the_source_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "cache").mkdir()
    config = DataConfig(source=str(tmp_path), cache=str(tmp_path / "cache"))
    before = fingerprint(config)
    (tmp_path / "cache" / "tokenizer.json").write_text("{}")
    assert list(iter_documents(config)) == ["text"]
    assert fingerprint(config) == before


def test_jsonl_has_fields_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "one"}\n\n{"body": "half \\ud800 pair", "text": 3}\n')
    assert texts(file, "body") == ["one", "half ? pair"]


def test_the_fingerprint_changes_with_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    config = DataConfig(source=str(tmp_path))
    seen = [fingerprint(config)]
    assert fingerprint(config) == seen[0]
    (tmp_path / "b.txt").write_text("two")
    seen.append(fingerprint(config))
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    seen.append(fingerprint(config))
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    seen.append(fingerprint(config))
    seen.append(fingerprint(DataConfig(source=str(tmp_path), field="body")))
    assert len(set(seen)) == 5


def test_a_missing_path_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    assert "did you mean 'corpus.txt'" in refusal(tmp_path / "corpsu.txt")
    assert "there is no 'nowhere'" in refusal(tmp_path / "nowhere" / "deep" / "a.txt")
    assert "did you mean 'stdlib'" in refusal("stdlb")
    with pytest.raises(UserError, match="did you mean"):
        fingerprint(DataConfig(source=str(tmp_path / "corpsu.txt")))


def test_a_missing_path_without_a_near_name_lists_a_few(tmp_path: Path) -> None:
    for i in range(50):
        (tmp_path / f"{i:04}").touch()
    message = refusal(tmp_path / "elephant")
    assert "known there: 0000, 0001" in message
    assert len(message) < 400 + len(str(tmp_path)) * 2


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("", None, "holds no UTF-8 text"),
        ("a.txt", b"\n\n", "holds no UTF-8 text"),
        ("b.jsonl", b"", "holds no UTF-8 text"),
        ("a.bin", b"caf\xe9", "a.bin: not UTF-8 text"),
        ("a.bin", b"ELF\0\0", "a.bin: not UTF-8 text"),
        ("/dev/null", None, "neither a file nor a folder"),
    ],
)
def test_a_source_without_text_is_refused(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert complaint in refusal(path)


@pytest.mark.parametrize(("owner", "function", "name"), [(Path, "read_bytes", "a.txt"), (os, "scandir", "")])
def test_an_unreadable_file_or_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, function: str, name: str
) -> None:
    def refuse(path: Path | str) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(owner, function, refuse)  # permissions themselves would not stop root
    assert f"cannot read {tmp_path / name} (Permission denied)" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"txet": "x"}', "no field 'text' (did you mean 'txet'?)"),
        (b'{"text": 3}', "field 'text' holds int, not text"),
        (b'{"text": null}', "field 'text' holds NoneType"),
        (b'["text"]', "JSON list"),
        (b'{"text": ', "not a JSON record"),
        (b'{"text": "\xe9"}', "not a JSON record"),
    ],
)
def test_invalid_jsonl_records_are_refused(tmp_path: Path, line: bytes, complaint: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    message = refusal(file)
    assert f"{file}:3: " in message and complaint in message
    assert refusal(tmp_path) == message  # not skipped in a folder either


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "good"}\n' * 10_000)
    for name, content in (
        ("cut", whole[: len(whole) // 2]),
        ("text", b'{"text": "x"}\n'),
        ("bits", whole[:20] + b"\xff" * 50),
    ):
        file = tmp_path / f"{name}.jsonl.gz"
        file.write_bytes(content)
        assert f"{file}:" in (message := refusal(file)) and "unreadable" in message


class Rows(list[dict[str, Any]]):
    """The used part of a ``datasets.Dataset``."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def select_columns(self, names: list[str]) -> Iterator[dict[str, Any]]:
        return ({name: row[name] for name in names} for row in self)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], Rows]:
    """Replace the package ``datasets`` by one whose hub has the entries of the returned dict."""
    shelf: dict[tuple[str, str | None, str], Rows] = {}

    class DatasetsError(Exception):
        pass

    def load_dataset(name: str, configuration: str | None, split: str, streaming: bool) -> Rows:
        assert streaming
        if name == "refused":
            raise DatasetsError("no\nsuch thing")
        if (name, configuration, split) not in shelf:
            raise ConnectionError(f"Couldn't reach {name!r}")
        return shelf[name, configuration, split]

    package = ModuleType("datasets")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    package.exceptions = ModuleType("datasets.exceptions")  # type: ignore[attr-defined]
    package.exceptions.DatasetsError = DatasetsError
    monkeypatch.setitem(sys.modules, "datasets", package)
    return shelf


def test_hub_datasets_are_read(hub: dict[tuple[str, str | None, str], Rows]) -> None:
    hub["owner/name", None, "train"] = Rows([{"text": "one", "id": 1}, {"text": "two", "id": 2}])
    hub["owner/name", "small", "train"] = Rows([{"body": "three"}])
    assert texts("hf:owner/name") == ["one", "two"]
    assert texts("hf:owner/name:small", "body") == ["three"]
    assert "did you mean 'body'" in refusal("hf:owner/name:small", "bodi")
    assert "row 0: field 'id' holds int" in refusal("hf:owner/name", "id")
    names = ("hf:owner/name", "hf:owner/name:small", "hf:owner/other")
    assert len({fingerprint(DataConfig(source=name)) for name in names}) == 3


@pytest.mark.usefixtures("hub")
def test_an_unreachable_hub_dataset_is_refused() -> None:
    assert "cannot load it (Couldn't reach 'owner/other'); check the name and the network" in refusal("hf:owner/other")
    assert "cannot load it (no such thing)" in refusal("hf:refused")
    assert "cannot load it (Couldn't reach 'owner/other')" in refusal("hf:owner/other:small")
    assert "names no dataset" in refusal("hf:")


def test_hub_datasets_are_streamed_and_may_fail_midway(hub: dict[tuple[str, str | None, str], Rows]) -> None:
    """Rows arrive one by one; the columns of some datasets are unknown in advance."""
    taken: list[int] = []

    class Streamed(Rows):
        column_names = None  # type: ignore[assignment]

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for row in super().__iter__():
                if row["text"] is None:
                    raise RuntimeError("connection\nreset")
                taken.append(len(taken))
                yield row

    rows = [{"text": f"document {i}"} for i in range(100)]
    hub["owner/large", None, "train"] = Streamed(rows)
    assert texts("hf:owner/large") == [row["text"] for row in rows]
    taken.clear()
    first = iter_documents(DataConfig(source="hf:owner/large", max_chars=15))
    assert list(first) == ["document 0", "docum"] and taken == [0, 1]
    hub["owner/broken", None, "train"] = Streamed([rows[0], {"text": None}])
    assert "cannot load it (connection reset); check" in refusal("hf:owner/broken")
    assert "row 0: no field 'body'" in refusal("hf:owner/large", "body")


def test_the_hub_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'planaria[hub]'" in refusal("hf:owner/name")


@pytest.mark.slow
def test_the_real_package_reads_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_records(tmp_path / "set" / "train.jsonl", {"text": "one"}, {"text": "two"})
    assert texts(f"hf:{tmp_path / 'set'}") == ["one", "two"]
    assert "cannot load it" in refusal(f"hf:{tmp_path / 'set'}:nosuch")
    assert "cannot load it" in refusal(f"hf:{tmp_path / 'nothing'}")
