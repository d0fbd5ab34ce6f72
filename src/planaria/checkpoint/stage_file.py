"""One stage on disk: a safetensors file whose header carries the few numbers that are not tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from planaria import atomic, digests
from planaria.checkpoint import tensor_file
from planaria.errors import UserError
from planaria.model.state import StageState

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Numbers(BaseModel):
    """What a stage's state holds beside tensors, and what the file is."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    version: Literal[1] = 1
    stage: int
    step: int
    updates: int
    lr_scale: float
    grad_norm: float | None
    clipped_norm: float | None


def stage_file(folder: Path, stage: int, place: int = 0) -> Path:
    """Where a checkpoint folder keeps ``stage``, or the outer state of another of its nodes than the first."""
    return folder / (f"stage-{stage:04d}-at-{place}.safetensors" if place else f"stage-{stage:04d}.safetensors")


class Written(NamedTuple):
    """What lies on disk."""

    bytes: int
    sha256: str


def write_stage(folder: Path, stage: int, step: int, state: StageState, place: int = 0) -> Written:
    """Write a stage durably into ``folder`` (made if need be), or what is beside it at another ``place``.

    :raises OSError: when the disk is full or the folder cannot be written, with all that there is to say of it as its
        text; the file does not appear then.
    """
    tensors = {f"weights.{name}": tensor.cpu() for name, tensor in state.weights.items()}
    for name, pair in state.moments.items():
        tensors |= {f"{kind}.{name}": tensor.cpu() for kind, tensor in zip(_MOMENTS, pair, strict=True)}
    if state.rng is not None:
        tensors["rng"] = state.rng
    tensors |= {f"outer.{name}": tensor.cpu() for name, tensor in state.outer.items()}
    numbers = _Numbers(
        stage=stage,
        step=step,
        updates=state.updates,
        lr_scale=state.lr_scale,
        grad_norm=state.grad_norm,
        clipped_norm=state.clipped_norm,
    )
    path = stage_file(folder, stage, place)
    # A frozen former holder of the stage may wake up in the middle of its own write.
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            sha256 = tensor_file.write(file, tensors, {"planaria": numbers.model_dump_json()})
            file.flush()
            os.fsync(file.fileno())
            written = Written(os.fstat(file.fileno()).st_size, sha256)
        unfinished.replace(path)
        return written
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(atomic.refused(path, error)) from None


def check_stage(folder: Path, stage: int, place: int = 0) -> None:
    """Look at a stage's file without reading its tensors; UserError as in :func:`read_stage`."""
    with _opened(folder, stage, place):
        pass


def require_stage(folder: Path, stage: int, sha256: str, place: int = 0) -> None:
    """UserError when a stage's file is not the one that was written with this digest."""
    path = stage_file(folder, stage, place)
    if not path.is_file():
        raise UserError(f"{path}: missing; choose another checkpoint of this run")
    digests.require_file(path, [sha256], "choose another checkpoint of this run")


def read_stage(folder: Path, stage: int, sha256: str = "", place: int = 0) -> StageState:
    """The stage that :func:`write_stage` wrote, with this digest if one is known.

    :raises UserError: when the file is missing, damaged, changed, of another version or another stage.
    """
    if sha256:
        require_stage(folder, stage, sha256, place)
    with _opened(folder, stage, place) as (file, numbers):
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    weights = {key.removeprefix("weights."): t for key, t in tensors.items() if key.startswith("weights.")}
    moments = {
        name: (tensors[f"exp_avg.{name}"], tensors[f"exp_avg_sq.{name}"])
        for name in weights
        if f"exp_avg.{name}" in tensors and f"exp_avg_sq.{name}" in tensors
    }
    return StageState(
        weights,
        moments,
        numbers.updates,
        numbers.lr_scale,
        numbers.grad_norm,
        numbers.clipped_norm,
        tensors.get("rng"),
        {key.removeprefix("outer."): tensor for key, tensor in tensors.items() if key.startswith("outer.")},
    )


@contextmanager
def _opened(folder: Path, stage: int, place: int) -> Iterator[tuple[Any, _Numbers]]:
    """The open file, and the numbers of its header (whose offsets safetensors holds against the file's length)."""
    path = stage_file(folder, stage, place)
    if not path.is_file():
        raise UserError(f"{path}: missing; choose another checkpoint of this run")
    try:
        with safe_open(path, framework="pt") as file:
            numbers = _Numbers.model_validate_json((file.metadata() or {}).get("planaria", "{}"))
            if numbers.stage != stage:
                raise UserError(f"{path}: holds stage {numbers.stage}, not {stage}; choose another checkpoint")
            yield file, numbers
    except (SafetensorError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: damaged or of another version ({reason}); choose another checkpoint") from None
