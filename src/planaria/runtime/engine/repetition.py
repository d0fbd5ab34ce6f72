"""Repeat a logged run in this process: carry out its decisions in the order of the log, and compare what workers
report."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import Timed
from planaria.control.state.run import RunState
from planaria.faults.injector import TraceInjector
from planaria.faults.trace import CORRUPT_UPDATE, Trace, read
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.controller.executor import DecisionExecutor
from planaria.runtime.engine.inline_fleet import inline_config, inline_fleet
from planaria.runtime.fleet.base import Reported
from planaria.runtime.fleet.cooperative import CooperativeFleet
from planaria.runtime.preparation.prepare import PreparedRun, prepare
from planaria.runtime.preparation.resumption import require_same_data
from planaria.runtime.preparation.run_folders import TRACE
from planaria.runtime.worker.setup import CHECKPOINTS

StepKey = tuple[str, int, int, str]
"""worker, generation, step, mode"""
Fact = e.Event | d.Decision
_NEVER = 1 << 40
"""a step that no run reaches"""


@dataclass
class Repetition:
    """Results of a repeated run, or of one part of it."""

    compared: int = 0
    """number of compared reports"""
    differing: list[str] = field(default_factory=list)
    """descriptions of those with another loss or gradient norm"""
    steps: list[str] = field(default_factory=list)
    """first and last step of each part that was repeated"""
    not_covered: list[str] = field(default_factory=list)
    """parts that were not repeated, with the reason"""

    def compare(self, logged: e.StageReady, repeated: e.StageReady | None) -> None:
        """Compare a logged report with the repeated one."""
        self.compared += 1
        results = [None if report is None else (report.loss, report.grad_norm) for report in (logged, repeated)]
        if results[0] != results[1]:
            where = f"replica {logged.replica}, stage {logged.stage}, step {logged.step} ({logged.mode})"
            self.differing.append(f"{where}: loss and gradient norm {results[0]}, repeated {results[1]}")


def repeat_run(config: RunConfig, history: Sequence[Timed], source: Path, scratch: Path) -> Repetition:
    """Repeat a run in this process, part by part, and compare the loss and gradient norm of each stage and step.

    Decisions are carried out in the order of the log, so each lost stage gets the state that its donor had at that
    point, and rounds have the same members. Results are bit-identical on the same machine and PyTorch, in fp32. The
    log lacks some settings that a resumption may change, such as the learning rate. An earlier part whose results
    differ is therefore not covered.

    :param history: the run's log.
    :param source: the run's folder, with the checkpoints from which its parts started.
    :param scratch: an empty folder for checkpoints.
    :raises UserError: if the last part cannot be repeated.
    """
    starts = [(number, fact) for number, (_, fact) in enumerate(history) if isinstance(fact, e.RunStarted)]
    if not starts:
        raise UserError(f"{source}: the log has no start of a run, so it cannot be repeated; restore the log")
    if starts[0][1].start_from_first_worker:
        raise UserError(f"{source}: a group cannot be repeated; its members compute the steps in their own programs")
    prepared = prepare(config, trace=Trace(faults=()), begins=False)
    require_same_data(source, prepared)
    (scratch / CHECKPOINTS).mkdir(parents=True)
    result = Repetition()
    for (number, started), end in zip(starts, [*(number for number, _ in starts[1:]), None], strict=True):
        facts = (fact for _, fact in islice(history, number + 1, end))
        try:
            part = _repeat_part(started, facts, prepared, source, scratch)
            if part.differing and end is not None:
                raise UserError(
                    f"{len(part.differing)} of {part.compared} results differ, as they do if the run was resumed with "
                    "other settings"
                )
        except UserError as error:
            if end is None:
                last = f"its last part cannot be repeated: part from step {started.first_step}: {error}"
                raise UserError("; ".join([f"{source}: {last}", *result.not_covered])) from None
            result.not_covered.append(f"part from step {started.first_step}: {error}")
            _discard(scratch / CHECKPOINTS)
        else:
            result.compared += part.compared
            result.differing += part.differing
            result.steps += part.steps
    return result


def _discard(checkpoints: Path) -> None:
    """Remove the checkpoints that a repetition wrote; links to the run's stay."""
    for each in checkpoints.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)


