"""The controller's loop: receive events, update the state, decide, send orders; all side effects of control."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from planaria.common.atomic import write_error
from planaria.common.documents import first_error
from planaria.config.names import WorkerId
from planaria.config.schema import RunConfig
from planaria.control.apply import apply
from planaria.control.apply_base import mark_decided
from planaria.control.checkpoint_cadence import CheckpointCadence
from planaria.control.decide import decide
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import ExitWorker
from planaria.control.failover import FailoverState
from planaria.control.log.state_file import STATE, StateWriter
from planaria.control.machine_loss_costs import machine_loss_costs
from planaria.control.protocols import FaultSource, Observer, RoutePlanner
from planaria.control.run_deadlines import BrokenEdges, RunDeadlines
from planaria.control.state.run import RunState
from planaria.control.stop_reasons import underlying_error
from planaria.control.stuck_workers import ActionDeadlines
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.controller.executor import DecisionExecutor
from planaria.runtime.controller.fact_logging import log_fact
from planaria.runtime.controller.relay_watch import RelayWatch
from planaria.runtime.fleet.base import Elastic, FaultRequested, Joined, Leaving, Left, Notice, Reported, WorkerEnded
from planaria.runtime.transport.listener import unreachable

log = logging.getLogger(__name__)
PLANNING_S = 0.02
"""seconds between two checks for new routes"""


def _cadence_of(config: RunConfig, started: e.RunStarted) -> CheckpointCadence | None:
    """Return the chooser of the interval between checkpoints, or None if the recipe fixes it."""
    if config.checkpoint.every != "best":
        return None
    return CheckpointCadence(config.network.hourly_failure_probability, len(started.stage_of))


class Controller:
    """The single authority of a run."""

    def __init__(
        self,
        config: RunConfig,
        started: e.RunStarted,
        fleet: Elastic,
        folder: Path,
        observer: Observer,
        faults: FaultSource,
        planner: RoutePlanner | None = None,
        relays: RelayWatch | None = None,
        failover: FailoverState | None = None,
    ) -> None:
        """:param started: start of this part of the run.
        :param failover: continue a run whose controller was lost.
        :param planner: replans the routes of runs with a schedule when nodes are lost.
        :param relays: watches relays, if the run uses them.
        """
        self.state = RunState.start(started) if failover is None else failover.state
        self._failover = failover
        self._config = config
        self._fleet = fleet
        self._folder = folder
        self._observer = observer
        self._faults = faults
        self._planner = planner
        self._relays = relays
        self._executor = DecisionExecutor(config, fleet, CheckpointStore(folder / "checkpoints"))
        self._action_deadlines = ActionDeadlines(config)
        self._cadence = _cadence_of(config, started)
        self._ending: d.Finish | None = None
        self._broken_edges = BrokenEdges()
        self._run_deadlines = RunDeadlines(config)
        self._state_file = StateWriter(folder / STATE, lambda: time.monotonic())
        self._state_file_written = True
        """whether the last write of the state file succeeded"""
        self._replaced_reporters: set[WorkerId] = set()
        self._warned_machines: dict[str, str] = {}
        self._edge_errors: dict[str, str] = {}
        """worker → why one of its edges has not opened yet"""

    def run(self, stop_requested: Callable[[], str]) -> d.Finish:
        """Lead the run to its end and return how it ended.

        :param stop_requested: returns a reason once a stop is requested.
        """
        if self._failover is None:
            self._process_event(self.state.started)
        else:
            self._continue(self._failover)
        while not self.state.over:
            notices = self._fleet.poll(self._poll_timeout_s())
            self._observer.check()  # first: a process that was stopped sees silent workers
            for notice in notices:
                self._handle(notice)
            now = time.monotonic()
            self._faults.resume_due(now)
            if self._planner is not None and (answer := self._planner.answer()):
                self._process_event(answer)
            self._report_expired_waits(now)
            self._write_state()
            if not self.state.stopping and (reason := stop_requested() or self._observer.trouble):
                self._process_event(e.StopRequested(reason=reason, skip_repairs=True))
        self._write_state()
        assert self._ending is not None
        return self._ending

    def _continue(self, failover: FailoverState) -> None:
        """Lead a run whose controller was lost: log that, repeat its last orders, and decide what is due."""
        now = time.monotonic()
        started = e.LeaderStarted(
            term=failover.state.term + 1, pid=os.getpid(), cause=failover.cause, wall_time=time.time(),
            silent_s=max(0.0, now - failover.silent_since), lost_s=max(0.0, now - failover.noticed),
            has_checkpoint=failover.has_checkpoint, orders_lost=failover.orders_lost,
        )  # fmt: skip
        self._record(now, started)
        for replica in self.state.live.values():
            self._action_deadlines.record_order(now, replica.waiting)
        self._observer.secure()
        for decision in () if failover.orders_lost else failover.repeat:
            self._carry_out(decision)
        # All losses before the first decision: no order may go to a lost worker.
        for lost in self._lost_workers() if failover.orders_lost else self._lost_machines():
            self._record(now, lost)
        if failover.orders_lost:
            self._complete(failover.unfinished)
        self._decide_all([])

    def _complete(self, unfinished: Iterable[d.Commit | d.Settle]) -> None:
        """Send durable orders again to the living workers that may not have carried them out."""
        for order in unfinished:
            numbers = [order.replica] if isinstance(order, d.Commit) else order.members
            waiting = {worker for number in numbers for worker in self.state.replicas[number].waiting}
            self._executor.order(order, sorted(name for name in waiting if self.state.workers[name].status != "dead"))

    def _lost_machines(self) -> list[e.Event]:
        """Return the loss of all joined machines: their connections ended with the former controller; they rejoin."""
        detail = "its controller was lost"
        machines = [name for name, machine in self.state.machines.items() if machine.workers]
        lost = [(name, w.incarnation) for name, w in self.state.workers.items() if w.host and w.status != "dead"]
        return [
            *(e.HostLeft(host=name, detail=detail) for name in machines),
            *(e.WorkerLost(worker=w, incarnation=n, cause="controller", detail=detail) for w, n in lost),
        ]

    def _lost_workers(self) -> list[e.WorkerLost]:
        """Return the loss of the workers of the former controller's machine, and of those that had not started."""
        detail = "lost with the controller's machine"
        return [
            e.WorkerLost(worker=name, incarnation=worker.incarnation, cause="controller", detail=detail)
            for name, worker in self.state.workers.items()
            if worker.status == "starting" or (worker.status != "dead" and not worker.host)
        ]

    def _report_expired_waits(self, now: float) -> None:
        """Report waits that exceeded their deadlines."""
        for blamed in self._broken_edges.expired(now, self.state):
            self._process_event(blamed)
        for change in self._relays.changes(now, self.state.unreachable_relays) if self._relays is not None else ():
            self._process_event(change)
        for event in self._run_deadlines.expired(now, lambda: self.state):
            if isinstance(event, e.StopOverdue):
                error = underlying_error(self.state, self._edge_errors, unreachable)
                event = e.StopOverdue(detail=f"{event.detail} ({error})") if error else event
            self._process_event(event)

    def _poll_timeout_s(self) -> float:
        """Return the seconds until the next deadline."""
        due = [*self._run_deadlines.due, *self._broken_edges.due]
        if (resumption := self._faults.next_due()) is not None:
            due.append(resumption)
        until_due = min(due, default=math.inf) - time.monotonic()
        planning = any(replica.phase == "replan" for replica in self.state.replicas.values())
        longest = PLANNING_S if self._planner is not None and planning else self._config.fleet.heartbeat_s
        return min(max(0.0, until_due), longest)

    def _handle(self, notice: Notice) -> None:
        if isinstance(notice, Joined):
            self._process_event(e.HostJoined(host=notice.host, workers=notice.workers, detail=notice.detail))
            return
        if isinstance(notice, FaultRequested):
            self._faults.add(notice.fault)
            return
        if isinstance(notice, Left):
            self._process_event(e.HostLeft(host=notice.host, detail=notice.detail))
            return
        worker = self.state.workers.get(notice.worker)
        current = worker is not None and worker.incarnation == notice.incarnation and worker.status != "dead"
        if isinstance(notice, WorkerEnded):
            if current:
                lost = e.WorkerLost(
                    worker=notice.worker, incarnation=notice.incarnation, cause=notice.cause, detail=notice.detail
                )
                self._process_event(lost, notice.number)
        elif isinstance(notice, Leaving):
            leaving = e.WorkerLeaving(worker=notice.worker, incarnation=notice.incarnation, detail=notice.detail)
            self._process_event(leaving)
            if current and worker is not None and worker.status == "starting":  # it has nothing to hand over
                self._fleet.signal(notice.worker, notice.incarnation, signal.SIGKILL)
        elif current:
            try:
                report = e.REPORT.validate_json(notice.text)
            except ValidationError as error:
                self._kill_worker(notice, "connection", f"sent an invalid report ({first_error(error)})")
                return
            if isinstance(report, e.Heartbeat):
                self._process_heartbeat(notice, report)
            elif isinstance(report, e.WorkReport):
                self._action_deadlines.record_durations(report)
                self._observer.on_worked(time.monotonic(), report)
            else:
                self._process_event(report, notice.number)
        else:
            self._dismiss_replaced_worker(notice)

    def _process_heartbeat(self, report: Reported, beat: e.Heartbeat) -> None:
        """Process a heartbeat; a worker whose main thread is stuck is killed and counts as dead."""
        self._edge_errors[report.worker] = beat.trouble
        replica = self.state.replica_of(report.worker)
        awaited = frozenset() if replica is None else replica.waiting
        detail = self._action_deadlines.overdue_action_reason(time.monotonic(), report.worker, beat, awaited)
        detail = detail or self._action_deadlines.overdue_write_reason(report.worker, beat, self.state.writing.keys())
        if detail:
            self._kill_worker(report, "stuck", detail)

    def _kill_worker(self, report: Reported, cause: Literal["connection", "stuck"], detail: str) -> None:
        """Kill a worker with which the run cannot continue; it counts as dead."""
        self._fleet.signal(report.worker, report.incarnation, signal.SIGKILL)
        self._process_event(
            e.WorkerLost(worker=report.worker, incarnation=report.incarnation, cause=cause, detail=detail)
        )

    def _dismiss_replaced_worker(self, report: Reported) -> None:
        """Dismiss a worker that counts as dead and reported again; its stage has a new holder."""
        sender = WorkerId(report.worker, report.incarnation)
        self._fleet.send_to_incarnation(*sender, ExitWorker().model_dump_json().encode())
        if sender not in self._replaced_reporters:
            self._replaced_reporters.add(sender)
            kind = "an invalid report"
            with suppress(ValidationError):
                kind = e.REPORT.validate_json(report.text).kind
            self._process_event(e.ZombieIgnored(worker=report.worker, incarnation=report.incarnation, report=kind))

    def _process_event(self, event: e.Event, notice: int = 0) -> None:
        """Apply an event, then decide and carry out decisions until there are none.

        :param notice: number of the notice that reported it.
        """
        t = time.monotonic()
        self._record(t, event, notice)
        if isinstance(event, e.EdgeBroken):
            self._broken_edges.record(t, event, self.state)
        self._decide_all([*self._faults.on_event(t, event, self.state)])

    def _record(self, t: float, event: e.Event, notice: int = 0) -> None:
        """Log an event and apply it."""
        self._observer.on_event(t, event, notice)
        log_fact(log, event)
        self.state = apply(event, self.state)

    def _decide_all(self, further: list[e.Event]) -> None:
        """Decide and carry out decisions until there are none, then process ``further`` events."""
        chosen: e.IntervalChosen | None = None
        while (decision := decide(self.state)) is not None:
            t = time.monotonic()
            self.state = apply(decision, self.state)
            self._observer.on_decision(t, decision)
            log_fact(log, decision)
            if not isinstance(decision, d.RunStep):  # void unless it is committed
                self._observer.secure()
            further += self._faults.on_decision(decision, self.state)
            self._carry_out(decision)
            if isinstance(decision, d.Form) and self.state.machines:
                further += self._new_warnings()
            if self._cadence is not None:
                chosen = chosen or self._cadence.on_decision(time.monotonic(), decision)
        for next_event in [*further, *([chosen] if chosen else [])]:
            self._process_event(next_event)
        trouble = self._run_deadlines.update(time.monotonic(), self.state)
        self.state = mark_decided(self.state)
        self._run_deadlines.update_save_retry(time.monotonic(), self.state)
        if trouble is not None:
            self._process_event(trouble)
        self._write_state()

    def _new_warnings(self) -> list[e.Event]:
        """Return warnings about machines whose stages the others could not recover; one per machine and stages."""
        now = machine_loss_costs(self.state)
        new = [text for host, text in now.items() if self._warned_machines.get(host) != text]
        self._warned_machines = now
        return [e.Trouble(detail=text) for text in new]

    def _write_state(self) -> None:
        """Write the state file for other terminals; the run does not need it."""
        if self._state_file.due(self.state) > time.monotonic():
            return
        try:
            self._state_file.write(self.state)
        except OSError as error:
            if self._state_file_written:
                self._state_file_written = False
                self._process_event(e.Trouble(detail=write_error(self._folder / STATE, error)))
        else:
            self._state_file_written = True

    def _carry_out(self, decision: d.Decision) -> None:
        """Carry out a decision, and record when its results are due."""
        now = time.monotonic()
        match decision:
            case d.Form() | d.RunStep() | d.Commit() | d.Save():
                requested = self.state.replicas[decision.replica].waiting
                to_write = isinstance(decision, d.Save) and decision.background
                self._action_deadlines.record_order(now, requested, to_write)
            case d.Settle():
                for number in decision.members:
                    self._action_deadlines.record_order(now, self.state.replicas[number].holders.values())
            case d.Replan():
                assert self._planner is not None, "only runs with a schedule are planned again"
                self._planner.ask(decision)
            case d.Finish():
                self._ending = decision
        if (failed := self._executor.carry_out(decision, self.state)) is not None:
            self._process_event(failed)
