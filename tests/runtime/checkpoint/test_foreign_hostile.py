"""Damaged or malicious folders of other formats: refused in one line, nothing executed, no memory taken."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, metadata

from planaria.common.errors import UserError
from planaria.runtime.checkpoint.foreign import dcp, read_apart, room_for, unpickling
from planaria.runtime.checkpoint.foreign.folder import file_inside
from planaria.runtime.checkpoint.foreign.reading import FolderStages
from support.foreign_checkpoints import even, job, written
from support.sample_checkpoints import config, save

TABLE = "model.embed_tokens.weight"


class Command:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder of each format."""
    home, source = tmp_path_factory.mktemp("sound"), config(4)
    saved = save(home / "checkpoints", source, even(source))
    for kind in ("dcp", "universal"):
        written(saved, home / kind, kind)
    return home


def copied(sound: Path, kind: str, to: Path) -> Path:
    return Path(shutil.copytree(sound / kind, to / kind))


def refusal(folder: Path, kind: str) -> str:
    """Return the one line with which a folder is refused."""
    with pytest.raises(UserError) as caught:
        FolderStages(job(folder, config(3), kind)).carry_out()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tag(folder: Path) -> Path:
    return folder / (folder / "latest_universal").read_text()


def piece(folder: Path, file: str) -> Path:
    """Return a file of the embedding table in a universal folder."""
    return tag(folder) / "zero" / TABLE / file


def rewritten(folder: Path, change: Callable[[metadata.Metadata], object]) -> None:
    found = FileSystemReader(folder).read_metadata()
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


# ---- pickles that would run something


def test_no_command_in_any_file_is_run(sound: Path, tmp_path: Path) -> None:
    """Read in a separate process, as a command does."""
    marker = tmp_path / "marker"
    bare, tensors = pickle.dumps(Command(marker)), io.BytesIO()
    torch.save({"param": Command(marker)}, tensors)
    first = sorted((sound / "universal").glob("*/zero/*/fp32.pt"))[0].relative_to(sound / "universal")
    for number, (kind, place, content) in enumerate(
        [("dcp", ".metadata", bare), ("universal", str(first), tensors.getvalue())]
    ):
        folder = copied(sound, kind, tmp_path / str(number))
        (folder / place).write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_apart(job(folder, config(3), kind))
        assert "holds posix.system, which no tensor needs, so it is not read" in str(caught.value)
        assert str(folder / place) in str(caught.value) and not marker.exists()
    folder = copied(sound, "universal", tmp_path / "states")
    (tag(folder) / "mp_rank_00_model_states.pt").write_bytes(tensors.getvalue())
    assert "mp_rank_00_model_states.pt: holds posix.system" in refusal(folder, "universal") and not marker.exists()


