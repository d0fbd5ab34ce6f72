"""CheckFree+ (arXiv 2506.15461, section 3.3): recover the outer stages and stage 0 too.

Half of the microbatches visit the two outermost stages at each side in swapped order (``pipeline/routing/base.py``). So
a lost first stage becomes a copy of the second, and a lost last stage a copy of the last but one. The worker of the
first block stage mirrors the embedding; that of the last mirrors final norm and head. Middle stages use CheckFree.

A mirror is renewed every k steps. Its sender applies the step's update before the commit, revocably, and sends the
result. With k = 1 the mirror equals the last committed state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from planaria.config.bounds import Positive
from planaria.models.packing import pack, unpack
from planaria.models.state import StageShapes, StageState
from planaria.pipeline.network.costs import FP32_BYTES
from planaria.recovery.base import (
    Copy,
    CopyCost,
    DamagedReplica,
    Holder,
    Moment,
    Original,
    RebuildInputs,
    Sender,
    StrategyPlan,
    StrategyRequirements,
    numel,
)
from planaria.recovery.checkfree import CheckFree

ENDS = 0


def swap_partner(stage: int, stages: int) -> int | None:
    """Return the stage with which an outermost block stage is swapped, or None for other stages."""
    return {1: 2, stages: stages - 1}.get(stage)


def belongs_at(host: int) -> Callable[[str], bool]:
    """Return a predicate for stage 0's parameters mirrored at ``host``: the embedding at stage 1, others at the
    last."""
    return lambda name: name.startswith("embed_tokens.") == (host == 1)


class CheckFreePlus(CheckFree):
    """CheckFree for middle stages, copies for outer stages, mirrors for stage 0."""

    requirements: ClassVar[StrategyRequirements] = StrategyRequirements(
        "swapped", "an outer stage has a trained partner only with swapped routes", alike=True
    )
    caption: ClassVar[str] = "{donors} send their weights of the same kind, which become the new {stage}"
    mirror_every: Positive = 1
    """steps between mirrorings of embedding and head; 1 is exact"""
    mirror_moments: bool = False
    """whether to mirror their optimizer moments too"""

    def copies(self, stages: int) -> tuple[Copy, ...]:
        return (Copy((ENDS,), 1), Copy((ENDS,), stages))

    def sender(self, copy: Copy, stage: int) -> Sender:
        return MirrorSender(belongs_at(copy.host), self.mirror_every, self.mirror_moments)

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        return MirrorHolder(self.mirror_every)

    def cost(self, copy: Copy, shapes: Mapping[int, StageShapes]) -> CopyCost:
        wanted = belongs_at(copy.host)
        size = FP32_BYTES * numel({name: shape for name, shape in shapes[ENDS].items() if wanted(name)})
        mirrored = size * (3 if self.mirror_moments else 1)
        return CopyCost(mirrored / self.mirror_every, mirrored)

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        """Return the mirrors of stage 0, the partners of outer stages, and both neighbours of middle stages."""
        last = replica.stages
        outer = lost & {ENDS, 1, last}
        middle = self._neighbours(lost - outer, lost, last)
        donors, refused = dict(middle.donors), dict(middle.refused)
        for stage in sorted(outer):
            helpers = (1, last) if stage == ENDS else (swap_partner(stage, last) or 0,)
            if missing := [h for h in helpers if h in lost]:
                refused[stage] = f"stage {stage} requires stage {missing[0]}, which is also lost"
            elif stage == ENDS and (incomplete := [h for h in helpers if not replica.staleness[h]]):
                refused[stage] = f"the mirror of stage 0 at stage {incomplete[0]} is incomplete"
            else:
                donors[stage] = helpers
        return StrategyPlan(dict(sorted(donors.items())), dict(sorted(refused.items())))

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        if lost == ENDS:
            (mirror,) = kept.values()
            return mirror
        return super().donate(lost, own, {})

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        """Join both mirrors, copy the partner, or merge both neighbours."""
        if stage == ENDS:
            return join_parts(list(donated.values()))
        if len(donated) == 1:
            (partner_state,) = donated.values()
            return StageState(partner_state.weights, partner_state.moments, partner_state.clocks, self.lr_scale)
        return super().rebuild(stage, donated, inputs)


def join_parts(parts: list[StageState]) -> StageState:
    """Join mirrored parts of one stage; without all moments its optimizer starts fresh."""
    weights = {name: tensor for part in parts for name, tensor in part.weights.items()}
    moments = {name: pair for part in parts for name, pair in part.moments.items()}
    clocks = {name: clock for part in parts for name, clock in part.clocks.items()}
    first = parts[0]
    whole = moments.keys() == weights.keys()
    norms = (first.grad_norm, first.clipped_norm) if whole else (None, None)
    scales = {name: part.scales.get(name, part.lr_scale) for part in parts for name in part.weights}
    other_scales = {name: scale for name, scale in scales.items() if scale != first.lr_scale}
    optimizer_state = (moments, clocks) if whole else ({}, {})
    return StageState(weights, *optimizer_state, first.lr_scale, *norms, scales=other_scales)


def is_renewal_due(step: int, every: int, restarted: bool) -> bool:
    """Whether the copy is renewed in ``step``: after a restart, and in every ``every``-th step."""
    return restarted or (step + 1) % every == 0


class MirrorSender(Sender):
    """Sends the ``wanted`` parameters, optionally with moments, after each due update."""

    def __init__(self, wanted: Callable[[str], bool], every: int, moments: bool) -> None:
        self._wanted = wanted
        self._every = every
        self._moments = moments

    def needs_applied_update(self, step: int) -> bool:
        return is_renewal_due(step, self._every, self.restarted)

    def message_after_gradient(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        return pack(state.part(self._wanted, self._moments)) if self.needs_applied_update(step) else None


class MirrorHolder(Holder):
    """Holds the newest committed copy and the one of the current step."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._held: StageState | None = None
        self._pending: StageState | None = None

    @property
    def nbytes(self) -> int:
        return self._held.nbytes if self._held else 0

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("after",) if is_renewal_due(step, self._every, self.restarted) else ()

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        self._pending = unpack(message)

    def commit(self, step: int) -> None:
        self._held, self._pending = self._pending or self._held, None
        self.restarted = False

    def drop(self) -> None:
        self._pending = None

    def state(self) -> StageState:
        assert self._held is not None, "no copy before the first commit"
        return self._held
