"""Copies of stages that workers keep for recovery strategies.

In each step both engines call :meth:`StageCopies.messages_before_step`, :meth:`StageCopies.messages_after_gradient`
and, once all expected messages have arrived, :meth:`StageCopies.commit` or :meth:`StageCopies.drop`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.models.families import build_stage
from planaria.models.optimizers import make_optimizer
from planaria.models.state import StageShapes, StageState
from planaria.pipeline.plan.actions import Action
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.recovery.base import Copy, Holder, Moment, RebuildInputs, RestoredHolder, Sender
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import Lengths, Masks, StepData, StepInputs

log = logging.getLogger(__name__)
MakeRunner = Callable[[RunConfig, int, bool], StageRunner]
"""(config, stage, whether to draw initial weights) → a runner of the kind that the engine uses"""


class CopyMessageId(NamedTuple):
    """Which message of a copy: ``slot`` is the copy's index in the chain's slots, ``source`` the sending node."""

    slot: int
    source: int
    moment: Moment


class SnapshotPart(NamedTuple):
    """A worker's part of a snapshot."""

    stage: int
    step: int
    state: StageState
    """the worker's own part"""
    parities: Mapping[str, Tensor]
    """parts of others' states, by slot and name"""


@dataclass(frozen=True)
class _Original:
    """A holder's access to the stage that it copies (:class:`planaria.recovery.base.Original`)."""

    config: RunConfig
    stage: int
    make: MakeRunner
    masks: Masks | None
    """document masks of the current step, for passes that a twin also computes"""
    lengths: Lengths | None
    """computed tokens of the current step, for the same passes"""

    @property
    def shapes(self) -> StageShapes:
        meta = build_stage(self.config.model, self.config.pipeline.stages, self.stage, 0, "meta")
        shapes = {name: parameter.shape for name, parameter in meta.named_parameters()}
        return StageShapes(shapes, make_optimizer(self.config.optim).keys)

    @property
    def device(self) -> str:
        return self.config.train.device

    def twin(self) -> StageRunner:
        runner = self.make(self.config, self.stage, False)
        microbatches = self.config.pipeline.microbatches
        runner.begin(StepInputs(microbatches=microbatches, masks=self.masks, lengths=self.lengths))
        return runner


