"""Sources at URLs: content, amount of data read, and errors."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import fsspec.registry
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data import records, remote
from planaria.data.corpus import fingerprint, iter_documents
from planaria.data.shards import tokenise_corpus
from support.source_texts import refusal, texts


class Flaky(MemoryFileSystem):
    """A store that counts bytes read, and fails with exceptions of its library."""

    protocol = "flaky"
    read, breaks_at = 0, 1 << 60

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://flaky/")))

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        return Counted(super().open(path, mode, **how)) if mode == "rb" else super().open(path, mode, **how)

    def ls(self, path: str, detail: bool = True, **how: Any) -> Any:
        if "private" in path:
            raise PermissionError("Access Denied")
        return super().ls(path, detail, **how)


class Counted:
    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self, size: int) -> bytes:
        if Flaky.read >= Flaky.breaks_at:
            raise RuntimeError("peer\nwent away")
        found: bytes = self.file.read(size)
        Flaky.read += len(found)
        return found

    def close(self) -> None:
        self.file.close()


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.read, Flaky.breaks_at = 0, 1 << 60
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


registry = sys.modules["fsspec.registry"]
"""the module; the package has a mapping of this name"""


def put(url: str, content: bytes | str) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def test_a_folder_at_a_url_is_read_like_a_local_one(tmp_path: Path) -> None:
    reports: list[str] = []
    files = {
        "b/z.txt": b"\xef\xbb\xbfsecond",
        "a.md": b"first",
        ".git/config": b"hidden",
        "picture.png": b"\x89PNG\0\0",
        "c.jsonl": b'{"text": "third"}\n\n{"text": ""}\n{"text": "fourth"}\n',
        "d.jsonl.gz": gzip.compress(b'{"text": "fifth"}\n'),
    }
    for name, content in files.items():
        put(f"memory://corpus/{name}", content)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = list(iter_documents(DataConfig(source="memory://corpus"), reports.append))
    assert found == ["first", "second", "third", "fourth", "fifth"] == texts(str(tmp_path))
    assert [line.replace(":///", "://") for line in reports] == ["skipped memory://corpus/picture.png: not UTF-8 text"]
    assert texts("memory://corpus/c.jsonl") == ["third", "fourth"]
    assert texts(f"file://{tmp_path}") == found
    assert texts(f"zip://::file://{archive(tmp_path)}/a.zip") == ["in an archive"]


def archive(folder: Path) -> Path:
    import zipfile

    with zipfile.ZipFile(folder / "a.zip", "w") as file:
        file.writestr("inside.txt", "in an archive")
    return folder


def test_prepared_data_follows_the_files(tmp_path: Path) -> None:
    put("memory://corpus/a.txt", "the first text " * 20)
    data = DataConfig(source="memory://corpus", tokenizer="bytes", cache=str(tmp_path))
    before, made = fingerprint(data), tokenise_corpus(data, 257)
    assert fingerprint(data) == before and tokenise_corpus(data, 257).folder == made.folder
    put("memory://corpus/a.txt", "the other text" * 20)
    assert fingerprint(data) != before
    put("memory://corpus/a.txt", "another text, and a longer one " * 20)
    assert tokenise_corpus(data, 257).folder != made.folder


def test_no_more_is_read_than_needed() -> None:
    line = json.dumps({"text": "x" * 990}) + "\n"
    put("flaky://corpus/large.jsonl", line * 20_000)
    found = texts("flaky://corpus/large.jsonl", most=5000)
    assert [len(text) for text in found] == [990] * 5 + [50]
    assert Flaky.read <= 1 << 20
    Flaky.read = 0
    assert len(texts("flaky://corpus")) == 20_000 and Flaky.read == 20_000 * len(line)


def test_most_limits_text_and_changes_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    assert texts(str(tmp_path), most=7) == ["one two"]
    whole, part = (DataConfig(source=str(tmp_path), max_chars=most) for most in (None, 7))
    assert fingerprint(whole) != fingerprint(part)


def test_unreachable_sources_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put("flaky://corpus/a.jsonl", '{"text": "good"}\n' * 200_000)
    Flaky.breaks_at = 1 << 20
    line = (
        "flaky://corpus/a.jsonl: cannot read it (peer went away); check the address, your permissions and the network"
    )
    assert refusal("flaky://corpus/a.jsonl") == f"data.source: {line}"
    put("flaky://corpus/a.txt", "a text " * 200_000)
    Flaky.read = 0
    assert "flaky://corpus/a.txt: cannot read it (peer went away)" in refusal("flaky://corpus/a.txt")
    assert "memory://nowhere: cannot read it (there is nothing)" in refusal("memory://nowhere")
    put("flaky://private/a.txt", "text")
    Flaky.breaks_at = 1 << 60
    assert "flaky://private: cannot read it (Access Denied)" in refusal("flaky://private")
    with pytest.raises(UserError, match="there is nothing"):
        fingerprint(DataConfig(source="memory://nowhere"))
    assert "data.source = 'nosuch://x': Protocol not known: nosuch" in refusal("nosuch://x")
    assert "JupyterFileSystem" in refusal("jupyter://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    line = "data.source = 's3://bucket/text' needs the package 's3fs'; install it with: pip install 'planaria[s3]'"
    assert refusal("s3://bucket/text") == line


@pytest.mark.parametrize(
    "url", ["https://host/a.txt", "http://user:secret@host/a.txt", "zip://a.txt::https://host/a.zip"]
)
def test_urls_without_their_package_are_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiohttp" or name.endswith("n.http")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for protocol in ("http", "https"):
        monkeypatch.delitem(registry._registry, protocol, raising=False)
    assert refusal(url).endswith("needs the package 'aiohttp'; install it with: pip install 'planaria[http]'")
    assert "secret" not in refusal(url)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "MAX_TEXT", 1 << 20)
    monkeypatch.setattr(records, "MAX_LINE", 1 << 20)
    monkeypatch.setattr(remote, "MAX_FILES", 2)
    put("memory://corpus/a.txt", "x" * (1 << 20))
    assert len(texts("memory://corpus")[0]) == 1 << 20
    put("memory://corpus/a.txt", "x" * ((1 << 20) + 1))
    assert "memory://corpus/a.txt has more than 1 MiB, too many for one document" in refusal("memory://corpus/a.txt")
    bomb = gzip.compress(b'{"text": "one"}\n{"text": "' + b"x" * (64 << 20))
    put("memory://bomb.jsonl.gz", bomb)
    assert "memory://bomb.jsonl.gz:2: more than 1 MiB, too many for a record" in refusal("memory://bomb.jsonl.gz")
    (tmp_path / "bomb.jsonl.gz").write_bytes(bomb)
    assert "bomb.jsonl.gz:2: more than 1 MiB" in refusal(str(tmp_path / "bomb.jsonl.gz"))
    for name in ("b", "c"):
        put(f"memory://corpus/{name}.txt", "text")
    assert "'memory://corpus' has more than 2 files" in refusal("memory://corpus")


def test_a_source_of_a_mixture_may_be_a_url(tmp_path: Path) -> None:
    put("memory://web/a.txt", "to be or not to be " * 30)
    (tmp_path / "b.txt").write_text("that is the question " * 30)
    entries: dict[str, Any] = {
        "web": {"source": "memory://web", "weight": 1, "max_chars": 100},
        "books": {"source": str(tmp_path / "b.txt"), "weight": 1},
    }
    given: dict[str, Any] = {"tokenizer": "bytes", "validation": 0.0, "cache": str(tmp_path / "cache")}
    made = tokenise_corpus(DataConfig.model_validate({"mixture": entries, **given}), 257)
    assert made.parts["web"].tokens("train") == 101
    entries["web"]["source"] = "memory://gone"
    with pytest.raises(UserError, match=r"data\.mixture\.web\.source: memory://gone: cannot read it"):
        tokenise_corpus(DataConfig.model_validate({"mixture": entries, **given}), 257)


@pytest.mark.slow
def test_a_web_server_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "large.jsonl").write_text((json.dumps({"text": "x" * 990}) + "\n") * 20_000)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_port}"
    try:
        assert texts(f"{at}/packed.jsonl.gz") == ["packed"]
        assert len(texts(f"{at}/large.jsonl")) == 20_000
        assert texts(f"{at}/large.jsonl", most=5) == ["xxxxx"]
        before = fingerprint(DataConfig(source=f"{at}/packed.jsonl.gz"))
        (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(b'{"text": "another, longer text"}\n'))
        assert fingerprint(DataConfig(source=f"{at}/packed.jsonl.gz")) != before
        assert "File not found" in refusal(f"{at}/nothing.txt")
        monkeypatch.setattr(remote, "SILENCE_S", 0.3)
        assert "cannot read it" in (line := refusal(f"{at}/stuck")) and "imeout" in line
    finally:
        server.shutdown()
        server.server_close()
    assert "Cannot connect to host" in refusal(f"{at}/packed.jsonl.gz")


class Quiet(SimpleHTTPRequestHandler):
    """Serves whole files only, and ``/stuck`` never."""

    def send_head(self) -> Any:
        if self.path == "/stuck":
            time.sleep(2)
        return super().send_head()

    def log_message(self, *words: object) -> None: ...

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(ConnectionError):  # a client that has read enough disconnects
            super().copyfile(source, outputfile)


@pytest.mark.slow
def test_an_s3_store_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    known = {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "DEFAULT_REGION": "us-east-1"}
    for name, value in (known | {"ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        fsspec.filesystem("s3").mkdir("bucket")
        put("s3://bucket/corpus/b/z.txt", "second " * 30)
        put("s3://bucket/corpus/a.jsonl.gz", gzip.compress(b'{"text": "first"}\n'))
        put("s3://bucket/corpus/.hidden/x", "hidden")
        assert texts("s3://bucket/corpus") == ["first", "second " * 30]
        data = DataConfig(source="s3://bucket/corpus", tokenizer="bytes", cache=str(tmp_path))
        folder = tokenise_corpus(data, 257).folder
        put("s3://bucket/corpus/b/z.txt", "SECOND " * 30)
        assert tokenise_corpus(data, 257).folder != folder
        assert "there is nothing" in refusal("s3://bucket/none")
        assert "bucket does not exist" in refusal("s3://nowhere/x")
    finally:
        server.stop()
