"""How a run is spread over stages and replicas, and the names of parameters that no cut changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, ModelConfig
from planaria.exchange.kinds import exchange
from planaria.models.families import build_stage, family
from planaria.models.packing import TYPES, Entry
from planaria.models.stages import global_name, stage_layers

CUT = frozenset({"ends_layers", "block_layers"})
"""what of a model's section says how it is cut, and not which model it is"""


@dataclass(frozen=True)
class Cut:
    """How a run is spread: over so many block stages, and replicas that agree as ``exchange`` says."""

    model: ModelConfig
    stages: int
    replicas: int = 1
    exchange: ExchangeConfig | None = None
    """None: an older planaria did not write it down"""

    @property
    def lines(self) -> tuple[range, ...]:
        """All that decides which stage holds which parameter: the layers of each."""
        return tuple(stage_layers(self.model, self.stages, stage) for stage in range(self.stages + 1))


def atom_name(cut: Cut, stage: int, local: str) -> str:
    """The name of a stage's parameter that no cut changes; of a family that cannot be one model, with its stage."""
    if not family(cut.model).whole:
        return f"stage {stage}: {local}"
    try:
        return global_name(cut.model, cut.stages, stage, local)
    except ValueError:  # of no layer
        return f"stage {stage}: {local}"


@lru_cache(maxsize=256)
def declared(cut: Cut, stage: int) -> Mapping[str, Entry]:
    """Type and shape of every parameter of a stage by its local name."""
    built = build_stage(cut.model, cut.stages, stage, 0, "meta")
    return {name: Entry(TYPES[p.dtype], tuple(p.shape)) for name, p in built.named_parameters()}


def require_known(saved: Cut, place: object) -> None:
    """:raises UserError: naming ``place``, when there is no such family of models, or no such exchange."""
    try:
        family(saved.model)
        if saved.exchange is not None:
            exchange(saved.exchange)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def require_alike(saved: Cut, wanted: Cut, place: str) -> None:
    """:raises UserError: when no change of cut makes the saved model the wanted one."""
    require_known(saved, place)
    free = CUT | {"vocab"} if family(saved.model).whole else CUT
    if saved.model.model_copy(update={name: getattr(wanted.model, name) for name in free}) != wanted.model:
        raise UserError(f"{place}: was written by a model of another shape; choose another with --checkpoint")
    if saved.lines != wanted.lines and not family(saved.model).whole:
        raise UserError(
            f"{place}: of {saved.stages} stages, and its model.family = {saved.model.family!r} has no parameters by "
            f"layer, by which to re-cut it; go on with --pipeline.stages {saved.stages}"
        )


def holders(saved: Cut, wanted: Cut, stage: int) -> list[int]:
    """The saved stages that hold something of the wanted ``stage``."""
    if saved.model.one_array:
        return [stage if stage <= saved.stages else 0]
    if saved.lines == wanted.lines:
        return [stage]
    layers = set(wanted.lines[stage])
    return [s for s, theirs in enumerate(saved.lines) if s == stage == 0 or layers & set(theirs)]
