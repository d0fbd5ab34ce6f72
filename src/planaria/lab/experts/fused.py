"""``fused.json``: a model that is several in one, and how they were put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor

from planaria.common import documents
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.lab.experts.manifest import MOST_BYTES
from planaria.models import fusing
from planaria.models.fusing import Named

FILE = "fused.json"
How = Literal["sum", "ties", "dare"]
By = Literal[How, "average", "dume"]
SCALES: dict[How, float] = {"sum": 0.3, "ties": 0.4, "dare": 0.3}
"""λ unless given. Source: arXiv 2405.09055, what was used there with each"""


class Part(Record):
    """A model that went in."""

    name: str
    domain: str = ""
    place: str
    sha256: str
    """of its weights, as :func:`planaria.models.fusing.digest` takes it"""


class Routers(Record):
    """dume: how its routers were made."""

    ridge: float = Field(ge=0, allow_inf_nan=False)
    """λ"""
    temperature: float = Field(gt=0, allow_inf_nan=False)
    top_k: int = Field(ge=0)
    """blocks that a token passes; 0 is all"""
    samples: int = Field(ge=1)
    """of each domain's text, at most"""

    def of(self, experts: int) -> int:
        """Blocks of so many that a token passes."""
        return min(self.top_k or experts, experts)


class Fused(Record):
    """How a model was put together."""

    format: Literal[1] = 1
    by: By
    scale: float = 0.0
    """λ; of dume, none"""
    seed: int = 0
    """dare: of what is dropped"""
    parent: Part
    parts: list[Part]
    run: str = ""
    """folder of the ensemble whose experts these are"""
    routers: Routers | None = None
    """dume"""


def contributions(fused: Fused, parent: Named, models: Sequence[Named]) -> list[dict[str, Tensor]]:
    """What each model adds to the parent; of an average, the scale is 1 / N."""
    vectors = [fusing.task_vector(model, parent) for model in models]
    if fused.by == "ties":
        return fusing.ties(vectors, fused.scale)
    if fused.by == "dare":
        return fusing.dare(vectors, fused.scale, seed=fused.seed)
    return fusing.summed(vectors, fused.scale)


def read(folder: Path, mend: str = "bring it back") -> Fused | None:
    """How the model in a folder was put together; None where it was not.

    :raises UserError: when the file is damaged.
    """
    file = folder / FILE
    return documents.model(file, Fused, MOST_BYTES, mend) if file.is_file() else None


def read_whole(folder: Path) -> Fused | None:
    """The same of a model that is to be repaired.

    :raises UserError: also when a model that it names is gone, or it is no sum of them.
    """
    mend = "bring it back, or remove it to repair the model as one"
    if (found := read(folder, mend)) is None:
        return None
    if found.routers is not None:
        raise UserError(f"{folder}: has several blocks in each layer, which no repair knows; repair its experts first")
    for part in (found.parent, *found.parts):
        if not Path(part.place).is_dir():
            raise UserError(f"{folder / FILE}: {part.name} is not at {part.place} any more; {mend}")
    return found