def _repeat_part(
    started: e.RunStarted, facts: Iterable[Fact], prepared: PreparedRun, source: Path, scratch: Path
) -> Repetition:
    """Repeat the part of a run that begins with ``started``, from checkpoints of ``source`` or of the parts before.

    :raises UserError: if it cannot be repeated, or a worker fails.
    """
    config = prepared.config
    train = config.train.model_copy(update={"steps": started.steps, "eval_every": started.eval_every})
    config = config.model_copy(update={"train": train, "exchange": started.exchange, "recovery": started.recovery})
    if started.snapshot_step >= 0:
        raise UserError("it started from a snapshot in memory")
    if (started.stages, started.samples_per_step) != (config.pipeline.stages, config.samples):
        raise UserError("its stages or samples per step differ from those of the last part")
    for name in sorted({*started.checkpoint_of_stage.values()}):
        if Path(name).name != name:
            raise UserError(f"its log names the checkpoint {name!r}, which is not in {CHECKPOINTS}/; restore the log")
        of_run, copy = source / CHECKPOINTS / name, scratch / CHECKPOINTS / name
        if of_run.is_dir() and not copy.is_symlink():
            shutil.rmtree(copy, ignore_errors=True)  # written by the repetition of an earlier part
            copy.symlink_to(of_run.absolute())
        elif not copy.exists():
            raise UserError(f"{CHECKPOINTS}/{name}, from which it started, was removed; raise checkpoint.keep")
    run = prepared.with_config(inline_config(config)).run
    with inline_fleet(run, prepared.dataset, scratch, started.offset, started.part) as fleet:
        trace = read(source / TRACE) if (source / TRACE).is_file() else Trace(faults=())
        repeater = _Repeater(started, run.config, fleet, scratch / CHECKPOINTS, trace)
        repeater.follow(facts)
        return repeater.result


class _Repeater:
    """Carries out the decisions of a part in one process, and compares what its workers report."""

    def __init__(
        self, started: e.RunStarted, config: RunConfig, fleet: CooperativeFleet, checkpoints: Path, trace: Trace
    ) -> None:
        self.result = Repetition()
        self._state, self._fleet = RunState.start(started), fleet
        self._executor = DecisionExecutor(config, fleet, CheckpointStore(checkpoints))
        # Other faults are in the log; they keep their numbers here, but are never due.
        faults = (f if f.signal == CORRUPT_UPDATE else f.model_copy(update={"step": _NEVER}) for f in trace.faults)
        self._injector = TraceInjector(Trace(faults=tuple(faults)), fleet, checkpoints, started.first_step)
        self._faults = len(trace.faults)
        self._repeated: dict[StepKey, e.StageReady] = {}

    def follow(self, facts: Iterable[Fact]) -> None:
        """Carry out the decisions among ``facts``, each once all workers are idle."""
        for fact in facts:
            self._run_workers()
            match fact:
                case e.WorkerLost():
                    self._fleet.signal(fact.worker, fact.incarnation, signal.SIGKILL)
                    self._injector.on_event(0.0, fact, self._state)
                case e.StageReady():
                    self.result.compare(fact, self._repeated.pop(_key(fact), None))
                case e.FaultInjected() if fact.signal == CORRUPT_UPDATE and not 0 <= fact.number < self._faults:
                    raise UserError(f"it had an injected fault '{CORRUPT_UPDATE}' that its {TRACE} lacks")
            self._state = apply(fact, self._state)
            if d.is_decision(fact):
                self._injector.on_decision(fact, self._state)
                self._executor.carry_out(_in_one_process(fact), self._state)
        first, after = self._state.started.first_step, self._state.progress
        self.result.steps += [f"{first}–{after - 1}"] if after > first else []

    def _run_workers(self) -> None:
        """Run all workers until they are idle, and keep their reports of steps.

        :raises UserError: if a worker fails.
        """
        for notice in self._fleet.poll(0.0):
            if isinstance(notice, Reported):
                report = e.REPORT.validate_json(notice.text)
                if isinstance(report, e.StageReady):
                    self._repeated[_key(report)] = report
                elif isinstance(report, e.FaultInjected):
                    self._injector.on_event(0.0, report, self._state)
                elif isinstance(report, e.WorkerFailed):
                    raise UserError(f"stage {report.stage}: {report.detail}")


def _in_one_process(decision: d.Decision) -> d.Decision:
    """Return the decision for workers of one process, which have no relays and write files at once."""
    if isinstance(decision, d.Save):
        return decision.model_copy(update={"background": False})
    if isinstance(decision, d.Form):
        return decision.model_copy(update={"links": [link.model_copy(update={"relay": ""}) for link in decision.links]})
    return decision


def _key(report: e.StageReady) -> StepKey:
    return report.worker, report.generation, report.step, report.mode
