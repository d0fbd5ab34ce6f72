"""Folders of ``torch.distributed.checkpoint``: ``model.<name>`` and AdamW's ``optim.state.<name>.<key>``."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.models.optimizers import adamw
from planaria.runtime.checkpoint.foreign import unpickling
from planaria.runtime.checkpoint.foreign.folder import (
    DEFAULT_METADATA,
    KINDS,
    WEIGHTS,
    Check,
    clocks_by_group,
    file_inside,
    step_tensor,
    underlying_error,
    update_count,
)
from planaria.runtime.checkpoint.foreign.unpickling import FIX, Kept
from planaria.runtime.checkpoint.loading import ParameterState

METADATA = ".metadata"
STATE = re.compile(r"(optim|optimizer)\.state\.(?P<name>.+)\.(?P<kind>[^.]+)")
GROUP = re.compile(r"(optim|optimizer)\.param_groups\.(?P<group>.+)\.(?P<field>step|params)")
_MAX_SIDES = 16


def write(atoms: Iterable[ParameterState], folder: Path) -> None:
    """Write a model and its optimizer's state into ``folder`` with torch's writer, one tensor at a time.

    Torch gets the shapes, and requests each tensor when it writes it.
    :raises OSError: if the disk is full.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
    from torch.distributed.checkpoint.state_dict_saver import save

    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    reads: dict[str, Callable[[], Tensor]] = {}
    for atom in atoms:
        model[atom.name] = torch.empty(atom.shape, device="meta")
        reads[f"model.{atom.name}"] = partial(atom.read, WEIGHTS)
        if atom.clock is not None:
            step = step_tensor(atom.clock)
            state[atom.name] = {kind: torch.empty(atom.shape, device="meta") for kind in adamw.KEYS} | {"step": step}
            reads |= {f"optim.state.{atom.name}.{kind}": partial(atom.read, kind) for kind in adamw.KEYS}

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return reads[index.fqn]() if index.fqn in reads else super().lookup_object(index)

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta | None:
            return StorageMeta()  # the folder is moved after it was written

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing process group
        whole = {"model": model, "optim": {"state": state}} if state else {"model": model}
        try:
            save(whole, storage_writer=Writer(folder), planner=Planner(), no_dist=True)
        except CheckpointException as error:  # torch's wrapper of the error
            raise underlying_error(error.failures[0][0]) from None


