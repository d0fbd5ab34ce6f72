"""Checkpoints mirrored to a store: the order of files there, and resuming from the store on another machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import planaria
from planaria.common.errors import UserError
from planaria.control.log.reader import ID
from planaria.models.packing import entries
from planaria.runtime.api.execution import MIRRORED
from planaria.runtime.checkpoint.mirror import MAX_BYTES, Mirror, mirror_folder
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import MANIFEST, CheckpointStore
from support import s3_server
from support.live.harness import tiny
from support.waiting import until

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server.bucket("runs") as url:
        yield url


def settings(folder: Path, store: str | None, steps: int = 10, **changed: Any) -> planaria.RunConfig:
    """A run of milliseconds a step."""
    saves = {"every": 2, "keep": 2, "store": store} if store is not None else {"every": 2, "keep": 2}
    made = tiny(folder.parent, stages=2, steps=steps, checkpoint=saves, observe={"trackers": ""})
    return made.model_copy(update={"engine": "inline", "out": str(folder), "name": "mine", **changed})


def train(config: planaria.RunConfig) -> planaria.Run:
    return planaria.train(config, progress=False)


def states(run: Path) -> list[dict[str, bytes]]:
    """Every tensor of each stage in the newest checkpoint, with moments and clocks, byte by byte."""
    saved = CheckpointStore(run / "checkpoints").newest(whole_only=True)
    found = [entries(read_stage(saved.folder, stage, saved.step)) for stage in saved.manifest.stages]
    return [{name: tensor.numpy().tobytes() for name, tensor in stage.items()} for stage in found]


@pytest.mark.slow
def test_a_run_resumes_on_another_machine_bit_for_bit(tmp_path: Path, bucket: str) -> None:
    whole = train(settings(tmp_path / "whole", None))
    train(settings(tmp_path / "here", bucket, steps=6))
    shutil.rmtree(tmp_path / "here")
    on = resume(bucket, tmp_path / "there", **{"train.steps": "10"})
    assert on.folder == tmp_path / "there" / "mine"
    assert states(on.folder) == states(whole.folder)
    assert Mirror(bucket, "mine").names() == ["step-00000008", "step-00000010"], "it saves there again"


class Ordered(MemoryFileSystem):
    """A store that records files put and removed, and may fail."""

    protocol = "ordered"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    operations: list[str] = []  # noqa: RUF012
    broken = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("ordered://"))

    def put_file(self, lpath: str, rpath: str, *given: Any, **more: Any) -> None:
        if Ordered.broken:
            raise ConnectionError("out of order")
        super().put_file(lpath, rpath, *given, **more)
        self.operations.append(f"+{rpath.rpartition('/checkpoints/')[2]}")

    def rm_file(self, path: str) -> None:
        super().rm_file(path)
        self.operations.append(f"-{path.rpartition('/checkpoints/')[2]}")


@pytest.fixture
def ordered() -> str:
    """The URL of an empty store."""
    import fsspec

    fsspec.register_implementation("ordered", Ordered, clobber=True)
    Ordered.store.clear()
    Ordered.operations.clear()
    Ordered.broken = False
    return "ordered://place"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a store."""
    return train(settings(tmp_path_factory.mktemp("alone") / "runs", None)).folder


@pytest.fixture
def stored(alone: Path, ordered: str) -> str:
    """The URL of a store that holds this run."""
    mirror = Mirror(ordered, "mine")
    mirror.claim(alone)
    mirror.update(alone, MIRRORED)
    return ordered


def resume(store: str, out: Path, **changed: str) -> planaria.Run:
    return planaria.train(f"{store}/mine", resume=True, progress=False, settings={"out": str(out), **changed})


def test_a_manifest_comes_last_and_goes_first(tmp_path: Path, ordered: str) -> None:
    run = train(settings(tmp_path / "runs", ordered))
    mirror = Mirror(ordered, "mine")
    shutil.rmtree(run.folder / "checkpoints" / "step-00000008")
    mirror.update(run.folder, [])
    assert mirror.names() == ["step-00000010"]
    for step in ("step-00000008", "step-00000010"):
        reported = [line for line in Ordered.operations if line[1:].startswith(step)]
        put = [line for line in reported if line[0] == "+"]
        assert put[-1] == f"+{step}/{MANIFEST}" and len(put) == 4
        removed = [line for line in reported if line[0] == "-"]
        assert not removed or removed[0] == f"-{step}/{MANIFEST}"


@pytest.mark.parametrize("stays", [False, True], ids=["for a while", "permanently"])
def test_a_failing_store_is_reported_and_costs_no_more_than_the_copy(alone: Path, ordered: str, stays: bool) -> None:
    warnings: list[str] = []
    mirror = Mirror(ordered, "mine")
    mirror.claim(alone)
    Ordered.broken = True
    with mirror_folder(mirror, alone, [ID], warnings.append):
        if not stays:
            until(lambda: warnings)
            Ordered.broken = False
    if stays:
        assert warnings and "checkpoint.store: ordered://place/mine: cannot write" in warnings[-1]
    else:
        assert "out of order" in warnings[0] and "will be tried again" in warnings[0] and len(warnings) == 1
        assert mirror.names() == ["step-00000008", "step-00000010"]


