"""Assignment of a stage's state to a worker: initial weights, a checkpoint, a snapshot, donors or its own state."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts.orders import Donate
from planaria.models.families import make_family
from planaria.models.llama_stages import stage_layers
from planaria.models.packing import pack, unpack
from planaria.models.state import StageState
from planaria.runtime.checkpoint.memory_folder import MemoryFolder
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.wire import State
from planaria.runtime.worker.checkpoint_writer import StageFiles
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.received_frames import FrameId
from planaria.runtime.worker.recovery_copies import MakeRunner, SnapshotPart, StageCopies, rebuild_inputs
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.setup import Setup
from planaria.runtime.worker.sleeping_runner import new_runner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TakeoverTimes:
    """Durations of a state transfer and rebuild."""

    transfer_s: float = 0.0
    transfer_bytes: int = 0
    rebuild_s: float = 0.0

    def __str__(self) -> str:
        return f"transfer {self.transfer_s:.3f} s ({self.transfer_bytes} bytes), rebuild {self.rebuild_s:.3f} s"


def describe_source(source: d.Source) -> str:
    """Return the source of a state for logs, such as ``rebuild by=checkfree donors=[1, 3]``."""
    fields = dict(source)
    return " ".join([fields.pop("origin"), *(f"{name}={value}" for name, value in fields.items())])


class MemoryDamaged(Exception):
    """The state retained in this worker's memory has changed, so its memory is unreliable."""


class TakenState(NamedTuple):
    """A stage's state at its new worker."""

    runner: StageRunner
    timing: TakeoverTimes = TakeoverTimes()
    donated: Mapping[int, StageState] = {}
    """the donors' states from which a recovery strategy rebuilt it, by stage"""
    part: SnapshotPart | None = None
    """part of the snapshot to which it was rolled back"""


def _require_intact(copies: StageCopies) -> None:
    if not copies.intact():
        raise MemoryDamaged("retained state does not match its checksum; the worker's memory is faulty")


def donate(run: ResolvedRun, messages: PeerMessages, form: d.Form, runner: StageRunner, copies: StageCopies) -> None:
    """Send this worker's contribution to each worker that rebuilds a lost stage.

    :raises MemoryDamaged: if a retained copy has changed.
    """
    for member in form.members:
        source = member.source
        if isinstance(source, d.Rebuild) and messages.assignment.node in source.donors:
            messages.control_link.set_activity("send state", messages.assignment.step)
            donated = runner.whole_state()
            if source.by == d.PEER:
                donated = donated.trained
                donated.outer = messages.round_member.outer.state_for_transfer(to_successor=False)
            else:
                _require_intact(copies)
                kept = copies.kept(source.by, member.stage)
                donated = run.recovery.strategies[source.by].donate(member.stage, donated, kept)
            messages.edges.transfers[member.node].send(State(messages.assignment.stage), pack(donated))


def transfer(messages: PeerMessages, order: Donate, runner: StageRunner) -> None:
    """Send another replica, or a successor, a copy of this worker's stage as of the last commit."""
    messages.control_link.set_activity("send state", messages.assignment.step)
    to_successor, state = order.donor == d.PREDECESSOR, runner.whole_state()
    if not to_successor:  # a copy has its own random generators
        state = state.part(lambda name: not order.only_outer, moments=not order.only_outer)
    state.outer = messages.round_member.outer.state_for_transfer(to_successor)
    messages.edges.transfer(order, pack(state))
    log.info("sent the state of stage %d to %s", order.stage, "its successor" if to_successor else order.to)


