"""Documents from files and bodies of requests: bounds and errors of one line."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from planaria.cli.http_flags import read_token
from planaria.common import documents
from planaria.common.documents import read_body
from planaria.common.errors import UserError
from planaria.control.log.reader import identity
from planaria.runtime.fleet.joining import read_key, read_run_address


class Letter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    words: list[str] = []
    number: float = 0.0


@pytest.mark.parametrize("size", [32, 1 << 30])
def test_reading_takes_memory_for_the_content_within_the_bound(size: int, tmp_path: Path) -> None:
    """A large file in place of a small one takes at most the reader's bound."""
    file, address = tmp_path / "run.id", tmp_path / "address.json"
    for path in (file, address):
        path.touch(0o600)
        os.truncate(path, size)
    readers: list[Callable[[], object]] = [
        lambda: read_key(file),
        lambda: read_run_address(tmp_path),
        lambda: read_token(file),
    ]
    readers.append(lambda: documents.read_bytes(file, 1 << 12) if size > 32 else documents.read_bytes(file))
    if size == 32:
        readers.append(lambda: identity(tmp_path))
    tracemalloc.start()
    try:
        for read in readers:
            tracemalloc.reset_peak()
            with suppress(UserError):
                read()
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(content: bytes) -> None:
    for read in (
        lambda: documents.parse_json(content, "x"),
        lambda: documents.parse_model(Letter, content, "x"),
        lambda: documents.parse_toml(content.decode("latin-1"), "x"),
    ):
        try:
            read()
        except UserError as error:
            assert str(error).startswith("x: ")


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 20000, "a = " + "9" * 5000, "a = 0x" + "f" * 5000, ".".join("a" * 9999)]
)
def test_pathological_toml_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="x: not valid TOML"):
        documents.parse_toml(text, "x")


def test_a_sealed_document_is_intact_or_refused(tmp_path: Path) -> None:
    path, letter = tmp_path / "letter.json", Letter(words=["a", "b"], number=0.1)
    path.write_text(documents.seal(letter))
    assert documents.read_sealed(path, Letter) == letter
    text = path.read_text()
    path.write_text(text.replace("0.1", "0.3"))
    with pytest.raises(UserError, match=r"letter.json has changed since it was written"):
        documents.read_sealed(path, Letter)
    path.write_text(json.dumps(json.loads(text), indent=7))
    assert documents.read_sealed(path, Letter) == letter, "layout does not matter"
    path.write_text(letter.model_dump_json())
    assert documents.read_sealed(path, Letter) == letter, "an older planaria wrote no digest"


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 11)
    for path, complaint in (
        (tmp_path, "is not a file"),
        (tmp_path / "none", "no such file"),
        (tmp_path / "large", "10 bytes"),
    ):
        with pytest.raises(UserError, match=complaint):
            documents.read_bytes(path, 10)
    with pytest.raises(UserError, match="is not a file"):
        documents.read_bytes(Path("/dev/zero"), 10)


async def parts(*some: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for part in some:
        await asyncio.sleep(pause_s)
        yield part


@pytest.mark.parametrize(("most", "read"), [(4, b"abcd"), (3, None), (0, None)])
def test_a_body_is_read_or_too_large(most: int, read: bytes | None) -> None:
    assert asyncio.run(read_body(parts(b"ab", b"", b"cd"), most, 10.0)) == read


def test_a_slow_body_returns_none() -> None:
    assert asyncio.run(read_body(parts(b"a", b"b", pause_s=5.0), 10, 0.05)) is None
