"""A machine writes nothing outside its cache, whichever file names a hostile controller sends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Form, Load, Member
from planaria.control.facts.orders import ORDER
from planaria.runtime.engine import run_files
from planaria.runtime.fleet import files, joining
from planaria.runtime.transport.secure import new_key
from planaria.runtime.worker.checkpoint_writer import StageFiles
from planaria.runtime.worker.setup import SETUP, Setup

LOOT = b"written by the controller\n"
PREPARED = ["meta.json", "mixture.json", "tokenizer.json", "train.bin", "validation.bin"]


class Controller:
    """A control line whose other end answers with these names and these contents."""

    def __init__(self, listed: Any, contents: dict[str, bytes]) -> None:
        self._listed, self._contents, self._answers = listed, contents, list[bytes]()

    def call(self, *_: object) -> Controller:
        return self

    def send_bytes(self, text: bytes) -> None:
        request = json.loads(text)
        if request["kind"] == "index":
            self._answers = [json.dumps({"kind": "listed", "names": self._listed}).encode()]
        else:
            content = self._contents.get(request["name"].rpartition("/")[2], LOOT)
            digest = hashlib.sha256(content).hexdigest()
            size = json.dumps({"kind": "content", "size": len(content)}).encode()
            self._answers = [size, content, json.dumps({"kind": "digest", "sha256": digest}).encode()]

    def poll(self, _: float) -> bool:
        return bool(self._answers)

    def recv_bytes(self, _: int) -> bytes:
        return self._answers.pop(0)

    def close(self) -> None: ...


def names(outside: Path) -> st.SearchStrategy[str]:
    """Valid and invalid file names; none leads out of the test's own folder."""
    parts = st.sampled_from(["..", ".", "", "x", "train.bin", ".bashrc", "a\x00b", "\x1b[2J", "é", "x" * 300, "~"])
    paths = st.lists(parts, min_size=1, max_size=5).map("/".join)
    chosen = st.sampled_from(["../../.bashrc", "../../../loot", *PREPARED])
    relative = (paths | chosen | st.text(max_size=12)).filter(lambda name: not name.startswith("/"))
    return relative | st.sampled_from([f"{outside}/loot", f"/{outside}/.bashrc"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's files beside the cache."""
    home = tmp_path_factory.mktemp("machine") / "a/b/c/d/e/f/home"
    home.mkdir(parents=True)
    (home / ".bashrc").write_text("the user's own\n")
    return home


@contextlib.contextmanager
def untouched(home: Path) -> Iterator[Path]:
    """A cache; afterwards nothing beside it has changed or come."""
    cache = home / "cache" / "planaria"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    yield cache
    top = home.parents[6]
    found = {path for path in top.rglob("*") if cache not in (path, *path.parents) and path not in home.parents}
    assert found == {home, home / ".bashrc", cache.parent}
    assert (home / ".bashrc").read_text() == "the user's own\n"


PLAIN = SETUP.dump_json(Setup(RunConfig(), Path("/run"), Path("/data"), "127.0.0.1"))


def welcome(name: str, dataset: str, host: str) -> tuple[Setup, str]:
    """Return the setup and the machine's own name as it learns them when it joins; ValidationError if it refuses."""
    tree = json.loads(PLAIN)
    tree["config"]["name"], tree["dataset"] = name, dataset
    received = joining.Welcome(host=host, setup=json.dumps(tree), cwd="/")
    return replace(SETUP.validate_json(received.setup), key=new_key()), received.host


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_is_written_outside_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    hostile, plain = names(home), st.just("text-0123")
    listed = data.draw(st.lists(hostile, max_size=4) | st.just([*PREPARED]))
    part = {"quota": 1, "folder": data.draw(hostile), "meta": {}}
    mixture = json.dumps({"format": 1, "parts": {"one": part}}).encode()
    controller = Controller(listed, {"mixture.json": mixture})
    monkeypatch.setattr(files, "call", controller.call)
    drawn = [data.draw(plain | hostile) for _ in range(3)]
    with untouched(home) as cache, contextlib.suppress(UserError, ValidationError):
        setup, host = welcome(*drawn)
        run_files.provide_setup(setup, "controller:1", host, cache, lambda _: None)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_orders_touch_no_file_outside(home: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """The checkpoint that a stage is loaded from, and the worker's own name."""
    hostile = names(home)
    monkeypatch.setattr(files, "call", Controller([], {}).call)
    with untouched(home) as cache, contextlib.suppress(UserError, ValidationError):
        start = {"kind": "start", "worker": data.draw(st.just("w1") | hostile), "incarnation": 1}
        received = joining.TO_MACHINE.validate_python(start)
        assert isinstance(received, joining.Start)
        setup = Setup(RunConfig(), cache / "joined", cache, "127.0.0.1", new_key(), files="controller:1")
        load = {"origin": "load", "folder": data.draw(st.just("step-00000001") | hostile)}
        order = ORDER.validate_json(json.dumps(formed(load)))
        assert isinstance(order, Form) and isinstance(order.members[0].source, Load)
        StageFiles(setup, received.worker).read(order.members[0].source.folder, 1, 0)


def formed(source: dict[str, str]) -> dict[str, Any]:
    """An order that gives a worker its stage from this source."""
    member = Member(node=1, stage=1, worker="w1", source=Load(folder="x"))
    form = Form(generation=1, step=0, outcome="started", members=[member], links=[]).model_dump(mode="json")
    form["members"][0]["source"] = source
    return form