def test_another_runs_folder_is_left_alone(tmp_path: Path, stored: str) -> None:
    before = dict(Ordered.store)
    with pytest.raises(UserError, match="holds another run; choose another --name"):
        train(settings(tmp_path / "two", stored))
    assert Ordered.store == before and not (tmp_path / "two" / "mine").exists()


@pytest.mark.parametrize(
    ("store", "message"),
    [("nonsense://x", "checkpoint.store = 'nonsense://x/mine'"), ("file:///proc/nowhere", "cannot write there")],
)
def test_an_invalid_store_is_refused(tmp_path: Path, store: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(settings(tmp_path / "runs", store))
    assert not (tmp_path / "runs" / "mine").exists()


def test_a_missing_or_a_local_run_is_not_fetched(tmp_path: Path, alone: Path, ordered: str) -> None:
    with pytest.raises(UserError, match="has no complete checkpoint"):
        resume(ordered, tmp_path)
    mirror = Mirror(ordered, "mine")
    mirror.claim(alone)
    mirror.update(alone, MIRRORED)
    with pytest.raises(UserError, match="exists already"):
        resume(ordered, alone.parent)
    assert alone.exists()


def test_damage_in_the_store_is_refused(tmp_path: Path, stored: str) -> None:
    name = next(name for name in Ordered.store if "step-00000010/stage-0001" in name)
    data = bytearray(Ordered.store[name].getvalue())
    data[-100] ^= 1
    Ordered("ordered").pipe_file(name, bytes(data))
    with pytest.raises(UserError, match=r"stage-0001\.safetensors"):
        resume(stored, tmp_path / "new", **{"train.steps": "12"})


def test_a_repeated_step_replaces_the_earlier_one(tmp_path: Path, ordered: str) -> None:
    """The run is resumed from an earlier checkpoint, and reaches the same step with other weights."""
    run, mirror = train(settings(tmp_path / "runs", ordered)), Mirror(ordered, "mine")
    other = train(settings(tmp_path / "other", None, seed=1))
    last = "step-00000010"
    shutil.rmtree(run.folder / "checkpoints" / last)
    shutil.copytree(other.folder / "checkpoints" / last, run.folder / "checkpoints" / last)
    mirror.update(run.folder, [])
    held = next(Ordered.store[name].getvalue() for name in Ordered.store if f"{last}/stage-0001" in name)
    assert held == (run.folder / "checkpoints" / last / "stage-0001.safetensors").read_bytes()


class Lying(Ordered):
    """A store that announces wrong sizes, and counts the bytes read."""

    protocol = "lying"
    about: dict[str, int] = {}  # noqa: RUF012
    read = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("lying://"))

    def info(self, path: str, **how: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **how)
        sizes = [size for end, size in self.about.items() if str(path).endswith(end)]
        return found | ({"size": sizes[0]} if sizes else {})

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        return Counted(super().open(path, mode, **how)) if mode == "rb" else super().open(path, mode, **how)


class Counted:
    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self, size: int) -> bytes:
        found: bytes = self.file.read(size)
        Lying.read += len(found)
        return found

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("file", "size", "message"),
    [
        ("config.json", 1 << 40, r"config\.json: its size is 1099511627776, which must be at most 268435456 bytes"),
        (
            f"10/{MANIFEST}",
            MAX_BYTES + 1,
            r"manifest\.json: its size is 16777217, which must be at most 16777216",
        ),
        (
            "10/stage-0002.safetensors",
            6 << 20,
            r"stage-0002\.safetensors: its size is 6291456, which must be at most 6047744 bytes",
        ),
        ("10/stage-0002.safetensors", 1000, r"stage-0002\.safetensors has more than the 1000 bytes that its store"),
        ("10/stage-0002.safetensors", 1 << 20, r"stage-0002\.safetensors: ends after \d+ of 1048576 bytes"),
        ("events.jsonl", 1 << 39, r"events\.jsonl takes 549755813888 bytes, and .* has 1073741824 free; free"),
    ],
)
def test_files_of_impossible_sizes_are_refused(
    tmp_path: Path, file: str, size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    fsspec.register_implementation("lying", Lying, clobber=True)
    monkeypatch.setattr(Lying, "about", {file: size})
    monkeypatch.setattr(Lying, "read", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(UserError, match=message) as caught:
        resume("lying://place", tmp_path / "new")
    assert "\n" not in str(caught.value) and not list((tmp_path / "new").glob("[!.]*"))
    assert Lying.read < 2 << 20, "no more than possible is read"


def test_only_a_runs_own_files_are_fetched(tmp_path: Path, stored: str) -> None:
    Ordered("ordered").pipe_file("/place/mine/other", b"x")
    found = Mirror(stored, "mine").fetch(tmp_path / "new", MIRRORED, lambda line: None)
    names = {file.name for file in found.iterdir()}
    assert "other" not in names and {"config.json", "events.jsonl", ID, "checkpoints"} <= names
