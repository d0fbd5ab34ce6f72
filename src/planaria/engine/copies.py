"""What a worker sends and keeps so that lost stages can be had again: the recovery strategies' copies at work.

Both engines drive it alike, step by step: :meth:`Keeping.before`, the step itself, :meth:`Keeping.after`, and when all
that is expected has been taken, commit or drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.config import RunConfig
from planaria.engine.runner import StageRunner
from planaria.model.families import build_stage
from planaria.model.state import StageState
from planaria.plan.actions import Action
from planaria.recovery import recovery
from planaria.recovery.base import Holder, Moment, Sender

MakeRunner = Callable[[RunConfig, int, bool], StageRunner]
"""(config, stage, whether to draw initial weights) → a runner of the kind that the engine uses"""


class Parcel(NamedTuple):
    """One message of a copy: ``slot`` is the copy's place in the chain's slots."""

    slot: int
    moment: Moment


@dataclass(frozen=True)
class _Original:
    """A stage as its keepers may know it."""

    config: RunConfig
    stage: int
    make: MakeRunner

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        meta = build_stage(self.config.model, self.config.pipeline.stages, self.stage, 0, "meta")
        return {name: parameter.shape for name, parameter in meta.named_parameters()}

    def twin(self) -> StageRunner:
        runner = self.make(self.config, self.stage, False)
        runner.begin(None, train=True, microbatches=self.config.pipeline.microbatches)
        return runner


class Keeping:
    """The sending sides of the copies of ``stage``, and the copies that it hosts."""

    def __init__(self, config: RunConfig, stage: int, make: MakeRunner) -> None:
        self._chain = recovery(config.recovery, config.pipeline.stages)
        self._all_senders: dict[int, Sender] = {}
        self._all_holders: dict[int, Holder] = {}
        for number, slot in enumerate(self._chain.slots):
            if stage in slot.copy:
                original = _Original(config, slot.copy.stage, make)
                sender, holder = self._chain.strategies[slot.by].keeper(slot.copy, original)
                if slot.copy.stage == stage:
                    self._all_senders[number] = sender
                if slot.copy.host == stage:
                    self._all_holders[number] = holder
        # Those at work; every action asks for them, so they change with the formation only.
        self._senders, self._holders = self._all_senders, self._all_holders

    def formed(self, reborn: set[int], absent: set[int]) -> None:
        """Copies from or at ``reborn`` stages begin anew; those that involve an ``absent`` one rest as they are."""
        self._senders = {n: s for n, s in self._all_senders.items() if not absent & set(self._chain.slots[n].copy)}
        self._holders = {n: h for n, h in self._all_holders.items() if not absent & set(self._chain.slots[n].copy)}
        # Parts of one stage at several hosts begin anew together, so that they always belong to one version.
        anew = {(slot.by, slot.copy.stage) for slot in self._chain.slots if reborn & set(slot.copy)}
        for side in (self._all_senders, self._all_holders):
            for number, keeper in side.items():
                slot = self._chain.slots[number]
                if (slot.by, slot.copy.stage) in anew:
                    keeper.restart()

    def before(self, step: int, runner: StageRunner) -> Iterator[tuple[int, Parcel, Tensor]]:
        """What to send at the beginning of ``step``: (host, parcel, bytes)."""
        if not self._senders:
            return
        state = runner.state()
        for number, sender in self._senders.items():
            message = sender.before(step, state)
            if message is not None:
                yield self._chain.slots[number].copy.host, Parcel(number, "before"), message

    def passed(self, action: Action, out: Tensor) -> None:
        """This worker's stage has carried out ``action`` and hands on ``out``."""
        if action.kind == "forward":
            for number, holder in self._holders.items():
                if self._chain.slots[number].copy.stage == action.target:
                    holder.passes(action.microbatch, out)

    def after(self, step: int, runner: StageRunner) -> Iterator[tuple[int, Parcel, Tensor]]:
        """What to send once the gradient of ``step`` is whole: (host, parcel, bytes)."""
        if not self._senders:
            return
        gradients = runner.gradients()
        if any(sender.updates_first(step) for sender in self._senders.values()):
            runner.prepare(step)
        state = runner.state()
        for number, sender in self._senders.items():
            message = sender.after(step, state, gradients)
            if message is not None:
                yield self._chain.slots[number].copy.host, Parcel(number, "after"), message

    def expects(self, step: int) -> dict[Parcel, int]:
        """The parcels of ``step`` that this worker must have before it is ready, and the stage each comes from."""
        return {
            Parcel(number, moment): self._chain.slots[number].copy.stage
            for number, holder in self._holders.items()
            for moment in holder.expects(step)
        }

    def take(self, step: int, parcel: Parcel, message: Tensor) -> None:
        """One of the expected parcels has come."""
        self._holders[parcel.slot].take(step, parcel.moment, message)

    def commit(self, step: int) -> None:
        for keeper in self._keepers:
            keeper.commit(step)

    def drop(self) -> None:
        for keeper in self._keepers:
            keeper.drop()

    def kept(self, by: str, stage: int) -> StageState | None:
        """What this worker has kept of ``stage`` for the strategy ``by``; None if nothing."""
        for number, holder in self._all_holders.items():
            slot = self._chain.slots[number]
            if (slot.by, slot.copy.stage) == (by, stage):
                return holder.state()
        return None

    @property
    def nbytes(self) -> int:
        """Memory that copies take here between steps, on either side."""
        sent = sum(sender.nbytes for sender in self._all_senders.values())
        return sent + sum(holder.nbytes for holder in self._all_holders.values())

    @property
    def _keepers(self) -> list[Sender | Holder]:
        return [*self._senders.values(), *self._holders.values()]
