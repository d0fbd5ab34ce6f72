"""``fused.json``: a model that is several in one, and how they were put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from planaria import documents
from planaria.documents import Record
from planaria.errors import UserError
from planaria.experts.manifest import MOST_BYTES
from planaria.model import fusing
from planaria.model.fusing import Named

FILE = "fused.json"
How = Literal["sum", "ties", "dare"]
SCALES: dict[How, float] = {"sum": 0.3, "ties": 0.4, "dare": 0.3}
"""λ unless given. Source: arXiv 2405.09055, what was used there with each"""


class Part(Record):
    """A model that went in."""

    name: str
    domain: str = ""
    place: str
    sha256: str
    """of its weights, as :func:`planaria.model.fusing.digest` takes it"""


class Fused(Record):
    """How a model was put together."""

    format: Literal[1] = 1
    by: How
    scale: float
    """λ"""
    seed: int = 0
    """dare: of what is dropped"""
    parent: Part
    parts: list[Part]


def contributions(fused: Fused, parent: Named, models: Sequence[Named]) -> list[dict[str, Tensor]]:
    """What each model adds to the parent."""
    vectors = [fusing.task_vector(model, parent) for model in models]
    if fused.by == "ties":
        return fusing.ties(vectors, fused.scale)
    if fused.by == "dare":
        return fusing.dare(vectors, fused.scale, seed=fused.seed)
    return fusing.summed(vectors, fused.scale)


def read(folder: Path) -> Fused | None:
    """How the model in a folder was put together; None where it was not.

    :raises UserError: when the file is damaged, or a model that it names is gone.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    mend = "bring it back, or remove it to repair the model as one"
    found = documents.model(file, Fused, MOST_BYTES, mend)
    for part in (found.parent, *found.parts):
        if not Path(part.place).is_dir():
            raise UserError(f"{file}: {part.name} is not at {part.place} any more; {mend}")
    return found
