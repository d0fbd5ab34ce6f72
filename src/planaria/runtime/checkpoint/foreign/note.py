"""What no other program's folder has a place for, in a file beside it: ``planaria.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field
from torch import Tensor

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.bounds import Natural
from planaria.config.schema import ModelConfig
from planaria.models.packing import digest
from planaria.runtime.checkpoint.cut import CUT
from planaria.runtime.checkpoint.loading import Atom

FILE = "planaria.json"
FREE = ("init_std", *CUT)
"""what a model may say otherwise than the note: no trained number depends on it"""


class Note(documents.Record):
    """Step, data order and learning-rate scales of the run that a folder came out of."""

    version: Literal[1] = 1
    step: Natural
    samples: Natural
    """that trained it"""
    model: ModelConfig
    scales: dict[str, float] = Field(default_factory=dict)
    """of parameters whose learning rate has another scale than 1"""
    sums: dict[str, str] = Field(default_factory=dict)
    """what is known of each tensor: kind and parameter → SHA-256 with the clock"""


@dataclass(frozen=True)
class Summed(Atom):
    """A parameter that notes what is read of it."""

    sums: dict[str, str] = field(default_factory=dict)

    def read(self, kind: str) -> Tensor:
        tensor = super().read(kind)
        self.sums[f"{kind} of {self.name}"] = summed(tensor, kind, self.name, self.clock)
        return tensor


def summed(tensor: Tensor, kind: str, name: str, clock: int | None) -> str:
    """SHA-256 (hex) of a tensor with its name and clock."""
    return digest(f"{kind} of {name} after {clock}", tensor.contiguous()).hex()


def leave(folder: Path, note: Note) -> None:
    """Write the note beside what was written."""
    (folder / FILE).write_text(documents.sealed(note), encoding="utf-8")


def find(folder: Path, model: ModelConfig) -> Note | None:
    """The note in a folder, if planaria wrote it.

    :raises UserError: when it was edited, or is of a model that computes something else than ``model``.
    """
    if not (folder / FILE).exists():
        return None
    mend = "remove it if another program has written the folder since"
    note = documents.unsealed(inside(folder, FILE), Note, mend=mend)
    for name in ModelConfig.model_fields:
        if name not in FREE and getattr(note.model, name) != getattr(model, name):
            raise UserError(
                f"{folder / FILE}: of a model with {name} = {getattr(note.model, name)}, the recipe has "
                f"{getattr(model, name)}; set model.{name} to the same"
            )
    return note


def inside(folder: Path, name: str) -> Path:
    """A plain file of a folder, by a name that a stranger gave it.

    :raises UserError: when the name leads out of the folder, or there is no such file but a link or something else.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise UserError(f"{folder}: names a file {name!r} that does not lie in it; nothing else is read")
    path = folder
    for part in parts:
        path /= part
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link; put what it points to in its place")
    if not path.is_file():
        raise UserError(f"{path}: missing, or not a file; bring it back")
    return path