class StageCopies:
    """A node's copies: the sending sides for its stage, and the copies that it hosts."""

    def __init__(self, run: ResolvedRun, node: int, column: Arrangement, make: MakeRunner) -> None:
        """``column``: all nodes of the node's replica, present or absent."""
        self.node, self._stage = node, column.stage
        config, self._chain = run.config, run.recovery
        self._placed = [slot.copy for slot in self._chain.slots_on_nodes(column)]
        self._data = StepData(None, None)
        masks = self._mask if config.data.document_mask else None
        lengths = self._length if config.data.dialogues else None
        self._all_senders: dict[int, Sender] = {}
        self._all_holders: dict[int, Holder] = {}
        for number, (slot, placed) in enumerate(zip(self._chain.slots, self._placed, strict=True)):
            strategy = self._chain.strategies[slot.strategy]
            if node in placed.sources:
                self._all_senders[number] = strategy.sender(slot.copy, column.stage[node])
            if node == placed.host:
                originals = {stage: _Original(config, stage, make, masks, lengths) for stage in slot.copy.sources}
                self._all_holders[number] = strategy.holder(slot.copy, originals)
        # Active sides. They change with the formation only, since every action reads them.
        self._senders, self._holders = self._all_senders, self._all_holders

    def formed(self, replaced: set[int], absent: set[int]) -> None:
        """Restart copies that involve ``replaced`` nodes, and suspend those that involve ``absent`` ones."""
        self._senders = {n: s for n, s in self._all_senders.items() if not absent & self._placed[n].members}
        self._holders = {n: h for n, h in self._all_holders.items() if not absent & self._placed[n].members}
        # Parts of one stage at several hosts restart together, so that they belong to one version.
        keys = [{(slot.strategy, stage) for stage in slot.copy.sources} for slot in self._chain.slots]
        restarting = set().union(
            *(key for key, copy in zip(keys, self._placed, strict=True) if replaced & copy.members)
        )
        for sides in (self._all_senders, self._all_holders):
            for number, side in sides.items():
                if keys[number] & restarting:
                    side.restart()

    def begin(self, data: StepData) -> None:
        """Start a step with these samples."""
        self._data = data

    def _mask(self, microbatch: int) -> Tensor:
        assert self._data.masks is not None, "a pass outside of any step"
        return self._data.masks(microbatch)

    def _length(self, microbatch: int) -> int:
        assert self._data.lengths is not None, "a pass outside of any step"
        return self._data.lengths(microbatch)

    def messages_before_step(self, step: int, runner: StageRunner) -> Iterator[tuple[int, CopyMessageId, Tensor]]:
        """Yield messages to send at the start of ``step``: (host, id, bytes)."""
        if not self._senders:
            return
        state = runner.state()
        for number, sender in self._senders.items():
            message = sender.message_before_step(step, state)
            if message is not None and self._placed[number].host == self.node:
                self._holders[number].take(step, self._stage[self.node], "before", message)
            elif message is not None:
                yield self._placed[number].host, CopyMessageId(number, self.node, "before"), message

    def observe_forward(self, action: Action, out: Tensor) -> None:
        """Show the output of this node's ``action`` to the holders of the stage that receives it."""
        if action.kind == "forward" and action.target is not None:
            for number, holder in self._holders.items():
                if self._stage[action.target] in self._chain.slots[number].copy.sources:
                    holder.on_forward_output(action.microbatch, out)

    def messages_after_gradient(self, step: int, runner: StageRunner) -> Iterator[tuple[int, CopyMessageId, Tensor]]:
        """Yield messages to send once the gradient of ``step`` is complete: (host, id, bytes)."""
        if not self._senders:
            return
        gradients = runner.gradients()
        if any(sender.needs_applied_update(step) for sender in self._senders.values()):
            runner.prepare(step)
        state = runner.state()
        for number, sender in self._senders.items():
            message = sender.message_after_gradient(step, state, gradients)
            if message is not None:
                yield self._placed[number].host, CopyMessageId(number, self.node, "after"), message

    def expects(self, step: int) -> list[CopyMessageId]:
        """Return the messages of ``step`` that this worker must receive before it is ready."""
        return [
            CopyMessageId(number, source, moment)
            for number, holder in self._holders.items()
            for moment in holder.expects(step)
            for source in self._placed[number].sources
            if source != self.node
        ]

    def take(self, step: int, message_id: CopyMessageId, message: Tensor) -> None:
        """Store an expected message."""
        self._holders[message_id.slot].take(step, self._stage[message_id.source], message_id.moment, message)

    def commit(self, step: int) -> None:
        for side in self._active_sides:
            side.commit(step)

    def drop(self) -> None:
        for side in self._active_sides:
            side.drop()

    def kept(self, by: str, lost: int) -> dict[Copy, StageState]:
        """Return the copies for the strategy ``by`` that help to rebuild the stage ``lost``."""
        strategy = self._chain.strategies[by]
        helpful = {number: copy for number, copy in self._kept_by(by) if strategy.helps_rebuild(copy, lost)}
        return {copy: self._all_holders[number].state() for number, copy in helpful.items()}

    @property
    def retained(self) -> int:
        """Step of the snapshot that this worker retains; -1: none."""
        return -1 if self._own is None else self._own[1].retained

    def export_snapshot(self) -> SnapshotPart:
        """Return this worker's part of the retained snapshot."""
        assert self._own is not None
        own_slot, holder = self._own
        parities = {
            f"{number}.{key}": part
            for number, copy in self._kept_by(self._chain.slots[own_slot].strategy)
            if number != own_slot
            for key, part in self._all_holders[number].state().weights.items()
        }
        return SnapshotPart(self._stage[self.node], holder.retained, holder.state(), parities)

    def intact(self) -> bool:
        """Return whether the checksums of retained state are intact."""
        holders = (holder for holder in self._all_holders.values() if isinstance(holder, RestoredHolder))
        return all(holder.intact() for holder in holders)

    def import_snapshot(self, part: SnapshotPart) -> None:
        """Retain a part of a snapshot from :meth:`export_snapshot`."""
        assert self._own is not None
        self._own[1].load(part.state, part.step)
        for number, _ in self._kept_by(self._chain.slots[self._own[0]].strategy):
            prefix = f"{number}."
            parities = {key.removeprefix(prefix): p for key, p in part.parities.items() if key.startswith(prefix)}
            if parities:
                cast(RestoredHolder, self._all_holders[number]).load(StageState(parities), part.step)
                log.info("restored copy %d from the snapshot of step %d", number, part.step)

    def restore_copies(self, by: str, state: StageState, donated: Mapping[int, StageState], step: int) -> None:
        """Restore the copies for the strategy ``by`` after this stage was rebuilt as ``state`` of ``step``, if
        possible.
        """
        for number, copy in self._kept_by(by):
            kept = state if copy.is_self_copy else self._chain.strategies[by].rebuild_copy(copy, donated)
            if kept is not None:
                cast(RestoredHolder, self._all_holders[number]).load(kept, step)
                log.info("restored copy %d for %s, of step %d", number, by, step)

    def _kept_by(self, by: str) -> list[tuple[int, Copy]]:
        slots = ((number, self._chain.slots[number]) for number in self._all_holders)
        return [(number, slot.copy) for number, slot in slots if slot.strategy == by]

    @property
    def _own(self) -> tuple[int, RestoredHolder] | None:
        """Slot and holder of the worker's own retained stage."""
        for number, holder in self._all_holders.items():
            if self._chain.slots[number].copy.is_self_copy:
                return number, cast(RestoredHolder, holder)
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that copies take between steps, on both sides."""
        sent = sum(sender.nbytes for sender in self._all_senders.values())
        return sent + sum(holder.nbytes for holder in self._all_holders.values())

    @property
    def _active_sides(self) -> list[Sender | Holder]:
        return [*self._senders.values(), *self._holders.values()]


def rebuild_inputs(config: RunConfig, stage: int, step: int) -> RebuildInputs:
    """Return the tools to rebuild ``stage`` in ``step``; equal in both engines."""
    return RebuildInputs(partial(_draw, config, stage, step), make_optimizer(config.optim).decays(config.optim))


def _draw(config: RunConfig, stage: int, step: int) -> Mapping[str, Tensor]:
    """Draw initial weights from a negative seed of this step, which no run starts from."""
    built = build_stage(config.model, config.pipeline.stages, stage, -1 - config.seed * (1 << 32) - step)
    return {name: parameter.detach() for name, parameter in built.named_parameters()}
