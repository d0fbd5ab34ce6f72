"""Two hundred ways in which a checkpoint can be damaged, or made to harm; seeded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.hostile import DAMAGE_KINDS as KINDS
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from planaria.common import documents
from planaria.models.packing import digest

Damage = Callable[[Path, random.Random], None]
"""what becomes of a checkpoint's folder"""
OTHER = "step-00000001"
"""an earlier checkpoint of the same run"""


@dataclass(frozen=True)
class Case:
    """One damage to one file of a checkpoint."""

    name: str
    file: str
    damage: Damage
    expected: str = ""
    """further text that the error must contain: the tensor or the field"""


class Harm:
    """Creates a folder when a reader unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def cases(stages: int, replica: str = "") -> list[Case]:
    """Return the cases of a checkpoint with ``stages`` block stages, in the folder ``replica`` (``replica-1/``)."""
    files = [f"{replica}stage-{stage:04d}.safetensors" for stage in range(stages + 1)]
    return [*_raw(files), *_tensors(files[1]), *_tensors(files[0]), *_headers(files[2]), *_places(files), *_manifests()]


def seal(folder: Path, **changes: Any) -> None:
    """Write a manifest whose digests match the changed files, as an attacker would."""
    path = folder / "manifest.json"
    tree = json.loads(path.read_text())
    tree.pop("sha256")
    tree["digests"] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).is_file() else known
        for name, known in tree["digests"].items()
    } | changes.pop("digests", {})
    tree |= changes
    path.write_text(json.dumps(tree | {"sha256": documents.digest(tree)}))


def _raw(files: list[str]) -> Iterator[Case]:
    """Changed bytes, with and without a manifest that is sealed again."""
    for kind, change in KINDS.items():
        for file in ["manifest.json", *files]:
            # Zeros may damage only a generator's state, which another cut does not read.
            for forged in (False, True) if file in files and kind not in ("gone", "a page of zeros") else (False,):

                def damage(
                    folder: Path, draw: random.Random, file: str = file, change: Any = change, forged: bool = forged
                ) -> None:
                    path = folder / file
                    before = after = path.read_bytes()
                    while after == before:  # a page of zeros may have been one
                        after = change(before, draw)
                    path.unlink() if after is None else path.write_bytes(after)
                    if forged:
                        seal(folder)

                yield Case(f"{file}: {kind}{', sealed' * forged}", file, damage)


def _tensors(file: str) -> Iterator[Case]:
    """Other tensors, with digests as they should be."""
    norm = "norm.weight" if "0000" in file else "layers.0.input_layernorm.weight"
    weight, first, second = (f"{kind}.{norm}" for kind in ("weights", "exp_avg", "exp_avg_sq"))
    expected = norm.removeprefix("layers.0.")

    def changed(name: str, change: Callable[[dict[str, Tensor]], object], expected: str = expected) -> Case:
        def damage(folder: Path, draw: random.Random) -> None:
            rewrite(folder / file, change)
            seal(folder)

        return Case(f"{file}: {name}", file, damage, expected)

    for kind in ("bfloat16", "float16", "float64", "int32"):
        yield changed(f"weight as {kind}", lambda t, k=kind: t.update({weight: t[weight].to(getattr(torch, k))}))
        yield changed(f"moment as {kind}", lambda t, k=kind: t.update({second: t[second].to(getattr(torch, k))}))
    yield changed("wider", lambda t: t.update({weight: torch.ones(99)}))
    yield changed("a row of it", lambda t: t.update({weight: t[weight][None]}))
    yield changed("without a moment", lambda t: t.pop(first))
    yield changed("without both moments", lambda t: (t.pop(first), t.pop(second)), "clock")
    yield changed("without the weight", lambda t: t.pop(weight))
    yield changed("without the atom", lambda t: (t.pop(weight), t.pop(first), t.pop(second)), "")
    yield changed("without clocks", lambda t: t.pop("clocks"), "clock")
    yield changed("clocks as floats", lambda t: t.update(clocks=t["clocks"].double()), "clock")
    yield changed("a clock below zero", lambda t: t.update(clocks=-t["clocks"]), "clock")
    yield changed("a clock less", lambda t: t.update(clocks=t["clocks"][1:]), "clock")
    yield changed("without numbers", lambda t: t.pop("numbers"), "three numbers")
    yield changed("a scale that is none", lambda t: t.update(numbers=t["numbers"] * torch.inf), "scale")
    yield changed("one tensor more", lambda t: t.update({"weights.layers.0.bias": torch.ones(8)}), "bias")
    for name in ("weights.../../../etc/passwd", "weights./etc/passwd", "weights.layers.../0.x", "weights.."):
        yield changed(f"named {name}", lambda t, n=name: t.update({n: torch.ones(8)}), name.partition(".")[2])
    if "replica" in file:
        yield changed("named outer.../x", lambda t: t.update({"outer.../x": torch.ones(8)}), "an outer .. belongs to")
    yield changed("a digest less", lambda t: t.update(sha256=torch.zeros(1, 32, dtype=torch.uint8)), "digest")


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """A stage's file with other tensors and digests of them."""
    tensors = load_file(path)
    label = json.loads(_header(path.read_bytes())[0])["__metadata__"]
    del tensors["sha256"]
    change(tensors)
    rows = b"".join(digest(key, tensors[key].contiguous()) for key in sorted(tensors))
    tensors.setdefault("sha256", torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, 32))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, label)


