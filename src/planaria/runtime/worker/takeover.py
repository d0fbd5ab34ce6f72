"""Assignment of a stage's state to a worker: initial weights, a checkpoint, a snapshot, donors or its own state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.models.families import family
from planaria.models.llama_stages import stage_layers
from planaria.models.packing import pack, unpack
from planaria.models.state import StageState
from planaria.runtime.checkpoint.memory_folder import MemoryFolder
from planaria.runtime.resolved_config import ResolvedRun
from planaria.runtime.transport.wire import State
from planaria.runtime.worker.checkpoint_writer import StageFiles
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.received_frames import FrameId
from planaria.runtime.worker.recovery_copies import MakeRunner, SnapshotPart, StageCopies, rebuild_inputs
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.setup import Setup
from planaria.runtime.worker.sleeping_runner import new_runner


@dataclass(frozen=True)
class TakeoverTimes:
    """Durations of a state transfer and rebuild."""

    transfer_s: float = 0.0
    transfer_bytes: int = 0
    rebuild_s: float = 0.0

    def __str__(self) -> str:
        return f"transfer {self.transfer_s:.3f} s ({self.transfer_bytes} bytes), rebuild {self.rebuild_s:.3f} s"


def described(source: d.Source) -> str:
    """Return the source of a state for logs, such as ``rebuild by=checkfree donors=[1, 3]``."""
    fields = dict(source)
    return " ".join([fields.pop("origin"), *(f"{name}={value}" for name, value in fields.items())])


class MemoryDamaged(Exception):
    """The state retained in this worker's memory has changed, so its memory is unreliable."""


class TakenState(NamedTuple):
    """A stage's state at its new worker."""

    runner: StageRunner
    timing: TakeoverTimes = TakeoverTimes()
    given: Mapping[int, StageState] = {}
    """the donors' states from which a recovery strategy rebuilt it, by stage"""
    part: SnapshotPart | None = None
    """of the snapshot to which it was rolled back"""


def _part(setup: Setup, copies: StageCopies | None, node: int, stage: int, recall: d.Recall) -> SnapshotPart:
    """Return this worker's part of a snapshot, from memory or from its predecessor's file.

    :raises UserError: if the file cannot be read.
    :raises MemoryDamaged: if the memory has changed.
    """
    if copies is not None and copies.node == node and copies.retained == recall.step:
        _require_intact(copies)
        return copies.remembered()
    if recall.file is None:
        raise UserError(f"stage {stage}: its worker does not hold the snapshot of step {recall.step}; resume the run")
    return SnapshotPart(stage, recall.step, *MemoryFolder(setup.folder).read(stage, recall.file))


def _require_intact(copies: StageCopies) -> None:
    if not copies.intact():
        raise MemoryDamaged("retained state does not match its checksum; the worker's memory is faulty")


def donate(run: ResolvedRun, messages: PeerMessages, form: d.Form, runner: StageRunner, copies: StageCopies) -> None:
    """Send this worker's contribution to each worker that rebuilds a lost stage.

    :raises MemoryDamaged: if a retained copy has changed.
    """
    for member in form.members:
        source = member.source
        if isinstance(source, d.Rebuild) and messages.here.node in source.donors:
            messages.control_link.set_activity("give", messages.here.step)
            given = runner.whole_state()
            if source.by == d.PEER:
                given = given.trained
                given.outer = messages.round_member.outer.state_for_transfer(to_successor=False)
            else:
                _require_intact(copies)
                given = run.recovery.donate(source.by, member.stage, given, copies.kept(source.by, member.stage))
            messages.links.transfers[member.node].send(State(messages.here.stage), pack(given))


