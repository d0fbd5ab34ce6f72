"""Repeat a logged run in this process: carry out its decisions in the order of the log, and compare what workers
report."""

from __future__ import annotations

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
from planaria.faults.trace import CORRUPT_UPDATE, Trace
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.controller.executor import DecisionExecutor
from planaria.runtime.engine.inline_fleet import inline_config, inline_fleet
from planaria.runtime.fleet.base import Reported
from planaria.runtime.fleet.cooperative import CooperativeFleet
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.resumption import require_same_data
from planaria.runtime.worker.setup import CHECKPOINTS

StepKey = tuple[str, int, int, str]
"""worker, generation, step, mode"""


@dataclass
class Repetition:
    """Results of a repeated run."""

    compared: int = 0
    """number of compared reports"""
    differing: list[str] = field(default_factory=list)
    """descriptions of those with another loss or gradient norm"""

    def compare(self, logged: e.StageReady, repeated: e.StageReady | None) -> None:
        """Compare a logged report with the repeated one."""
        self.compared += 1
        results = [None if report is None else (report.loss, report.grad_norm) for report in (logged, repeated)]
        if results[0] != results[1]:
            where = f"replica {logged.replica}, stage {logged.stage}, step {logged.step} ({logged.mode})"
            self.differing.append(f"{where}: loss and gradient norm {results[0]}, repeated {results[1]}")


def repeat_run(config: RunConfig, history: Sequence[Timed], source: Path, scratch: Path) -> Repetition:
    """Repeat the last part of a run in this process, and compare the loss and gradient norm of each stage and step.

    Decisions are carried out in the order of the log, so each lost stage gets the state that its donor had at that
    point, and rounds have the same members. Results are bit-identical on the same machine and PyTorch, in fp32.

    :param history: the run's log.
    :param source: the run's folder, with the checkpoint that this part started from.
    :param scratch: an empty folder for checkpoints.
    :raises UserError: if the log cannot be repeated, or a worker fails.
    """
    starts = [(number, fact) for number, (_, fact) in enumerate(history) if isinstance(fact, e.RunStarted)]
    if not starts:
        raise UserError(f"{source}: the log has no start of a run, so it cannot be repeated; restore the log")
    number, started = starts[-1]
    if started.start_from_first_worker:
        raise UserError(f"{source}: a group cannot be repeated; its members compute the steps in their own programs")
    if started.snapshot_step >= 0:
        raise UserError(f"{source}: its last part started from a snapshot in memory, so it cannot be repeated")
    prepared = prepare(config, trace=Trace(faults=()), begins=False)
    require_same_data(source, prepared)
    prepared = prepared.with_config(inline_config(prepared.config))
    (scratch / CHECKPOINTS).mkdir(parents=True)
    for name in sorted({*started.checkpoint_of_stage.values()}):
        if not (source / CHECKPOINTS / name).is_dir():
            raise UserError(
                f"{source}: {CHECKPOINTS}/{name}, from which its last part started, was removed, so it cannot be "
                "repeated; keep more of the next run's checkpoints (checkpoint.keep)"
            )
        (scratch / CHECKPOINTS / name).symlink_to((source / CHECKPOINTS / name).absolute())
    with inline_fleet(prepared.run, prepared.dataset, scratch, started.offset, started.part) as fleet:
        executor = DecisionExecutor(prepared.config, fleet, CheckpointStore(scratch / CHECKPOINTS))
        return _follow(started, (fact for _, fact in islice(history, number + 1, None)), fleet, executor)


def _follow(
    started: e.RunStarted, facts: Iterable[e.Event | d.Decision], fleet: CooperativeFleet, executor: DecisionExecutor
) -> Repetition:
    """Carry out the decisions among ``facts``, each once all workers are idle."""
    state, result = RunState.start(started), Repetition()
    repeated: dict[StepKey, e.StageReady] = {}
    for fact in facts:
        _run_workers(fleet, repeated)
        match fact:
            case e.WorkerLost():
                fleet.signal(fact.worker, fact.incarnation, signal.SIGKILL)
            case e.StageReady():
                result.compare(fact, repeated.pop(_key(fact), None))
            case e.FaultInjected() if fact.signal == CORRUPT_UPDATE:
                raise UserError(f"the run had injected faults '{CORRUPT_UPDATE}', which are not repeated")
        state = apply(fact, state)
        if d.is_decision(fact):
            executor.carry_out(_in_one_process(fact), state)
    return result


def _run_workers(fleet: CooperativeFleet, repeated: dict[StepKey, e.StageReady]) -> None:
    """Run all workers until they are idle, and keep their reports of steps.

    :raises UserError: if a worker fails.
    """
    for notice in fleet.poll(0.0):
        if isinstance(notice, Reported):
            report = e.REPORT.validate_json(notice.text)
            if isinstance(report, e.StageReady):
                repeated[_key(report)] = report
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