@dataclass
class StageTakeover:
    """Takes a stage's state for a worker, to replace its current runner."""

    setup: Setup
    run: ResolvedRun
    messages: PeerMessages
    runner: StageRunner
    """the worker's current runner, then the one with the state"""
    copies: StageCopies | None
    rounds: int
    """settled exchange rounds of its replica"""
    lost_runner: StageRunner | None = None
    """the lost worker's runner, for controls such as the oracle"""
    make_runner: MakeRunner = new_runner
    """makes a runner with initial weights"""

    def take(self, source: d.Source) -> TakenState:
        """Return a runner of this worker's stage with the state of ``source``.

        :raises UserError: if a checkpoint cannot be read.
        :raises MemoryDamaged: if a retained snapshot has changed.
        """
        match source:
            case d.Keep():
                return TakenState(self.runner)
            case d.CatchUp():
                return self._catch_up(source)
            case d.Rebuild() | d.Handover():
                return self._receive(source)
            case d.Recall():
                return self._load_snapshot(source)
            case d.Fresh():
                return self._start_fresh()
            case d.Load():
                return self._load_checkpoint(source)

    def form_copies(self, form: d.Form, me: d.Member, taken: TakenState) -> StageCopies:
        """Return the worker's copies in the new formation, with the state that was ``taken``."""
        copies = self.copies
        if copies is None or not isinstance(me.source, d.Keep):
            copies = StageCopies(self.run, me.node, self.run.column(form.replica), self.make_runner)
        if taken.donated and isinstance(me.source, d.Rebuild):
            copies.restore_copies(me.source.by, taken.runner.state(), taken.donated, form.step)
        if taken.part is not None:
            copies.import_snapshot(taken.part)
        replaced = {member.node for member in form.members if not isinstance(member.source, d.Keep)}
        copies.formed(replaced, self.messages.assignment.absent)
        return copies

    def _start_fresh(self) -> TakenState:
        start = time.monotonic()
        self.runner.release()
        self.runner = self.make_runner(self.setup.config, self.messages.assignment.stage, True)
        self.messages.round_member.begin({}, self.runner, self.rounds)
        return TakenState(self.runner, TakeoverTimes(rebuild_s=time.monotonic() - start))

    def _load_checkpoint(self, source: d.Load) -> TakenState:
        start, assignment = time.monotonic(), self.messages.assignment
        self.messages.control_link.set_activity("read", assignment.step)
        self._fit_runner()
        state = StageFiles(self.setup, assignment.worker).read(source.folder, assignment.stage, assignment.number)
        self.runner.load(state)
        self.messages.round_member.begin(state.outer, self.runner, self.rounds)
        return TakenState(self.runner, TakeoverTimes(rebuild_s=time.monotonic() - start))

    def _load_snapshot(self, recall: d.Recall) -> TakenState:
        """Load this worker's part of a snapshot, from memory or from its predecessor's file."""
        start, assignment = time.monotonic(), self.messages.assignment
        self.messages.control_link.set_activity("read", assignment.step)
        self._fit_runner()
        stage, copies = assignment.stage, self.copies
        if copies is not None and copies.node == assignment.node and copies.retained == recall.step:
            _require_intact(copies)
            part = copies.export_snapshot()
        elif recall.file is None:
            reason = f"its worker does not hold the snapshot of step {recall.step}; resume the run"
            raise UserError(f"stage {stage}: {reason}")
        else:
            part = SnapshotPart(stage, recall.step, *MemoryFolder(self.setup.folder).read(stage, recall.file))
        self.runner.load(part.state)
        return TakenState(self.runner, TakeoverTimes(rebuild_s=time.monotonic() - start), part=part)

    def _receive(self, source: d.Rebuild | d.Handover) -> TakenState:
        """Wait for the donors' states, and load the state or let the recovery strategy rebuild it."""
        messages, assignment = self.messages, self.messages.assignment
        self._fit_runner()
        start = time.monotonic()
        donors = source.donors if isinstance(source, d.Rebuild) else [d.PREDECESSOR]
        stages, flats = [assignment.stage_of(node) for node in donors], self._collect_states(donors)
        arrived = time.monotonic()
        messages.control_link.set_activity("rebuild", assignment.step)
        states = {stage: unpack(flat) for stage, flat in zip(stages, flats, strict=True)}
        outer: Mapping[str, Tensor] = {}
        if isinstance(source, d.Handover) or source.by == d.PEER:
            outer = states[assignment.stage].outer
            self.runner.load(states[assignment.stage])
            states = {}
        else:
            inputs = rebuild_inputs(self.run.config, assignment.stage, assignment.step)
            if self.lost_runner is not None:
                inputs = replace(inputs, before=self.lost_runner.state())
            strategy = self.run.recovery.strategies[source.by]
            self.runner.load(strategy.rebuild(assignment.stage, states, inputs))
        messages.edges.end_transfers()
        size = sum(flat.nbytes for flat in flats)
        timing = TakeoverTimes(arrived - start, size, time.monotonic() - arrived)
        messages.round_member.begin(outer, self.runner, self.rounds)
        return TakenState(self.runner, timing, states)

    def _catch_up(self, source: d.CatchUp) -> TakenState:
        """Wait for another replica's outer state, and take over the rounds that this one missed."""
        start, (flat,) = time.monotonic(), self._collect_states(source.donors)
        arrived = time.monotonic()
        self.messages.round_member.catch_up(unpack(flat).outer, self.runner, self.rounds)
        self.messages.edges.end_transfers()
        return TakenState(self.runner, TakeoverTimes(arrived - start, flat.nbytes, time.monotonic() - arrived))

    def _collect_states(self, donors: Sequence[int]) -> list[Tensor]:
        messages, assignment = self.messages, self.messages.assignment
        messages.control_link.set_activity("receive state", assignment.step)
        frames = [FrameId(node, State(assignment.stage_of(node))) for node in donors]
        return messages.collect(frames, "the state of {}")

    def _fit_runner(self) -> None:
        """Create a runner for the assigned stage, or reuse the current one if its layers match. Loads no weights.

        With weights shared over the model, and in some families, a stage's module depends on which layers it holds.
        """
        config, stage = self.setup.config, self.messages.assignment.stage
        if self.runner.stage == stage:
            return
        current, wanted = (stage_layers(config.model, config.pipeline.stages, s) for s in (self.runner.stage, stage))
        fixed = config.model.one_array or not make_family(config.model).interchangeable
        if fixed or (self.runner.stage == 0) != (stage == 0) or len(current) != len(wanted):
            self.runner.release()
            self.runner = self.make_runner(config, stage, False)
        self.runner.stage = stage