@pytest.mark.parametrize("place", ["head", "entry"])
def test_no_command_in_the_file_of_tensors_is_run(sound: Path, tmp_path: Path, place: str) -> None:
    folder, content = copied(sound, "dcp", tmp_path), io.BytesIO()
    torch.save(Command(tmp_path / "marker"), content)
    (folder / "evil").write_bytes(content.getvalue())

    def point(found: metadata.Metadata) -> None:
        index = next(i for i in found.storage_data if i.fqn == f"optim.state.{TABLE}.step")
        found.storage_data[index].relative_path, found.storage_data[index].offset = "evil", 0
        found.storage_data[index].length = len(content.getvalue())

    rewritten(folder, point)
    if place == "head":  # a bare pickle, not torch's archive
        (folder / "evil").write_bytes(pickle.dumps(Command(tmp_path / "marker")).ljust(len(content.getvalue())))
    complaint = refusal(folder, "dcp")
    assert ("holds posix.system" if place == "entry" else "not a complete file of torch.save") in complaint
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("what", [os.system, eval, torch.load, metadata.Metadata.__init__, type, getattr])
def test_metadata_may_name_only_the_needed_classes(what: Any, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": what}))
    with pytest.raises(UserError, match=r"holds [\w.]+, which no tensor needs, so it is not read"):
        unpickling.read_metadata(tmp_path / ".metadata")


@pytest.fixture
def room() -> Iterator[None]:
    """Allow half a gigabyte more than now, as a reader of a small model has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 29), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.usefixtures("room")
def test_randomly_changed_metadata_is_read_or_refused_in_one_line(sound: Path, tmp_path: Path) -> None:
    content, rng = (sound / "dcp" / ".metadata").read_bytes(), random.Random(34107)
    path, refused = tmp_path / ".metadata", 0
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            dcp.entries(unpickling.read_metadata(path), path)
        except UserError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
            refused += 1
    assert refused > 75


# ---- damage


@pytest.mark.slow
def test_truncated_and_flipped_files_are_refused_by_name(sound: Path, tmp_path: Path) -> None:
    for kind, pattern in (("dcp", "*.distcp"), ("dcp", ".metadata"), ("universal", f"*/zero/{TABLE}/exp_avg.pt")):
        for number, damage in enumerate((lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"\0" * len(c))):
            folder = copied(sound, kind, tmp_path / f"{kind}-{number}-{len(pattern)}")
            (path,) = folder.glob(pattern)
            path.write_bytes(damage(path.read_bytes()))
            complaint = refusal(folder, kind)
            assert path.name in complaint or TABLE in complaint or "optim.state" in complaint


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dcp", "universal"])
def test_a_flipped_bit_in_a_tensor_is_found(sound: Path, tmp_path: Path, kind: str) -> None:
    """Torch reads such a tensor without an error."""
    folder = copied(sound, kind, tmp_path)
    wanted = FolderStages(job(folder, config(3), kind))
    needle = wanted._read(wanted._plan.wholes[0], "exp_avg")
    path = next(folder.glob("*.distcp" if kind == "dcp" else f"*/zero/{wanted._plan.wholes[0].name}/exp_avg.pt"))
    content = bytearray(path.read_bytes())
    content[content.index(needle.numpy().tobytes()) + 5] ^= 8
    path.write_bytes(content)
    assert "Bad CRC-32 for file" in refusal(folder, kind)


@pytest.mark.slow
def test_exchanged_tensors_of_one_shape_are_found(sound: Path, tmp_path: Path) -> None:
    folder = copied(sound, "universal", tmp_path)
    one, other = (tag(folder) / "zero" / f"model.layers.{n}.mlp.up_proj.weight" / "exp_avg.pt" for n in (2, 7))
    one.write_bytes(other.read_bytes())
    assert "exp_avg of model.layers.2.mlp.up_proj.weight is not what planaria wrote there" in refusal(
        folder, "universal"
    )
    folder = copied(sound, "dcp", tmp_path)
    keys = [f"model.model.layers.{n}.mlp.up_proj.weight" for n in (2, 7)]
    rewritten(folder, lambda m: setattr(stored(m, keys[0]), "offset", stored(m, keys[1]).offset))
    assert "weights of model.layers.2.mlp.up_proj.weight is not what planaria wrote" in refusal(folder, "dcp")


SHORT, WIDE = {"param": torch.zeros(10, 8)}, {"param": torch.zeros(11, 8, dtype=torch.float64)}
VERSION = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.9}}


def put(folder: Path, file: str, content: object) -> None:
    torch.save(content, piece(folder, file))


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        ("universal", lambda f: shutil.rmtree(tag(f) / "zero" / "model.norm.weight"), "model.norm.weight is missing"),
        ("universal", lambda f: piece(f, "fp32.pt").unlink(), f"weights of {TABLE} are missing"),
        ("universal", lambda f: piece(f, "exp_avg.pt").unlink(), f"exp_avg of {TABLE} is missing"),
        ("universal", lambda f: piece(f, "step.pt").unlink(), f"no step of {TABLE}"),
        ("universal", lambda f: put(f, "step.pt", torch.tensor(7.0)), f"steps differ, 7 of {TABLE} and 30 of"),
        ("universal", lambda f: put(f, "step.pt", torch.tensor(0.5)), "step.pt: the step is not a number of updates"),
        ("universal", lambda f: put(f, "fp32.pt", SHORT), f"fp32.pt: {TABLE} has shape [10, 8], not [11, 8]"),
        ("universal", lambda f: put(f, "fp32.pt", WIDE), f"weights of {TABLE} is torch.float64"),
        ("universal", lambda f: put(f, "fp32.pt", torch.zeros(11, 8)), "no complete tensor"),
        ("universal", lambda f: piece(f, "momentum_buffer.pt").touch(), "momentum_buffer.pt: AdamW has no such state"),
        (
            "universal",
            lambda f: torch.save(VERSION, tag(f) / "mp_rank_00_model_states.pt"),
            "version 0.9; versions 0.2 to 0.4 are read",
        ),
        ("universal", lambda f: (f / "latest_universal").write_text("../universal"), "names '../universal'"),
        ("universal", lambda f: (f / "latest_universal").write_text("else"), "else is missing, or not a folder"),
        ("universal", lambda f: (f / "latest_universal").unlink(), "has neither latest_universal nor zero"),
        ("dcp", lambda f: (f / ".metadata").unlink(), ".metadata: missing, or not a file"),
        ("dcp", lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: missing, or not a file"),
        ("dcp", lambda f: (f / "planaria.json").write_text("{}"), "planaria.json: damaged"),
    ],
)
def test_missing_and_invalid_files_are_named(
    sound: Path, tmp_path: Path, kind: str, change: Callable[[Path], object], complaint: str
) -> None:
    folder = copied(sound, kind, tmp_path)
    change(folder)
    assert complaint in refusal(folder, kind)


def entry(found: metadata.Metadata, key: str) -> Any:
    return found.state_dict_metadata[key]


def stored(found: metadata.Metadata, key: str) -> Any:
    return next(info for index, info in found.storage_data.items() if index.fqn == key)


def renamed(found: metadata.Metadata, old: str, new: str) -> None:
    """A moment of the table under the name of another kind."""
    was, now = (f"optim.state.{TABLE}.{kind}" for kind in (old, new))
    found.state_dict_metadata[now] = found.state_dict_metadata.pop(was)
    index = next(index for index in found.storage_data if index.fqn == was)
    found.storage_data[metadata.MetadataIndex(now, index.offset, index.index)] = found.storage_data.pop(index)


def size_of(found: metadata.Metadata, size: tuple[int, ...]) -> None:
    held = entry(found, f"model.{TABLE}")
    held.size = held.chunks[0].sizes = torch.Size(size)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: size_of(m, (10, 8)), f"{TABLE} has shape [10, 8], not [11, 8]"),
        (lambda m: setattr(stored(m, f"model.{TABLE}"), "relative_path", "../../x"), "names a file '../../x'"),
        (lambda m: setattr(stored(m, f"model.{TABLE}"), "relative_path", "/etc/passwd"), "names a file '/etc/passwd'"),
        (lambda m: setattr(stored(m, f"model.{TABLE}"), "length", 1 << 50), "reaches beyond the end of"),
        (lambda m: setattr(stored(m, f"model.{TABLE}"), "length", 8), "8 bytes of __0_0.distcp cannot be [11, 8]"),
        (lambda m: setattr(stored(m, f"model.{TABLE}"), "offset", -5), "reaches beyond the end of"),
        (lambda m: setattr(stored(m, f"model.{TABLE}"), "transform_descriptors", ["zstd"]), "written with ['zstd']"),
        (lambda m: setattr(entry(m, f"model.{TABLE}").properties, "dtype", torch.float16), "does not match .metadata"),
        (lambda m: m.state_dict_metadata.pop(f"model.{TABLE}"), f"weights of {TABLE} are missing"),
        (lambda m: m.state_dict_metadata.pop(f"optim.state.{TABLE}.exp_avg_sq"), f"exp_avg_sq of {TABLE} is missing"),
        (lambda m: m.state_dict_metadata.pop(f"optim.state.{TABLE}.step"), f"no step of {TABLE}"),
        (lambda m: renamed(m, "exp_avg_sq", "max_exp_avg_sq"), "AdamW has no 'max_exp_avg_sq'"),
        (lambda m: m.storage_data.clear(), ".metadata: damaged (KeyError"),
        (lambda m: setattr(m, "storage_data", 3), ".metadata: damaged (TypeError"),
    ],
)
def test_metadata_that_contradicts_its_files_is_refused(
    sound: Path, tmp_path: Path, change: Callable[[metadata.Metadata], object], complaint: str
) -> None:
    folder = copied(sound, "dcp", tmp_path)
    rewritten(folder, change)
    if "does not match" in complaint:
        (folder / "planaria.json").unlink()
    assert complaint in refusal(folder, "dcp")


@pytest.mark.slow
def test_a_note_of_another_model_or_an_earlier_step_is_refused(sound: Path, tmp_path: Path) -> None:
    folder = copied(sound, "dcp", tmp_path)
    with pytest.raises(UserError, match=r"has rope_theta = 10000.0, the recipe has 500.0; set model.rope_theta"):
        FolderStages(job(folder, config(3, rope_theta=500.0), "dcp"))
    shutil.rmtree(folder)
    source = config(4)
    states = even(source)
    for held in states.values():
        held.clocks = dict.fromkeys(held.clocks, 31)
    written(save(tmp_path / "later", source, states), folder, "dcp")
    assert "has 31 updates, but planaria.json has step 30; remove planaria.json if" in refusal(folder, "dcp")


@pytest.mark.parametrize("kind", ["dcp", "universal"])
def test_links_are_not_followed(sound: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(sound, kind, tmp_path)
    path = next(folder.glob("*.distcp" if kind == "dcp" else f"*/zero/{TABLE}"))
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    assert f"{path} is a symbolic link" in refusal(folder, kind)


@pytest.mark.parametrize("name", ["", "../a", "a/../../b", "/a", "a\0b", "gone", "folder"])
def test_only_plain_files_inside_a_folder_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"outside of it|missing, or not a file"):
        file_inside(tmp_path, name)


# ---- memory


def deflated(path: Path) -> None:
    """A file whose tensor is a thousand times larger than itself."""
    torch.save({"param": torch.zeros(11, 8)}, path)
    with zipfile.ZipFile(path) as old:
        entries = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in entries.items():
            new.writestr(name, b"\0" * (64 << 20) if name.endswith("data/0") else content)


@pytest.mark.slow
def test_a_file_that_claims_more_than_it_has_is_refused_before_it_is_read(sound: Path, tmp_path: Path) -> None:
    folder = copied(sound, "universal", tmp_path)
    deflated(tag(folder) / "zero" / TABLE / "fp32.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "fp32.pt: claims more than its" in refusal(folder, "universal")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


@pytest.mark.slow
def test_a_readers_memory_is_bounded_by_the_model(sound: Path, tmp_path: Path) -> None:
    """200 MB of metadata that would take 13 GB as empty lists."""
    assert room_for(config(3).model, 3) < 1 << 30
    folder = copied(sound, "dcp", tmp_path)
    (folder / ".metadata").write_bytes(b"\x80\x04(" + b"]" * (200 << 20) + b"l.")
    with pytest.raises(UserError, match="needs more memory than its model has"):
        read_apart(job(folder, config(3), "dcp"))
    universal = copied(sound, "universal", tmp_path)
    for step in (tag(universal) / "zero").glob("*/step.pt"):
        step.unlink()
    with (tag(universal) / "zero" / "optimizer_state.pt").open("wb") as file:
        file.truncate(1 << 30)
    assert "too many for this file" in refusal(universal, "universal")
