"""``fused.json``: record of a model merged from several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor

from planaria.common import documents
from planaria.common.documents import Record, former_names
from planaria.common.errors import UserError
from planaria.models import task_vectors
from planaria.models.task_vectors import Named

FILE = "fused.json"
MAX_BYTES = 1 << 22
"""largest size of a record"""
How = Literal["sum", "ties", "dare"]
By = Literal[How, "average", "dume"]
SCALES: dict[How, float] = {"sum": 0.3, "ties": 0.4, "dare": 0.3}
"""default λ; source: arXiv 2405.09055"""


class SourceModel(Record):
    """A source model."""

    _former = former_names(path="place")
    name: str
    domain: str = ""
    path: str
    sha256: str
    """SHA-256 of the expert's weights, by :func:`planaria.models.task_vectors.digest`"""


class Routers(Record):
    """Parameters of dume's routers."""

    ridge: float = Field(ge=0, allow_inf_nan=False)
    """λ"""
    temperature: float = Field(gt=0, allow_inf_nan=False)
    top_k: int = Field(ge=0)
    """blocks that a token passes; 0 is all"""
    samples: int = Field(ge=1)
    """maximum number of samples of each domain's text"""

    def of(self, experts: int) -> int:
        """Return how many of ``experts`` blocks a token passes."""
        return min(self.top_k or experts, experts)


class Fused(Record):
    """Record of a merge."""

    format: Literal[1] = 1
    by: By
    scale: float = 0.0
    """λ; unused by dume"""
    seed: int = 0
    """seed of dare's dropping"""
    parent: SourceModel
    parts: list[SourceModel]
    run: str = ""
    """folder of the experts' ensemble"""
    routers: Routers | None = None
    """set for dume"""


def contributions(fused: Fused, parent: Named, models: Sequence[Named]) -> list[dict[str, Tensor]]:
    """Return each model's contribution to the parent; for an average, the scale is 1 / N."""
    vectors = [task_vectors.task_vector(model, parent) for model in models]
    if fused.by == "ties":
        return task_vectors.ties(vectors, fused.scale)
    if fused.by == "dare":
        return task_vectors.dare(vectors, fused.scale, seed=fused.seed)
    return task_vectors.task_arithmetic(vectors, fused.scale)


def read(folder: Path, fix: str = "restore it") -> Fused | None:
    """Return the merge record of the model in a folder, or None if it was not merged.

    :raises UserError: when the file is damaged.
    """
    file = folder / FILE
    return documents.read_model(file, Fused, MAX_BYTES, fix) if file.is_file() else None


def read_whole(folder: Path) -> Fused | None:
    """Return the merge record of a model to be repaired, or None if it was not merged.

    :raises UserError: also when a source model is missing, or the model is not a sum of them.
    """
    fix = "restore it, or remove it to repair the model as one"
    if (fused := read(folder, fix)) is None:
        return None
    if fused.routers is not None:
        raise UserError(f"{folder} has several blocks per layer, which repair does not support; repair its experts")
    for model in (fused.parent, *fused.parts):
        if not Path(model.path).is_dir():
            raise UserError(f"{folder / FILE}: {model.name} is missing at {model.path}; {fix}")
    return fused
