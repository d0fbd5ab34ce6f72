"""DeepSpeed's universal folders: ``zero/<name>/fp32.pt`` and AdamW's ``<key>.pt``, in the folder named by
``latest_universal``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.schema import OptimConfig
from planaria.models.optimizers import adamw
from planaria.runtime.checkpoint.foreign import unpickling
from planaria.runtime.checkpoint.foreign.folder import (
    KINDS,
    WEIGHTS,
    Check,
    TensorMetadata,
    clocks_by_group,
    file_inside,
    step_tensor,
    underlying_error,
    update_count,
)
from planaria.runtime.checkpoint.foreign.unpickling import FIX, SubparamShape
from planaria.runtime.checkpoint.loading import ParameterState
from planaria.runtime.checkpoint.stage_file import refuse_link

LATEST, OPTIMIZER, STATES = "latest_universal", "optimizer_state.pt", "mp_rank_00_model_states.pt"
FILES = {WEIGHTS: "fp32.pt"} | {kind: f"{kind}.pt" for kind in adamw.KEYS}
VERSION, OLDEST = 0.4, 0.2
INFO = "universal_checkpoint_info"
PIECES = ("cat_dim", "param_n_sub_params", "sub_param_shape")
KNOWN = {"param", *PIECES, "vocab_tensor", "vocab_divisibility_padding_tensor"}
_SMALL = 64 << 20
SPLIT_BY_ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"}
SPLIT_BY_COLUMNS = {"o_proj", "down_proj", "w2"}
"""modules whose weights are cut along dimension 0 and 1 by tensor-parallel ranks; other weights are replicated"""


def write(
    atoms: Sequence[ParameterState], folder: Path, step: int, samples: int, vocab: int, optim: OptimConfig
) -> None:
    """Write a model and its optimizer's state into ``folder``, one tensor at a time.

    :raises UserError: if parameters have different numbers of updates, which this format does not support.
    :raises OSError: if the disk is full.
    """
    clocks = {atom.clock for atom in atoms}
    if len(clocks) > 1:
        differing = next(atom for atom in atoms if atom.clock != atoms[0].clock)
        raise UserError(
            f"--format universal stores a single step, but {atoms[0].name} has {atoms[0].clock} updates and "
            f"{differing.name} {differing.clock}; use --format dcp"
        )
    tag = folder / f"global_step{step}_universal"
    for atom in atoms:
        path = tag / "zero" / atom.name
        path.mkdir(parents=True)
        for kind in KINDS if atom.clock is not None else KINDS[:1]:
            content: dict[str, Any] = {"param": atom.read(kind).clone()}  # a view would be saved with its whole storage
            if atom.shape[0] == vocab and "layers." not in atom.name and len(atom.shape) == 2:
                content["vocab_tensor"] = True
            if (dimension := _cat_dim(atom.name)) is not None:
                content["cat_dim"] = dimension
            _save(content, path / FILES[kind])
        if atom.clock is not None:
            _save(step_tensor(atom.clock), path / "step.pt")
    group = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps, "weight_decay": optim.weight_decay}
    names = [atom.name for atom in atoms]
    _save({"param_groups": [group | {"step": atoms[0].clock or 0, "params": names}]}, tag / "zero" / OPTIMIZER)
    info = {"universal_checkpoint_version": VERSION, "original_vocab_size": vocab}
    shapes = {atom.name: torch.Size(atom.shape) for atom in atoms}
    counted = {"global_steps": step, "global_samples": samples, "dp_world_size": 1, "mp_world_size": 1}
    _save({"module": {}, "param_shapes": [shapes], INFO: info, **counted}, tag / STATES)
    (folder / LATEST).write_text(tag.name, encoding="utf-8")


def _cat_dim(name: str) -> int | None:
    """Return the dimension along which tensor-parallel ranks cut a parameter, or None if they do not."""
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if kind != "weight" or module not in SPLIT_BY_ROWS | SPLIT_BY_COLUMNS:
        return None
    return int(module in SPLIT_BY_COLUMNS)


def _save(content: object, path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        raise underlying_error(error) from None


class Universal:
    """A folder from DeepSpeed's conversion; implements ``folder.ForeignFolder``."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's metadata; UserError if it is missing or damaged."""
        self._folder = _step_folder(folder)
        zero = self._folder / "zero"
        if zero.is_symlink() or not zero.is_dir():
            raise UserError(f"{zero} is missing, or not a folder; use a folder of the universal layout")
        self._zero = zero
        files_of: dict[str, set[str]] = {}
        unused: list[str] = []
        for entry in sorted(zero.iterdir()):
            refuse_link(entry)
            if entry.is_dir():
                files_of[entry.name] = _files_of(entry)
            elif entry.name != OPTIMIZER:
                unused.append(f"zero/{entry.name}")
        self.kinds: Mapping[str, frozenset[str]] = {
            name: frozenset(kind for kind in KINDS if FILES[kind] in files) for name, files in files_of.items()
        }
        states = self._states()
        self.left = tuple(unused)
        self._rows = _whole_number(states.get(INFO), "original_vocab_size")
        self.step, self.samples = (_whole_number(states, name) for name in ("global_steps", "global_samples"))
        self.clocks: Mapping[str, int] = self._clocks({name for name, files in files_of.items() if "step.pt" in files})

    def read(self, name: str, kind: str, check: Check) -> Tensor:
        path = file_inside(self._zero, f"{name}/{FILES[kind]}")
        with path.open("rb") as file:
            content = unpickling.read_torch_file(file, str(path), shapes_only=True)
            check(_require_parameter(content, path).shape, self._read_marks(content, path), str(path))
            return _require_parameter(unpickling.read_torch_file(file, str(path)), path)

    def _states(self) -> dict[Any, Any]:
        """Return the run's counters if their file exists, without reading tensors."""
        if not (self._folder / STATES).exists():
            return {}
        path = file_inside(self._folder, STATES)
        with path.open("rb") as file:
            states = unpickling.read_torch_file(file, str(path), shapes_only=True)
        info = states.get(INFO, {}) if isinstance(states, dict) else None
        if not isinstance(info, dict):
            raise UserError(f"{path}: damaged (no {INFO}); {FIX}, or one without this file")
        version = info.get("universal_checkpoint_version", VERSION)
        if type(version) not in (int, float) or not OLDEST <= version <= VERSION:
            raise UserError(f"{path}: version {documents.quote(version)}; versions {OLDEST} to {VERSION} are read")
        return dict(states)

    def _clocks(self, named: set[str]) -> dict[str, int]:
        """Return the single step for all parameters, from their state or their group."""
        clocks: dict[str, int] = {}
        for name in sorted(named):
            clocks[name] = update_count(self._small(f"{name}/step.pt"), str(self._zero / name / "step.pt"))
        if not clocks and (self._zero / OPTIMIZER).exists():
            groups, location = self._small(OPTIMIZER), str(self._zero / OPTIMIZER)
            listed = groups.get("param_groups") if isinstance(groups, dict) else None
            dicts = [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
            steps = [(group.get("params"), update_count(group["step"], location)) for group in dicts if "step" in group]
            clocks = clocks_by_group(steps, self.kinds, location) if steps else {}
        first = next(iter(clocks), None)
        for name, step in clocks.items():
            if first is not None and step != clocks[first]:
                raise UserError(
                    f"{self._zero}: steps differ, {clocks[first]} of {first} and {step} of {name}; this format has "
                    "a single step: restore the original files"
                )
        return clocks

    def _small(self, name: str) -> Any:
        path = file_inside(self._zero, name)
        if path.stat().st_size > _SMALL:
            raise UserError(f"{path} has {path.stat().st_size} bytes, too many for this file; {FIX}")
        with path.open("rb") as file:
            return unpickling.read_torch_file(file, str(path))

    def _read_marks(self, content: dict[str, Any], path: Path) -> TensorMetadata:
        """Return a tensor's marks; UserError if one is unknown, or impossible for a whole tensor of this model."""
        if unknown := sorted(str(key) for key in content.keys() - KNOWN):
            raise UserError(f"{path} is marked {unknown[0]!r}, which is not known; {FIX}")
        dimension, count, shape = (content.get(key) for key in PIECES)
        if dimension not in (None, 0, 1):
            raise UserError(f"{path}: cat_dim = {documents.quote(dimension)}; a matrix has dimensions 0 and 1")
        pieces: int | tuple[int, ...] | None = None
        if isinstance(shape, SubparamShape):
            sides, along = shape.get("shape"), shape.get("partition_dim")
            rows = sides[0] if isinstance(sides, list | tuple) and sides and along == 0 else None
            pieces = tuple(rows) if isinstance(rows, list | tuple) else None
        elif shape is None and count not in (None, 1):
            pieces = count if type(count) is int and count > 1 and dimension in (None, 0) else None
        if (shape is not None or count not in (None, 1)) and not _are_sizes(pieces):
            raise UserError(f"{path} has sub-parameters that are not pieces along dimension 0, which is not supported")
        return TensorMetadata(pieces, content.get("vocab_tensor", False) is True, self._rows)


def _are_sizes(pieces: int | tuple[int, ...] | None) -> bool:
    return pieces is not None and (isinstance(pieces, int) or all(type(size) is int and size > 0 for size in pieces))


def _step_folder(folder: Path) -> Path:
    """Return the folder of a step: ``folder``, or the one named by its ``latest_universal``."""
    if not (folder / LATEST).exists():
        if not (folder / "zero").is_dir():
            raise UserError(f"{folder} has neither {LATEST} nor zero; use a folder of the universal layout")
        return folder
    name = documents.read_text(file_inside(folder, LATEST), 4096, FIX).strip()
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UserError(f"{folder / LATEST}: names {name!r}, which is not a folder next to it")
    if (folder / name).is_symlink() or not (folder / name).is_dir():
        raise UserError(f"{folder / name} is missing, or not a folder, though {LATEST} names it; restore it")
    return folder / name


def _files_of(path: Path) -> set[str]:
    """Return the files of a parameter; UserError if it has a state that AdamW lacks."""
    names = {entry.name for entry in path.iterdir()}
    if unknown := sorted(names - {*FILES.values(), "step.pt"}):
        raise UserError(f"{path / unknown[0]}: AdamW has no such state; use a folder that AdamW trained")
    return names


def _require_parameter(content: Any, path: Path) -> Tensor:
    tensor = content.get("param") if isinstance(content, dict) else None
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise UserError(f"{path} has no complete tensor 'param'; {FIX}")
    return tensor.detach()


def _whole_number(of: Any, name: str) -> int | None:
    number = of.get(name) if isinstance(of, dict) else None
    return number if type(number) is int and 0 <= number < 2**53 else None
