"""The distribution of a run over stages and replicas, and names of parameters that do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, ModelConfig
from planaria.exchange.registry import make_exchange
from planaria.models.families import build_stage, make_family
from planaria.models.llama_stages import stage_layers
from planaria.models.packing import TYPES, PackedTensor

CUT = frozenset({"ends_layers", "block_layers"})
"""settings of a model that describe its cut"""


@dataclass(frozen=True)
class RunCut:
    """The distribution of a run over ``stages`` block stages, and replicas with an ``exchange``."""

    model: ModelConfig
    stages: int
    replicas: int = 1
    exchange: ExchangeConfig | None = None
    """None in files of an older planaria"""

    @property
    def lines(self) -> tuple[range, ...]:
        """The layers of each stage, which determine all its parameters."""
        return tuple(stage_layers(self.model, self.stages, stage) for stage in range(self.stages + 1))


def atom_name(cut: RunCut, stage: int, local: str) -> str:
    """Return the name of a stage's parameter in every cut; a name without counterpart in other cuts includes its
    stage.
    """
    try:
        return make_family(cut.model).global_name(cut.model, cut.stages, stage, local)
    except ValueError:  # of a family without such names, or outside of layers
        return f"stage {stage}: {local}"


@lru_cache(maxsize=256)
def declared_tensors(cut: RunCut, stage: int) -> Mapping[str, PackedTensor]:
    built = build_stage(cut.model, cut.stages, stage, 0, "meta")
    return {name: PackedTensor(TYPES[p.dtype], tuple(p.shape)) for name, p in built.named_parameters()}


def require_known(saved: RunCut, location: object) -> None:
    """Raise UserError, naming ``location``, if the family of models or the exchange is unknown."""
    try:
        make_family(saved.model)
        if saved.exchange is not None:
            make_exchange(saved.exchange)
    except UserError as error:
        raise UserError(f"{location}: {error}") from None


def require_alike(saved: RunCut, wanted: RunCut, location: str) -> None:
    """Raise UserError if the saved model cannot be re-cut to the wanted one."""
    require_known(saved, location)
    free = CUT | make_family(saved.model).resizable_settings
    if saved.model.model_copy(update={name: getattr(wanted.model, name) for name in free}) != wanted.model:
        raise UserError(f"{location} was written by a model of another shape; choose another with --checkpoint")
    if saved.lines != wanted.lines and not make_family(saved.model).has_global_names:
        raise UserError(
            f"{location} has {saved.stages} stages, and model.family = {saved.model.family!r} cannot be re-cut; "
            f"resume with --pipeline.stages {saved.stages}"
        )


def overlapping_stages(saved: RunCut, wanted: RunCut, stage: int) -> list[int]:
    """Return the saved stages that hold a part of the wanted ``stage``."""
    if saved.model.one_array:
        return [stage if stage <= saved.stages else 0]
    if saved.lines == wanted.lines:
        return [stage]
    layers = set(wanted.lines[stage])
    return [s for s, saved_layers in enumerate(saved.lines) if s == stage == 0 or layers & set(saved_layers)]