def _header(content: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack_from("<Q", content)
    return content[8 : 8 + length], content[8 + length :]


def _headers(file: str) -> Iterator[Case]:
    """Headers that announce missing or oversized data."""

    def announced(length: int) -> Damage:
        return lambda folder, draw: _put(folder, file, struct.pack("<Q", length) + (folder / file).read_bytes()[8:])

    for length in (0, 1, 1 << 20, 100_000_001, 1 << 40, 1 << 63, (1 << 64) - 1):
        yield Case(f"header of {length} bytes", file, announced(length))

    def header_case(name: str, change: Callable[[dict[str, Any]], object]) -> Case:
        def damage(folder: Path, draw: random.Random) -> None:
            head, body = _header((folder / file).read_bytes())
            tree = json.loads(head)
            change(tree)
            text = json.dumps(tree).encode()
            _put(folder, file, struct.pack("<Q", len(text)) + text + body)

        return Case(f"header: {name}", file, damage)

    key = "weights.layers.0.mlp.up_proj.weight"
    for name, entry in {
        "a tensor of 2^60 bytes": {"shape": [1 << 58], "data_offsets": [0, 1 << 60]},
        "sides whose product overflows": {"shape": [1 << 33, 1 << 33], "data_offsets": [0, 4]},
        "a side below zero": {"shape": [-4, 4]},
        "a million sides": {"shape": [1] * 1_000_000},
        "reversed": {"data_offsets": [64, 0]},
        "below zero": {"data_offsets": [-64, 0]},
        "beyond the end": {"data_offsets": [1 << 30, (1 << 30) + 64]},
        "over another": {"data_offsets": [0, 64]},
        "of a type that is none": {"dtype": "F7"},
        "a pickled object": {"dtype": "O"},
    }.items():
        yield header_case(name, lambda tree, e=entry: tree[key].update(e))
    yield header_case(
        "nested", lambda tree: tree.update({key: {"dtype": "F32", "shape": json.loads("[" * 900 + "]" * 900)}})
    )
    yield header_case("100,000 tensors", lambda tree: tree.update({f"weights.{n}": tree[key] for n in range(100_000)}))
    yield header_case("no label", lambda tree: tree.pop("__metadata__"))
    yield header_case("a label of 10 MB", lambda tree: tree["__metadata__"].update(planaria="9" * 10_000_000))
    for field, value in {"version": 3, "stage": 1 << 70, "step": -1, "more": 1, "updates": 4}.items():
        label = {"version": 2, "stage": 2, "step": 2, field: value}
        yield header_case(
            f"label with {field} = {value}", lambda tree, m=label: tree["__metadata__"].update(planaria=json.dumps(m))
        )


def _put(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    seal(folder)


def _places(files: list[str]) -> Iterator[Case]:
    """Something else where a file should be."""

    def instead(name: str, put: Callable[[Path], object], forged: bool = True) -> Case:
        def damage(folder: Path, draw: random.Random) -> None:
            path = folder / files[1]
            shutil.copy(path, folder.parent.parent / "elsewhere")
            path.unlink()
            put(path)
            if forged and path.is_file() and path.resolve() != Path("/dev/zero"):
                seal(folder)

        return Case(f"{files[1]}: {name}", files[1], damage)

    def link(to: str) -> Callable[[Path], object]:
        return lambda path: path.symlink_to(to)

    yield instead(
        "a link to its own content",
        lambda path: path.symlink_to(path.parents[len(Path(files[1]).parts) + 1] / "elsewhere"),
    )
    yield instead("a link to another stage", link(Path(files[2]).name))
    for target in ("/dev/zero", "/etc/passwd", "nowhere", "..", Path(files[1]).name):
        yield instead(f"a link to {target}", link(target))
    yield instead("a folder", Path.mkdir)
    yield instead("a pipe", os.mkfifo)
    mark = Path("executed")
    yield instead("a pickle", lambda path: path.write_bytes(pickle.dumps(Harm(path.parent / mark))))
    yield instead("what torch saves", lambda path: torch.save({"weights": Harm(path.parent / mark)}, path))
    yield instead(
        "what torch saved once",
        lambda path: torch.save(Harm(path.parent / mark), path, _use_new_zipfile_serialization=False),
    )
    yield instead("safetensors of nothing", lambda path: path.write_bytes(save({})))
    yield instead("another's safetensors", lambda path: path.write_bytes(save({"weight": torch.ones(2)})))
    yield instead(
        "of another checkpoint", lambda path: shutil.copy(Path(str(path).replace("step-00000002", OTHER)), path)
    )
    yield instead(
        "of another checkpoint, not sealed",
        lambda path: shutil.copy(Path(str(path).replace("step-00000002", OTHER)), path),
        False,
    )
    yield instead("of another stage", lambda path: shutil.copy(path.with_name(Path(files[2]).name), path))

    def exchanged(folder: Path, draw: random.Random) -> None:
        """Exchange two files with their labels, so that only the manifest's digests differ."""
        one, other = (load_file(folder / file) for file in files[1:3])
        for file, tensors in ((files[1], other), (files[2], one)):
            label = json.loads(_header((folder / file).read_bytes())[0])["__metadata__"]
            save_file(tensors, folder / file, label)

    yield Case("two stages exchanged", files[1], exchanged)


def _manifests() -> Iterator[Case]:
    """Manifests with invalid values and a valid seal."""

    def manifest_case(name: str, expected: str = "", **changes: Any) -> Case:
        return Case(f"manifest: {name}", "manifest.json", lambda folder, draw: seal(folder, **changes), expected)

    for field, values in {
        "format": (0, 2, "one"),
        "step": (-1, 3, 1 << 70, "two"),
        "stages": ([], [0, 0, 1, 2], [-1, 0, 1, 2], [0, 1, 2, 99], [2, 1, 0, 1], "all"),
        "pipeline_stages": (0, -1, 3, 7, 1 << 40),
        "replicas": (0, -1, 7, 1 << 40),
        "samples": (-1, "many"),
        "blocks_ahead": ([-1], "none"),
        "first_block": (-4,),
        "model": ({}, {"layers": 1 << 40}, {"family": "no such"}, {"family": "os:system"}),
        "exchange": ({"kind": "os:system", "replicas": 2},),
        "digests": ({"../stage-0001.safetensors": "0" * 64}, {"/etc/passwd": "0" * 64}, {"stage-0001.safetensors": 5}),
        "more": (1,),
    }.items():
        for value in values:
            yield manifest_case(f"{field} = {str(value)[:40]}", **{field: value})
