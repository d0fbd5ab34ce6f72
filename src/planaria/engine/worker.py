"""A worker process of the fleet: waits as a spare, becomes any stage, follows the controller's orders."""

from __future__ import annotations

import os
import time
from typing import NoReturn

import torch

from planaria.checkpoint.stage_file import write_stage
from planaria.checkpoint.store import CheckpointStore
from planaria.data.shards import Dataset, Split
from planaria.data.stream import Stream
from planaria.engine.afflictions import afflictions
from planaria.engine.batches import Batch, batches
from planaria.engine.blows import SIGNALS, Blows
from planaria.engine.copies import Keeping
from planaria.engine.desk import Desk, Interrupted
from planaria.engine.itinerary import Itinerary
from planaria.engine.perform import perform
from planaria.engine.post import Post
from planaria.engine.runner import NonFinite
from planaria.engine.setup import Setup
from planaria.engine.sleeper import SleepingRunner, new_runner, straggling
from planaria.engine.takeover import donate, take_state, warm_runner
from planaria.errors import UserError
from planaria.fleet.base import ControlLine
from planaria.fleet.switchboard import WorkerLine
from planaria.model.packing import pack
from planaria.plan.actions import Plan
from planaria.record import decisions as d
from planaria.record import events as e
from planaria.transport.port import Port


def main(setup: Setup, connection: ControlLine, worker: str, incarnation: int) -> NoReturn:
    """Entry point of a worker process."""
    _settle(setup, worker)
    Worker(setup, connection, worker).run(incarnation)


def _settle(setup: Setup, worker: str) -> None:
    """Write to a log of one's own; compute with one thread: workers share the machine's cores."""
    log = setup.folder / "workers" / f"{worker}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # a full disk: the run lacks nothing without it
        handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)