class TensorPart(NamedTuple):
    """A part of a tensor, and the location of its numbers."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class FolderTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[TensorPart, ...]


class Dcp:
    """A folder written by torch, on any number of ranks; implements ``folder.ForeignFolder``."""

    step: int | None = None
    samples: int | None = None

    def __init__(self, folder: Path) -> None:
        """Read the metadata; UserError if it is missing, damaged, or has a foreign class."""
        self._folder, self._place = folder, file_inside(folder, METADATA)
        self._tensors, self._bytes = entries(unpickling.read_metadata(self._place), self._place)
        head = _common_head([*self._tensors, *self._bytes])
        self._keys: dict[tuple[str, str], str] = {}
        groups: dict[str, dict[str, Any]] = {}
        unused: list[str] = []
        for full in (*self._tensors, *self._bytes):
            key = full.removeprefix(head)
            if match := STATE.fullmatch(key):
                self._take(match["name"], match["kind"], full)
            elif key.startswith("model."):
                self._take(key.removeprefix("model."), WEIGHTS, full)
            elif match := GROUP.fullmatch(key):
                groups.setdefault(match["group"], {})[match["field"]] = self._value(full)
            else:
                unused.append(full)
        self.left = tuple(unused)
        names = {name for name, _ in self._keys}
        self.kinds: Mapping[str, frozenset[str]] = {
            name: frozenset(kind for kind in KINDS if (name, kind) in self._keys) for name in names
        }
        self.clocks: Mapping[str, int] = self._clocks(groups, names)

    def read(self, name: str, kind: str, check: Check) -> Tensor:
        stored, location = self._tensors[self._keys[name, kind]], f"{self._folder}: {self._keys[name, kind]}"
        check(stored.shape, DEFAULT_METADATA, str(self._folder / stored.boxes[0].file) if stored.boxes else location)
        if len(stored.boxes) == 1 and stored.boxes[0].sizes == stored.shape:
            return self._box(stored, stored.boxes[0], location)
        if sum(math.prod(box.sizes) for box in stored.boxes) != math.prod(stored.shape):
            raise UserError(f"{location}: its chunks do not cover {list(stored.shape)}; some are missing or repeated")
        whole, taken = torch.empty(stored.shape, dtype=stored.dtype), torch.zeros(stored.shape, dtype=torch.bool)
        for box in stored.boxes:
            area = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            if taken[area].shape != box.sizes or bool(taken[area].any()):
                raise UserError(f"{location}: a chunk is out of bounds, or overlaps another; {FIX}")
            whole[area], taken[area] = self._box(stored, box, location), True
        return whole

    def _take(self, name: str, kind: str, key: str) -> None:
        if kind not in (*KINDS, "step"):
            raise UserError(f"{self._folder}: {key}: AdamW has no {kind!r}; use a folder that AdamW trained")
        if (name, kind) in self._keys:
            raise UserError(f"{self._folder}: {kind} of {name} is duplicated; remove one")
        if kind != "step" and key not in self._tensors:
            raise UserError(f"{self._folder}: {key} is not a tensor; {FIX}")
        self._keys[name, kind] = key

    def _clocks(self, groups: Mapping[str, dict[str, Any]], names: set[str]) -> dict[str, int]:
        """Return clocks from each parameter's state; else from its group, which is named after it or lists it."""
        step_keys = {name: key for (name, kind), key in self._keys.items() if kind == "step"}
        if step_keys:
            return {name: update_count(self._value(key), f"{self._folder}: {key}") for name, key in step_keys.items()}
        steps = [
            (
                [group] if group in names else fields.get("params"),
                update_count(fields["step"], f"{self._folder}: {group}"),
            )
            for group, fields in groups.items()
            if "step" in fields
        ]
        return clocks_by_group(steps, names, str(self._folder)) if steps else {}

    def _value(self, key: str) -> Any:
        """Return a single number as a tensor, or an object that is not a tensor."""
        location = f"{self._folder}: {key}"
        if key in self._bytes:
            return unpickling.read_torch_file(self._blob(self._bytes[key], location), location)
        stored = self._tensors[key]
        if math.prod(stored.shape) != 1 or len(stored.boxes) != 1:
            raise UserError(f"{location} has shape {list(stored.shape)}, not one number; {FIX}")
        return self._box(stored, stored.boxes[0], location)

    def _box(self, stored: FolderTensor, box: TensorPart, location: str) -> Tensor:
        if math.prod(box.sizes) * stored.dtype.itemsize > box.length:
            raise UserError(f"{location}: {box.length} bytes of {box.file} cannot be {list(box.sizes)}; {FIX}")
        tensor = unpickling.read_torch_file(self._blob(box, location), location)
        if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != (stored.dtype, box.sizes):
            raise UserError(f"{location}: {box.file} does not match {METADATA}; {FIX}")
        return tensor

    def _blob(self, box: TensorPart, location: str) -> io.BytesIO:
        path = file_inside(self._folder, box.file)
        if box.begin < 0 or box.length < 0 or box.begin + box.length > path.stat().st_size:
            raise UserError(f"{location}: reaches beyond the end of {path}; {FIX}")
        with path.open("rb") as file:
            file.seek(box.begin)
            return io.BytesIO(file.read(box.length))


def entries(kept: Kept, path: Path) -> tuple[dict[str, FolderTensor], dict[str, TensorPart]]:
    """Return the tensors of a folder's metadata, and the location of other objects, by key."""
    tensors: dict[str, FolderTensor] = {}
    objects: dict[str, TensorPart] = {}
    try:
        where: dict[tuple[str, tuple[int, ...] | None], Kept] = {}
        for index, stored in dict(kept.get("storage_data")).items():
            offset = index.get("offset")
            where[str(index.get("fqn")), None if offset is None else _sides(offset)] = stored
        for key, entry in dict(kept.get("state_dict_metadata")).items():
            if not isinstance(entry, unpickling.TensorEntry):
                objects[str(key)] = _box((), (), where[key, None])
                continue
            chunks = [(_sides(c.get("offsets")), _sides(c.get("sizes"))) for c in entry.get("chunks")]
            boxes = tuple(_box(offsets, sizes, where[key, offsets]) for offsets, sizes in chunks)
            dtype = entry.get("properties").state[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{key} has no type")
            tensors[str(key)] = FolderTensor(dtype, _sides(entry.get("size")), boxes)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {str(error)[:160]}); {FIX}") from None
    return tensors, objects


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...], stored: Kept) -> TensorPart:
    file, begin, length = (stored.get(name) for name in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(begin) is not int or type(length) is not int:
        raise TypeError("a chunk without file, offset and length")
    if stored.get("transform_descriptors"):
        raise ValueError(f"{file} is written with {stored.get('transform_descriptors')}, which is not read")
    return TensorPart(offsets, sizes, file, begin, length)


def _sides(dimensions: Any) -> tuple[int, ...]:
    sides = tuple(dimensions)
    if len(sides) > _MAX_SIDES or any(type(side) is not int or side < 0 for side in sides):
        raise ValueError("invalid dimensions")
    return sides


def _common_head(keys: list[str]) -> str:
    """Return the common prefix of all keys before ``model.`` or ``optim.``, such as ``app.``"""
    firsts = {key.partition(".")[0] for key in keys}
    return "" if len(firsts) != 1 or firsts & {"model", "optim", "optimizer"} else f"{firsts.pop()}."
