"""A worker, in a separate process (``process.py``) or its controller's: waits as a spare, takes over any stage, follows
orders."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.registry import blame
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import Donate, ExitWorker, InjectFault, Order
from planaria.exchange.base import UpdateWeights
from planaria.exchange.coded.coded_worker import coded_steps
from planaria.pipeline.plan.actions import StepPlan
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.custom_classes import custom_classes
from planaria.runtime.fleet.devices import VISIBLE
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.edge import SocketTransport, Transport
from planaria.runtime.worker.assignment import Assignment, RepeatedOrders
from planaria.runtime.worker.checkpoint_writer import CheckpointPart, Saver, StageFiles, keeps_for, selected_part
from planaria.runtime.worker.control_link import ControlLink, Superseded
from planaria.runtime.worker.exchange_round import SettledRound
from planaria.runtime.worker.lockstep_rounds import LockstepRounds, rounds_by
from planaria.runtime.worker.measurements import WorkerGauge, peaks
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.plan_execution import combine_gradients, execute_plan
from planaria.runtime.worker.recovery_copies import CopyMessageId, StageCopies
from planaria.runtime.worker.runner import NonFinite, StageRunner
from planaria.runtime.worker.setup import Setup
from planaria.runtime.worker.sleeping_runner import SleepingRunner, device_memory, new_runner
from planaria.runtime.worker.snapshots import snapshot_writer
from planaria.runtime.worker.step_samples import RunSamples, StepData, StepInputs
from planaria.runtime.worker.step_work import OwnLoop, StepWork
from planaria.runtime.worker.takeover import MemoryDamaged, StageTakeover, describe_source, donate, transfer

if TYPE_CHECKING:
    from planaria.faults.worker_faults import WorkerFaults

log = logging.getLogger(__name__)


class Worker:
    """One worker. In its own process, orders and passes run on the main thread; frames, heartbeats, background writes,
    checksums and copies from a device have threads of their own."""

    def __init__(
        self,
        setup: Setup,
        resolved: ResolvedRun,
        worker: str,
        control_link: ControlLink,
        transport: Transport,
        runner: StageRunner,
        last_runners: Mapping[int, StageRunner] | None = None,
        loop: OwnLoop | None = None,
    ) -> None:
        """``runner``: used until the worker is assigned a stage. ``last_runners``: node → runner of its last worker,
        for controls such as the oracle. ``loop``: of a process whose owner computes the steps."""
        self.setup, self.config = setup, setup.config
        self.resolved = resolved
        self.control_link = control_link
        self.transport = transport
        self.runner = runner
        self._last_runners = {} if last_runners is None else last_runners
        self.assignment = Assignment(worker, resolved, control_link.report)
        self.messages = PeerMessages(setup, resolved, self.assignment, control_link, transport, self._follow_at_once)
        self._repeated = RepeatedOrders(self.assignment)
        self.messages.on_repeated = self._repeated.answer
        self.control_link.injector = self._injector
        self.control_link.on_fault = self._report_fault
        self._samples = loop or RunSamples(setup, resolved, control_link.reading)
        self._make_runner = new_runner if loop is None else loop.make_runner
        self.copies: StageCopies | None = None
        """None until this worker has a stage"""
        self.snapshots = snapshot_writer(setup, resolved)
        self.gauge = WorkerGauge()
        self._saver = Saver(control_link, StageFiles(setup, worker))
        self._loop, self._ahead_s = loop, 0.0
        self.step_work: StepWork | None = loop or coded_steps(resolved)
        self._lockstep = LockstepRounds(resolved) if resolved.lockstep else None
        self._scheduled_routes: list[list[int]] = []

    def log_fields(self) -> Mapping[str, object]:
        """Return the run and the current assignment, as context of log messages."""
        return {"run": self.config.name} | self.assignment.log_fields()

    def run(self, incarnation: int, layer_s: float = 0.0) -> NoReturn:
        """Report to the controller and follow its orders until it exits. ``layer_s``: measured seconds per layer."""
        self.control_link.open()
        device = os.environ.get(VISIBLE, "") if self.config.train.device == "cuda" else ""
        at, memory = self.transport.address, device_memory(self.config)
        self.assignment.report(
            e.WorkerJoined,
            incarnation=incarnation, pid=os.getpid(), at=at, device=device, memory=memory, layer_s=layer_s,
        )  # fmt: skip
        log.info("started as incarnation %d (pid %d), listening at %s", incarnation, os.getpid(), at)
        order: Order | None = None
        while True:
            try:
                now, order = order, None
                self.control_link.set_activity("orders")
                self._follow(self.control_link.next() if now is None else now)
            except Superseded as interrupted:
                order = interrupted.order
                log.debug("interrupted by the order %s", order.kind)
            except MemoryDamaged as damaged:  # the stage counts as lost
                self._fail(str(damaged), leaves=True)
                self.control_link.leave(1)
            except (NonFinite, UserError, OSError, MemoryError, torch.OutOfMemoryError) as error:
                self._fail(str(error).splitlines()[0] if str(error) else type(error).__name__)
            except (Exception, SystemExit) as error:
                detail = blame(error, custom_classes(self.config))
                self._fail(detail or repr(error), leaves=not detail)
                if not detail:
                    raise

    def _fail(self, detail: str, leaves: bool = False) -> None:
        """Report that this worker cannot follow an order; ``leaves``: it exits."""
        log.info("failed: %s", detail, exc_info=log.isEnabledFor(logging.DEBUG))
        self.assignment.report(e.WorkerFailed, detail=detail[:400], leaves=leaves)

    def follow_controller(self, address: str) -> None:
        """Fetch files from, and relay edges over, the controller that leads now, at HOST:PORT."""
        if self.setup.files:
            self.setup = replace(self.setup, files=address)
            self._saver.use(StageFiles(self.setup, self.assignment.worker))
        if isinstance(self.transport, SocketTransport):
            self.transport.use_relay(address)
        log.info("the controller at %s leads now", address)

    def close(self) -> None:
        """Stop background threads."""
        if self.snapshots is not None:
            self.snapshots.close()

    def _follow(self, item: object) -> None:
        """Follow an order, or process another item of the inbox."""
        match item:
            case d.Form():
                self._form(item)
            case d.RunStep() if item.generation == self.assignment.generation:
                self._run_step(item)
            case d.LeaveOut() if item.generation == self.assignment.generation:
                self._drop_step()
            case d.Commit() | d.Settle() if self._repeated.is_done(item):
                self._repeated.answer(item)
            case d.Commit() if item.generation == self.assignment.generation:
                self._commit(item)
            case d.Settle() if self.assignment.is_ours(item):
                self._settle(item)
            case d.Save() if item.generation == self.assignment.generation:
                self._save(item)
            case d.Disband():
                self._drop_step()
                self.messages.unassign()
            case ExitWorker():
                self.control_link.leave()
            case _:
                self.messages.handle(item)

    def _form(self, form: d.Form) -> None:
        """Drop the current step, take the stage and edges of ``form``, and report when all are ready."""
        start = time.monotonic()
        self.control_link.set_activity("link", form.step)
        me = next(member for member in form.members if member.worker == self.assignment.worker)
        self._drop_step()
        before = self.assignment.absent
        self._scheduled_routes = form.routes
        self.messages.assign(me.node, form)
        takeover = StageTakeover(
            self.setup, self.resolved, self.messages, self.runner, self.copies, self._rounds_at(form),
            lost_runner=self._last_runners.get(me.node), make_runner=self._make_runner,
        )  # fmt: skip
        # A donor may itself be new in its stage; donors are never rebuilt, so this cannot deadlock.
        taken = takeover.take(me.source)
        self.runner, timing = taken.runner, taken.timing
        if not isinstance(me.source, d.Keep):
            self.gauge.drop()
        rebuilt = {m.node for m in form.members if isinstance(m.source, d.Rebuild)}
        changed = self.resolved.replicas_per_plan > 1 and before != self.assignment.absent
        if changed or rebuilt & {*self.assignment.present.peers(me.node)}:
            self.messages.round_member.outer.after_member_change()
        self.copies = takeover.form_copies(form, me, taken)
        if isinstance(self.runner, SleepingRunner):
            self.runner.use_prices(self.resolved.price_index(me.node), self.resolved.prices)
        if form.is_rollback and self.snapshots is not None:
            self.snapshots.write_again()
        donate(self.resolved, self.messages, form, self.runner, self.copies)
        edges = self.messages.edges
        self.messages.wait_for(lambda: edges.unopened, "the edge to {}")
        link_s = time.monotonic() - start - timing.transfer_s - timing.rebuild_s
        self.assignment.report(e.Linked, link_s=link_s, **asdict(timing))
        formed = form.generation, form.outcome, describe_source(me.source), timing, link_s
        log.info("formed generation %d (%s), state: %s; %s, edges %.3f s", *formed)

    def _rounds_at(self, form: d.Form) -> int:
        if self.resolved.replicas_per_plan == 1:
            return form.rounds
        return rounds_by(self.resolved.exchange, form.step) if self._lockstep else form.step

    def _run_step(self, order: d.RunStep) -> None:
        """Carry out this node's actions of the step's plan, then report that the gradient is ready."""
        self.control_link.set_activity("step", order.step)
        began, self._ahead_s = time.monotonic() - self._ahead_s, 0.0
        self.messages.edges.end_transfers()
        self.messages.advance(order.step)
        plan, train, me = self._plan_of(order), order.mode == "train", self.assignment
        self.messages.round_member.outer.left_out = order.left_out
        self.messages.wait_timeout.expect(sum(map(len, plan.actions.values())))
        faults = self.control_link.faults
        if train and faults is not None:
            faults.start_step(plan.actions.get(me.node, ()))
        data = self._samples.samples_of(order, me.stage, None if faults is None else faults.wrap_batches)
        self._emulate_delay(0)
        if not (train and self.step_work):
            microbatches = len(plan.routes) // (self.resolved.replicas_per_plan if train else 1)
            target_counts = data.target_counts
            if train and target_counts is not None:
                target_counts = target_counts.at(me.node, plan, me.present, self.resolved.lockstep)
            step = StepInputs(
                data.batch, train, microbatches, data.masks,
                target_counts=target_counts, lengths=data.lengths, first_sample=data.first_sample,
            )  # fmt: skip
            self.runner.begin(step)
        if self.copies is not None:
            self.copies.begin(data)
        spans: list[e.Span] = []
        try:
            norm = self._train(plan, data, spans) if train else self._validate(plan, spans)
        except (Superseded, NonFinite):
            self._report_work(spans, dropped=True)
            raise
        received = self.messages.round_member.outer.received if train else {}
        self.assignment.report(e.StageReady, mode=order.mode, loss=self.runner.loss, grad_norm=norm, received=received)
        self.messages.wait_timeout.learn(time.monotonic() - began)
        log.debug("ready to commit after %.3f s (%s)", time.monotonic() - began, order.mode)
        self._report_work(spans)
        if train and self.config.fleet.diagnose != "off":
            self._measure(time.monotonic() - began, spans)

    def _measure(self, seconds: float, spans: Iterable[e.Span]) -> None:
        arrived = self.messages.edges.newly_arrived()
        waited, read = self.messages.waited, self.control_link.reading.step_s
        if measured := self.gauge.add_step(self.assignment.step, seconds, spans, waited, arrived, read):
            self.assignment.report(e.WorkerMeasurements, **measured)

    def _emulate_delay(self, round: int) -> None:
        """Apply the emulated slowdown drawn for this node's replica in a round of a step."""
        if not isinstance(self.runner, SleepingRunner):
            return
        replica, number = self.assignment.replica, self.messages.round_member.rounds
        if self.resolved.replicas_per_plan > 1:
            replica = self.assignment.number
            number = self.assignment.step * (self.step_work.rounds if self.step_work else 1) + round
        self.runner.draw_slowdown(replica, number)

    def _train(self, plan: StepPlan, data: StepData, spans: list[e.Span]) -> float | None:
        """Run this stage's part of a training step and send its copies; return the gradient's norm."""
        step, copies = self.assignment.step, self.copies
        assert copies is not None
        self._send_copies(copies.messages_before_step(step, self.runner), spans)
        if self.step_work is not None:
            self.step_work.run(self.messages, self.runner, data, spans, self._emulate_delay)
        else:
            execute_plan(plan, self.messages, self.runner, spans, copies.observe_forward)
            combine_gradients(self.config, self.messages, self.runner, spans)
        norm = self.runner.finish()
        self._send_copies(copies.messages_after_gradient(step, self.runner), spans)
        self.messages.receive_copies(copies)
        if self._lockstep is not None:
            self._lockstep.run(self.messages, self.runner)
        return norm

    def _send_copies(self, messages: Iterable[tuple[int, CopyMessageId, Tensor]], spans: list[e.Span]) -> None:
        start, any_sent = time.monotonic(), False
        for message in messages:
            self.messages.send_copy(*message)
            any_sent = True
        if any_sent:
            spans.append(e.Span(action="copy", start=start, end=time.monotonic()))

    def _validate(self, plan: StepPlan, spans: list[e.Span]) -> float | None:
        execute_plan(plan, self.messages, self.runner, spans)
        return self.runner.finish()

    def _drop_step(self) -> None:
        self._ahead_s = 0.0
        self.runner.drop()
        self.messages.round_member.outer.drop()
        if self.copies is not None:
            self.copies.drop()

    def _commit(self, order: d.Commit) -> None:
        self.control_link.set_activity("commit", order.step)
        start = time.monotonic()
        assert self.copies is not None
        self.runner.commit(order.progress)
        self.copies.commit(order.step)
        first = self.assignment.node == min(self.assignment.present.peers(self.assignment.node))
        self.messages.report(self.messages.round_member.outer.commit(), order.step, first)
        if self._lockstep is not None and (settled := self._lockstep.take_settled()) is not None:
            self._report_round(*settled, first)
        idle = self.control_link.inbox.empty()  # before the report, which the order of the next step answers
        self._repeated.report_commit(order)
        log.debug("committed")
        if self.snapshots is not None:
            self.snapshots.write_new(self.copies, order.generation)
        self._report_work([e.Span(action="optimizer", start=start, end=time.monotonic())])
        if self._loop is not None and order.next_block is not None and idle:
            self.control_link.set_activity("step", order.step + 1)
            began = time.monotonic()
            self._loop.compute_ahead(order.next_block)
            self._ahead_s = time.monotonic() - began

    def _settle(self, order: d.Settle) -> None:
        """Apply the result of an exchange round."""
        self.control_link.set_activity("settle", self.assignment.step)
        start, replica = time.monotonic(), self.assignment.replica
        nodes = self.resolved.arrangement.nodes(self.assignment.stage)
        members = order.contributors or order.members
        peers = {member: nodes[member] for member in members if member != replica}
        weighed = UpdateWeights(order.counted[replica], lambda: order.rivals) if replica in order.counted else None
        settled = self.messages.round_member.settle(
            order.round, replica, peers, self.runner, weighed, contributes=replica in members
        )
        self.messages.edges.close_round_edges()
        settled = replace(settled, report=replace(settled.report, rejected=order.left_out))
        self._report_round(order.round, settled, first=replica == members[0])
        self._report_work([e.Span(action="exchange", start=start, end=time.monotonic())])

    def _report_round(self, round: int, settled: SettledRound, first: bool) -> None:
        self.messages.report(settled.report, round, first)
        self._repeated.report_round(
            round=round,
            blocking_bytes=settled.blocking_bytes,
            prefetched_bytes=settled.prefetched_bytes,
            spread=settled.spread,
        )

    def _follow_at_once(self, order: Donate | d.BeginRound) -> None:
        """Follow an order that concerns the state of the last commit."""
        if isinstance(order, Donate):
            transfer(self.messages, order, self.runner)
        elif self.assignment.is_ours(order):
            self.messages.run_round(order, self.runner)

    def _save(self, order: d.Save) -> None:
        self._drop_step()
        assignment, store = self.assignment, CheckpointStore(self.setup.checkpoints)
        replica, replicas = order.replica, self.resolved.replicas
        if self._lockstep:
            replica, replicas = assignment.number, self.config.exchange.replicas
        folder = store.unsealed_replica_folder(order.step, replicas, replica, order.generation)
        state, keeps = self.runner.state(), keeps_for(order, assignment.node)
        if self.config.exchange.has_several_replicas:
            state.outer = self.messages.round_member.outer.settled.state()
        state = selected_part(state, keeps, assignment.node in order.compared)
        index = assignment.number if keeps == "outer" else 0
        part = CheckpointPart(
            folder, assignment.stage, assignment.worker, assignment.node, order.generation, order.step, index, keeps
        )
        log.info("saving %s for the checkpoint of step %d", keeps, order.step)
        span = (self._saver.save_in_background if order.background else self._saver.save)(part, state)
        self._report_work([span])

    def _injector(self) -> WorkerFaults:
        """Return the fault injector; ``faults/`` is imported only if this worker has faults."""
        from planaria.faults.worker_faults import WorkerFaults

        edges, outer = self.messages.edges, self.messages.round_member.outer
        return WorkerFaults(self.config, edges, outer, self._report_fault, self.control_link.end)

    def _report_fault(self, signal: str, injection: InjectFault) -> None:
        self.assignment.report(e.FaultInjected, signal=signal, moment=injection.moment, number=injection.number)

    def _report_work(self, spans: list[e.Span], dropped: bool = False) -> None:
        """Report the spans and bytes sent since the last report, and peak memory."""
        if not self.control_link.reports_timings:
            return
        sent_bytes = self.messages.edges.newly_sent()
        self.assignment.report(e.WorkReport, dropped=dropped, spans=spans, sent_bytes=sent_bytes, **peaks()._asdict())

    def _plan_of(self, order: d.RunStep) -> StepPlan:
        me = self.assignment
        if order.mode == "evaluate":
            return self.resolved.validation(me.absent, me.replica)
        if self.step_work is not None:
            return self.step_work.plan(order.step, me.number)
        return self.resolved.training(order.step, me.absent, self._scheduled_routes, me.replica)