class Worker:
    """One worker process. Everything but frames and heartbeats happens on its main thread."""

    def __init__(self, setup: Setup, connection: ControlLine, worker: str) -> None:
        self.setup, self.config, self.worker = setup, setup.config, worker
        self.desk = Desk(connection, setup.config.fleet.heartbeat_s)
        self.itinerary = Itinerary(self.config)
        self.port = Port(connection.own_address if isinstance(connection, WorkerLine) else setup.host, setup.key)
        self.post = Post(setup, self.itinerary, worker, self.desk, self.port)
        self.post.lend = self._lend
        self.desk.blows = Blows(self._struck)
        self.desk.blows.effects = afflictions(self.post.links, self.post.circle)
        began = time.monotonic()
        self.runner = warm_runner(setup.config)
        self.post.patience.warm_s = time.monotonic() - began
        self.keeping: Keeping | None = None
        """from the moment on that this worker has a stage"""
        self._detour: list[list[int]] = []
        self._streams: dict[Split, Stream] = {}

    def run(self, incarnation: int) -> NoReturn:
        """Report in, then follow orders until told to leave."""
        self.desk.open()
        pid, at = os.getpid(), self.port.address
        self.desk.report(e.WorkerJoined(worker=self.worker, incarnation=incarnation, pid=pid, at=at))
        order: d.Order | None = None
        while True:
            try:
                now, order = order, None
                self.desk.at("orders")
                self._take(self.desk.next() if now is None else now)
            except Interrupted as interrupted:
                order = interrupted.order
            except (NonFinite, UserError, OSError, MemoryError, torch.OutOfMemoryError) as error:
                self._report_failure(error)

    def _take(self, item: object) -> None:
        if isinstance(item, d.Form | d.RunStep | d.Commit | d.Meet | d.Settle | d.Save | d.Disband | d.Leave):
            self._obey(item)
        else:
            self.post.hear(item)

    def _obey(self, order: d.Order) -> None:
        match order:
            case d.Form():
                self._form(order)
            case d.RunStep() if order.generation == self.post.generation:
                self._run_step(order)
            case d.Commit() if order.generation == self.post.generation:
                self._commit(order)
            case d.Meet() if self.post.is_ours(order):
                self.post.meet(order, self.runner)
            case d.Settle() if self.post.is_ours(order):
                self._settle(order)
            case d.Save():
                self._save(order)
            case d.Disband():
                self._drop()
                self.post.leave()
            case d.Leave():
                os._exit(0)  # nothing that threads still do is worth waiting for

    def _form(self, form: d.Form) -> None:
        """Drop what is under way, take the stage and edges that ``form`` gives, and report when all is in place."""
        start = time.monotonic()
        self.desk.at("link", form.step)
        me = next(member for member in form.members if member.worker == self.worker)
        self._drop()
        self._detour = form.routes
        self.post.move(me.node, form)
        # A donor may be new in its stage itself; donors are never rebuilt, so this waits for nobody.
        self.runner, timing = take_state(self.setup, self.post, me.source, self.runner, form.rounds)
        if self.keeping is None or not isinstance(me.source, d.Keep):
            self.keeping = Keeping(self.config, me.node, self.itinerary.column(form.replica), new_runner)
        if isinstance(self.runner, SleepingRunner):
            self.runner.stand_at(self.itinerary.place(me.node), self.itinerary.prices)
        reborn = {m.node for m in form.members if not isinstance(m.source, d.Keep)}
        self.keeping.formed(reborn, self.post.absent)
        donate(self.config, self.post, form, self.runner, self.keeping)
        links = self.post.links
        self.post.wait_for(lambda: not links.unopened, "the edge to {}", lambda: links.unopened)
        linked = e.Linked(
            worker=self.worker,
            node=me.node,
            stage=me.stage,
            generation=form.generation,
            link_s=time.monotonic() - start - timing.transfer_s - timing.rebuild_s,
            transfer_s=timing.transfer_s,
            transfer_bytes=timing.transfer_bytes,
            rebuild_s=timing.rebuild_s,
        )
        self.desk.report(linked)

    def _run_step(self, order: d.RunStep) -> None:
        """Carry out this node's actions of the step's plan, then report the gradient ready."""
        self.desk.at("step", order.step)
        began = time.monotonic()
        self.post.links.end_transfers()
        self.post.advance(order.step)
        plan = self._plan(order)
        self.post.patience.expect(sum(map(len, plan.actions.values())))
        if order.mode == "train" and self.desk.blows is not None:
            self.desk.blows.aim(plan.actions.get(self.post.node, ()))
        batch = self._batch(order) if self.post.stage == 0 else None
        if isinstance(self.runner, SleepingRunner):
            self.runner.slow_down(straggling(self.config, self.post.replica, self.post.circle.rounds))
        self.runner.begin(batch, order.mode == "train", len(plan.routes))
        spans: list[e.Span] = []
        try:
            norm = (self._train if order.mode == "train" else self._validate)(plan, spans)
        except (Interrupted, NonFinite):
            self.post.report_work(spans, dropped=True)
            raise
        ready = e.StageReady(
            worker=self.worker,
            stage=self.post.stage,
            generation=self.post.generation,
            step=order.step,
            loss=self.runner.loss,
            replica=self.post.replica,
            grad_norm=norm,
        )
        self.desk.report(ready)
        self.post.patience.learn(time.monotonic() - began)
        self.post.report_work(spans)

    def _train(self, plan: Plan, spans: list[e.Span]) -> float | None:
        """This stage's part of a step and of what is kept for others; the gradient's norm."""
        step, keeping = self.post.step, self.keeping
        assert keeping is not None
        for parcel in keeping.before(step, self.runner):
            self.post.send_parcel(*parcel)
        perform(plan, self.post, self.runner, spans, keeping.passed)
        self._agree(spans)
        norm = self.runner.finish()
        for parcel in keeping.after(step, self.runner):
            self.post.send_parcel(*parcel)
        self.post.take_parcels(keeping)
        return norm

    def _agree(self, spans: list[e.Span]) -> None:
        """The nodes of a stage add up what they have of its gradient: at the first, in the order of nodes."""
        first, *others = self.post.there.peers(self.post.node)
        if not others:
            return
        self.desk.at("exchange", self.post.step)
        start, own = time.monotonic(), self.runner.share()
        if self.post.node == first:
            for share in self.post.take_shares(others, own):
                own += share
            for node in others:
                self.post.send_share(node, own)
        else:
            self.post.send_share(first, own)
            (own,) = self.post.take_shares([first], own)
        self.runner.absorb(own)
        spans.append(e.Span(action="exchange", start=start, end=time.monotonic()))

    def _validate(self, plan: Plan, spans: list[e.Span]) -> float | None:
        perform(plan, self.post, self.runner, spans)
        return self.runner.finish()

    def _drop(self) -> None:
        """Forget the step under way."""
        self.runner.drop()
        if self.keeping is not None:
            self.keeping.drop()

    def _commit(self, order: d.Commit) -> None:
        self.desk.at("commit", order.step)
        start = time.monotonic()
        assert self.keeping is not None
        self.runner.commit(order.progress)
        self.keeping.commit(order.step)
        committed = e.StageCommitted(
            worker=self.worker, stage=self.post.stage, generation=self.post.generation, step=order.step
        )
        self.desk.report(committed)
        self.post.report_work([e.Span(action="optimizer", start=start, end=time.monotonic())])

    def _settle(self, order: d.Settle) -> None:
        """Go on with what a round of the exchange comes to."""
        self.desk.at("settle", self.post.step)
        start, post = time.monotonic(), self.post
        nodes = self.itinerary.arrangement.nodes(post.stage)
        peers = {replica: nodes[replica] for replica in order.members if replica != post.replica}
        made = post.circle.settle(order.round, post.replica, peers, self.runner)
        post.links.part()
        report = e.RoundMade(
            worker=self.worker,
            node=post.node,
            stage=post.stage,
            generation=post.generation,
            round=order.round,
            blocking_bytes=made.blocking_bytes,
            prefetched_bytes=made.prefetched_bytes,
            apart=made.apart,
        )
        self.desk.report(report)
        self.post.report_work([e.Span(action="exchange", start=start, end=time.monotonic())])

    def _lend(self, order: d.Donate) -> None:
        """Give another replica, or a successor, a copy of this stage as it was after the last commit."""
        self.desk.at("give", self.post.step)
        succeeded, state = order.donor == d.BEFORE, self.runner.state()
        if not succeeded:  # a copy draws its own random numbers
            state = state.trained
        state.outer = self.post.circle.given(to_successor=succeeded)
        self.post.lend_state(order, pack(state))

    def _save(self, order: d.Save) -> None:
        self.desk.at("write", order.step)
        start = time.monotonic()
        self._drop()
        store, replicas = CheckpointStore(self.setup.checkpoints), self.itinerary.replicas
        folder = store.part(order.step, replicas, order.replica, order.generation)
        state = self.runner.state()
        if replicas > 1:
            state.outer = self.post.circle.outer
        who = {"worker": self.worker, "stage": self.post.stage, "generation": order.generation, "step": order.step}
        try:
            written = write_stage(folder, self.post.stage, order.step, state)
        except OSError as error:
            self.desk.report(e.SaveFailed.model_validate(who | {"detail": str(error)}))
        else:
            self.desk.report(e.StageSaved.model_validate(who | {"bytes": written.bytes, "sha256": written.sha256}))
        self.post.report_work([e.Span(action="save", start=start, end=time.monotonic())])

    def _struck(self, blow: d.Blow) -> None:
        struck = e.FaultInjected(
            worker=self.worker,
            node=self.post.node,
            signal=SIGNALS.get(blow.signal, blow.signal),
            step=self.post.step,
            moment=blow.moment,
            number=blow.number,
        )
        self.desk.report(struck)

    def _report_failure(self, error: Exception) -> None:
        detail = str(error).splitlines()[0][:400] if str(error) else type(error).__name__
        failed = e.WorkerFailed(
            worker=self.worker, stage=self.post.stage, generation=self.post.generation, detail=detail
        )
        self.desk.report(failed)

    def _plan(self, order: d.RunStep) -> Plan:
        if order.mode == "evaluate":
            return self.itinerary.validation(self.post.absent, self.post.replica)
        return self.itinerary.training(order.step, self.post.absent, self._detour, self.post.replica)

    def _batch(self, order: d.RunStep) -> Batch:
        split: Split = "train" if order.mode == "train" else "validation"
        if split not in self._streams:
            dataset = Dataset.open(self.setup.dataset)
            self._streams[split] = Stream(dataset, split, self.config.model.context, self.config.seed)
        first = order.block * self.itinerary.block if order.mode == "train" else 0
        return batches(self._streams[split], first, self.config.pipeline.microbatch_size)