def take_state(
    setup: Setup,
    run: ResolvedRun,
    messages: PeerMessages,
    source: d.Source,
    runner: StageRunner,
    copies: StageCopies | None,
    rounds: int,
    lost: StageRunner | None = None,
    make_runner: MakeRunner = new_runner,
) -> TakenState:
    """Return a runner of this worker's stage with the state of ``source``.

    :param runner: the worker's current runner
    :param rounds: settled exchange rounds of its replica
    :param lost: the lost worker's runner, for controls such as the oracle
    :param make_runner: makes a runner with initial weights
    :raises UserError: if a checkpoint cannot be read.
    :raises MemoryDamaged: if a retained snapshot has changed.
    """
    start = time.monotonic()
    here, outer = messages.here, dict[str, Tensor]()
    match source:
        case d.Keep():
            return TakenState(runner)
        case d.Fresh():
            runner.release()
            runner = make_runner(setup.config, here.stage, True)
        case d.Load(folder=folder):
            messages.control_link.set_activity("read", here.step)
            runner = _runner_for(setup.config, runner, here.stage)
            state = StageFiles(setup, here.worker).read(folder, here.stage, here.number)
            runner.load(state)
            outer = state.outer
        case d.Recall():
            messages.control_link.set_activity("read", here.step)
            runner = _runner_for(setup.config, runner, here.stage)
            part = _part(setup, copies, here.node, here.stage, source)
            runner.load(part.state)
            return TakenState(runner, TakeoverTimes(rebuild_s=time.monotonic() - start), part=part)
        case d.Rebuild() | d.Handover():
            runner = _runner_for(setup.config, runner, here.stage)
            timing, outer, given = _receive(run, messages, source, runner, lost)
            messages.round_member.begin(outer, runner, rounds)
            return TakenState(runner, timing, given)
    messages.round_member.begin(outer, runner, rounds)
    return TakenState(runner, TakeoverTimes(rebuild_s=time.monotonic() - start))


def _receive(
    run: ResolvedRun,
    messages: PeerMessages,
    source: d.Rebuild | d.Handover,
    runner: StageRunner,
    lost: StageRunner | None,
) -> tuple[TakeoverTimes, dict[str, Tensor], Mapping[int, StageState]]:
    """Wait for the donors' states, and load the state or let the recovery strategy rebuild it.

    Returns timing, outer state, and the states that a strategy used, by stage.
    """
    start, here = time.monotonic(), messages.here
    messages.control_link.set_activity("take", here.step)
    stages = {n: here.stage_of(n) for n in (source.donors if isinstance(source, d.Rebuild) else [d.PREDECESSOR])}
    flats = messages.collect([FrameId(node, State(stage)) for node, stage in stages.items()], "the state of {}")
    arrived = time.monotonic()
    messages.control_link.set_activity("rebuild", here.step)
    given = {stage: unpack(flat) for stage, flat in zip(stages.values(), flats, strict=True)}
    size = sum(flat.nbytes for flat in flats)
    outer: dict[str, Tensor] = {}
    if isinstance(source, d.Handover) or source.by == d.PEER:
        runner.load(given[here.stage])
        outer, given = given[here.stage].outer, {}
    else:
        at = rebuild_inputs(run.config, here.stage, here.step)
        if lost is not None:
            at = replace(at, before=lost.state())
        runner.load(run.recovery.rebuild(source.by, here.stage, given, at))
    messages.links.end_transfers()
    return TakeoverTimes(arrived - start, size, time.monotonic() - arrived), outer, given


def _runner_for(config: RunConfig, runner: StageRunner, stage: int) -> StageRunner:
    """Return a runner of ``stage`` whose weights will be loaded; reuse ``runner`` if its layers match, else release it.

    With weights shared over the model, and in some families, a stage's module depends on which layers it holds.
    """
    if runner.stage == stage:
        return runner
    theirs, own = (stage_layers(config.model, config.pipeline.stages, s) for s in (runner.stage, stage))
    fixed = config.model.one_array or not family(config.model).interchangeable
    if fixed or (runner.stage == 0) != (stage == 0) or len(theirs) != len(own):
        runner.release()
        return new_runner(config, stage, initialise=False)
    runner.stage = stage
    return runner
