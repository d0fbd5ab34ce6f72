"""One stage on disk: a safetensors file whose header carries the few numbers that are not tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from planaria.errors import UserError
from planaria.model.state import StageState

VERSION = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


def stage_file(folder: Path, stage: int) -> Path:
    """Where a checkpoint folder keeps ``stage``."""
    return folder / f"stage-{stage:04d}.safetensors"


def write_stage(folder: Path, stage: int, step: int, state: StageState) -> int:
    """Write a stage durably into ``folder`` (made if need be); bytes written.

    :raises OSError: when the disk is full or the folder cannot be written; the file does not appear then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"weights.{name}": tensor.cpu() for name, tensor in state.weights.items()}
    for name, pair in state.moments.items():
        tensors |= {f"{kind}.{name}": tensor.cpu() for kind, tensor in zip(_MOMENTS, pair, strict=True)}
    if state.rng is not None:
        tensors["rng"] = state.rng
    numbers = {
        "version": VERSION,
        "stage": stage,
        "step": step,
        "updates": state.updates,
        "lr_scale": state.lr_scale,
        "grad_norm": state.grad_norm,
        "clipped_norm": state.clipped_norm,
    }
    path = stage_file(folder, stage)
    unfinished = path.with_suffix(".unfinished")
    try:
        save_file({k: t.contiguous() for k, t in tensors.items()}, unfinished, {"planaria": json.dumps(numbers)})
    except SafetensorError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}") from None
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)
    return path.stat().st_size


def read_stage(folder: Path, stage: int) -> StageState:
    """The stage that :func:`write_stage` wrote.

    :raises UserError: when the file is missing, damaged, of another version or another stage.
    """
    path = stage_file(folder, stage)
    if not path.is_file():
        raise UserError(f"{path}: missing; choose another checkpoint of this run")
    try:
        with safe_open(path, framework="pt") as file:
            numbers = json.loads((file.metadata() or {}).get("planaria", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error}); choose another checkpoint of this run") from None
    if numbers.get("version") != VERSION or numbers.get("stage") != stage:
        raise UserError(
            f"{path}: holds stage {numbers.get('stage')} in format {numbers.get('version')}, "
            f"not stage {stage} in format {VERSION}; choose another checkpoint"
        )
    weights = {key.removeprefix("weights."): t for key, t in tensors.items() if key.startswith("weights.")}
    moments = {
        name: (tensors[f"exp_avg.{name}"], tensors[f"exp_avg_sq.{name}"])
        for name in weights
        if f"exp_avg.{name}" in tensors and f"exp_avg_sq.{name}" in tensors
    }
    return StageState(
        weights,
        moments,
        numbers["updates"],
        numbers["lr_scale"],
        numbers["grad_norm"],
        numbers["clipped_norm"],
        tensors.get("rng"),
    )
