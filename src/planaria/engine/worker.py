"""A worker process of the fleet: waits as a spare, becomes any stage, carries out its part of every plan."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from planaria import decisions as d
from planaria import events as e
from planaria.checkpoint.stage_file import read_stage, write_stage
from planaria.checkpoint.store import CheckpointStore
from planaria.config import PipelineConfig
from planaria.data.shards import Dataset
from planaria.data.stream import Stream
from planaria.engine.batches import batches
from planaria.engine.desk import Desk, Interrupted
from planaria.engine.links import Links
from planaria.engine.mail import Mail
from planaria.engine.packing import pack_donor, unpack_donor
from planaria.engine.runner import NonFinite, StageRunner
from planaria.engine.setup import Setup
from planaria.engine.sleeper import SleepingRunner
from planaria.errors import UserError
from planaria.plan.actions import Action, Key, Plan, Route
from planaria.plan.build import plan_for
from planaria.recovery import recovery
from planaria.routing import routing
from planaria.transport.edge import Arrived, Broken, Opened
from planaria.transport.wire import Content, Header, WireError


def main(setup: Setup, connection: Connection, worker: str, incarnation: int) -> None:
    """Entry point of a worker process; returns never."""
    _settle(setup, worker)
    Worker(setup, connection, worker, incarnation).run()


def _settle(setup: Setup, worker: str) -> None:
    """Die with the parent, leave Ctrl-C to the controller, write to a log of one's own."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = setup.folder / "workers" / f"{worker}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)


class Worker:
    """One worker process. Everything but frames and heartbeats happens on its main thread."""

    def __init__(self, setup: Setup, connection: Connection, worker: str, incarnation: int) -> None:
        self.setup, self.config = setup, setup.config
        self.worker, self.incarnation = worker, incarnation
        self.desk = Desk(connection, setup.config.fleet.heartbeat_s)
        self.links = Links(setup, self.desk.inbox)
        model, pipeline = self.config.model, self.config.pipeline
        self.mail = Mail((pipeline.microbatch_size, model.context, model.dim))
        self.stage, self.generation, self.step = -1, 0, 0
        self.runner = self._warm_up()
        self.received: dict[int, Tensor] = {}
        self._streams: dict[str, Stream] = {}
        self._sent_before: dict[int, int] = {}

    def run(self) -> None:
        """Report in, then follow orders until told to leave."""
        self.desk.open()
        self.desk.report(e.WorkerJoined(worker=self.worker, incarnation=self.incarnation, pid=os.getpid()))
        order: d.Order | None = None
        while True:
            try:
                if order is None:
                    self._handle(self.desk.next())
                else:
                    order, now = None, order
                    self._obey(now)
            except Interrupted as interrupted:
                order = interrupted.order
            except (NonFinite, UserError, OSError) as error:
                self.desk.report(
                    e.WorkerFailed(
                        worker=self.worker, stage=self.stage, generation=self.generation, detail=_describe(error)
                    )
                )

    def _handle(self, item: Any) -> None:
        """Whatever comes in while the worker has nothing to do, or waits."""
        match item:
            case d.RunStep() | d.Commit():
                self._obey(item)
            case Arrived(edge=edge, header=header, payload=payload):
                if header.content is Content.STATE:
                    self.received[edge.spec.peer] = payload
                    return
                try:
                    self.mail.put(header, payload)
                except WireError as error:
                    self._report_broken(edge.spec.peer, str(error))
            case Opened(edge=edge):
                self.links.opened.add(edge)
            case Broken(edge=edge, detail=detail):
                self._report_broken(edge.spec.peer, detail)

    def _obey(self, order: d.Order) -> None:
        match order:
            case d.Form():
                self._form(order)
            case d.RunStep() if order.generation == self.generation:
                self._run_step(order)
            case d.Commit() if order.generation == self.generation:
                self._commit(order)
            case d.Save():
                self._save(order)
            case d.Leave():
                os._exit(0)

    # ---- a new generation

    def _form(self, form: d.Form) -> None:
        """Drop what is under way, take the stage and edges that ``form`` gives, and report when all is in place."""
        start = time.monotonic()
        me = next(m for m in form.members if m.worker == self.worker)
        self.runner.drop()
        self.received.clear()
        self.stage, self.generation, self.step = me.stage, form.generation, form.step
        self.mail.turn(form.generation, form.step)
        self.links.form(form, me.stage, self._state_bytes())
        for member in form.members:
            if isinstance(member.source, d.Rebuild) and me.stage in member.source.donors:
                self._donate(member.stage)
        timings = self._take_state(me.source)
        self._wait_for(lambda: not self.links.unopened, "the edge to stage {}", lambda: self.links.unopened)
        self.desk.report(
            e.Linked(
                worker=self.worker, stage=me.stage, generation=form.generation,
                link_s=time.monotonic() - start - sum(timings[k] for k in ("transfer_s", "rebuild_s")), **timings,
            )  # fmt: skip
        )

    def _take_state(self, source: d.Source) -> dict[str, Any]:
        """Become the stage: from the seed, from disk, from donors, or as it is."""
        start = time.monotonic()
        match source:
            case d.Fresh():
                self.runner = self._new_runner(self.stage, initialise=True)
            case d.Load(folder=folder):
                self._become()
                self.runner.load(read_stage(self.setup.checkpoints / folder, self.stage))
            case d.Rebuild(donors=donors):
                self._become()
                missing = lambda: [s for s in donors if s not in self.received]  # noqa: E731
                self._wait_for(lambda: not missing(), "the state of stage {}", missing)
                arrived = time.monotonic()
                strategy = recovery(self.config.recovery)
                given = {s: unpack_donor(self.received[s], self.runner.parameters) for s in donors}
                size = sum(flat.nbytes for flat in self.received.values())
                self.runner.reborn(strategy.rebuild(self.stage, given), strategy.lr_scale)
                self.received.clear()
                self.links.end_transfers()
                end = time.monotonic()
                return {"transfer_s": arrived - start, "transfer_bytes": size, "rebuild_s": end - arrived}
        return {"transfer_s": 0.0, "transfer_bytes": 0, "rebuild_s": time.monotonic() - start}

    def _donate(self, lost: int) -> None:
        flat = pack_donor(self.runner.donor())
        header = Header(Content.STATE, self.generation, self.step, 0, 0, flat.dtype, tuple(flat.shape), time.monotonic())
        self.links.transfers[lost].send(header, flat)

    def _become(self) -> None:
        """Have a runner for this stage whose weights are about to be loaded; spares keep a block stage ready."""
        if (self.runner.stage == 0) == (self.stage == 0):
            self.runner.stage = self.stage
        else:
            self.runner = self._new_runner(self.stage, initialise=False)

    def _new_runner(self, stage: int, initialise: bool) -> StageRunner:
        return (SleepingRunner if self.config.network.emulate else StageRunner)(self.config, stage, initialise)

    def _warm_up(self) -> StageRunner:
        """A block stage that has seen one pass and one update: first calls are slow, and a rebirth should not pay."""
        runner = self._new_runner(1, initialise=True)
        x = torch.zeros(self.mail._shape)
        runner.begin(None, train=True, microbatches=1)
        runner.forward(0, 1, x)
        runner.backward(0, 1, x)
        runner.finish()
        runner.commit(0)
        return runner

    # ---- a step

    def _run_step(self, order: d.RunStep) -> None:
        """Carry out this stage's actions of the step's plan, then report the gradient ready."""
        self.links.end_transfers()
        self.step = order.step
        self.mail.turn(self.generation, order.step)
        train = order.mode == "train"
        plan = self._plan(order)
        batch = self._batch(order) if self.stage == 0 else None
        self.runner.begin(batch, train, len(plan.routes))
        spans: list[e.Span] = []
        todo, done = list(plan.actions[self.stage]), set[Key]()
        try:
            while todo:
                action = self._first_ready(todo, done)
                spans.append(self._act(action))
                done.add(action.key)
                todo.remove(action)
            norm = self.runner.finish()
        except (Interrupted, NonFinite):
            self._report_work(spans, dropped=True)
            raise
        ready = e.StageReady(
            worker=self.worker, stage=self.stage, generation=self.generation, step=order.step,
            loss=self.runner.loss, grad_norm=norm,
        )  # fmt: skip
        self.desk.report(ready)
        self._report_work(spans, dropped=False)

    def _first_ready(self, todo: list[Action], done: set[Key]) -> Action:
        """The most preferred action whose input is here, waiting for one if need be."""
        while not self.desk.inbox.empty():
            self._handle(self.desk.next())
        found: list[Action] = []

        def ready() -> bool:
            found[:] = [a for a in todo if self.mail.has(a) and done.issuperset(a.after)][:1]
            return bool(found)

        def blocking() -> list[int]:
            return [a.source for a in todo if a.source is not None and done.issuperset(a.after)][:1]

        self._wait_for(ready, f"{todo[0].kind} of microbatch {todo[0].microbatch} from stage {{}}", blocking)
        return found[0]

    def _act(self, action: Action) -> e.Span:
        start = time.monotonic()
        work = self.runner.forward if action.kind == "forward" else self.runner.backward
        out = work(action.microbatch, action.hop, self.mail.take(action))
        if action.target is not None:
            assert out is not None
            content = Content.FORWARD if action.kind == "forward" else Content.BACKWARD
            header = Header(
                content, self.generation, self.step, action.microbatch, action.hop, out.dtype, tuple(out.shape),
                time.monotonic(),
            )  # fmt: skip
            self.links.edges[action.target].send(header, out.cpu())
        return e.Span(
            action=action.kind, microbatch=action.microbatch, hop=action.hop, start=start, end=time.monotonic()
        )

    def _commit(self, order: d.Commit) -> None:
        start = time.monotonic()
        self.runner.commit(order.step)
        committed = e.StageCommitted(
            worker=self.worker, stage=self.stage, generation=self.generation, step=order.step
        )
        self.desk.report(committed)
        self._report_work([e.Span(action="optimizer", start=start, end=time.monotonic())], dropped=False)

    def _save(self, order: d.Save) -> None:
        self.runner.drop()
        folder = CheckpointStore(self.setup.checkpoints).unfinished(order.step)
        size = write_stage(folder, self.stage, order.step, self.runner.state())
        self.desk.report(
            e.StageSaved(
                worker=self.worker, stage=self.stage, generation=order.generation, step=order.step, bytes=size
            )
        )

    # ---- waiting and telling

    def _wait_for(self, condition: Any, what: str, peers: Any) -> None:
        """Handle what comes in until ``condition``; a wait that is too long is reported once, naming whom it is for."""
        deadline: float | None = time.monotonic() + self.config.fleet.timeout_s
        while not condition():
            item = self.desk.next(deadline)
            if item is not None:
                self._handle(item)
            elif peers():
                peer, deadline = peers()[0], None
                waited = f"waited {self.config.fleet.timeout_s:g} s for {what.format(peer)}"
                self._report_broken(peer, waited)

    def _report_broken(self, peer: int, detail: str) -> None:
        place = f"at step {self.step}, generation {self.generation}"
        detail = f"worker {self.worker} (stage {self.stage}) and stage {peer}: {detail} {place}"
        self.desk.report(
            e.EdgeBroken(
                worker=self.worker, stage=self.stage, peer_stage=peer, generation=self.generation, detail=detail
            )
        )

    def _report_work(self, spans: list[e.Span], dropped: bool) -> None:
        total = {peer: edge.sent_bytes for peer, edge in self.links.edges.items()}
        sent = {peer: size - self._sent_before.get(peer, 0) for peer, size in total.items()}
        self._sent_before = total
        self.desk.report(
            e.Worked(
                worker=self.worker, stage=self.stage, generation=self.generation, step=self.step, dropped=dropped,
                spans=spans, sent_bytes=sent,
            )  # fmt: skip
        )

    # ---- what the recipe says

    def _plan(self, order: d.RunStep) -> Plan:
        pipeline = self.config.pipeline
        if order.mode == "evaluate":
            routes = routing("full")(pipeline.stages, self.config.train.eval_microbatches, order.step)
        else:
            routes = routing(pipeline.routing)(pipeline.stages, pipeline.microbatches, order.step)
        return _cached_plan(pipeline, tuple(routes), order.mode == "train")

    def _batch(self, order: d.RunStep) -> Any:
        split = "train" if order.mode == "train" else "validation"
        if split not in self._streams:
            dataset = Dataset.open(self.setup.dataset)
            self._streams[split] = Stream(dataset, split, self.config.model.context, self.config.seed)
        first = order.step * self.config.pipeline.samples if order.mode == "train" else 0
        return batches(self._streams[split], first, self.config.pipeline.microbatch_size)

    def _state_bytes(self) -> int:
        return sum(p.nbytes for p in self.runner.parameters.values())


@lru_cache(maxsize=64)
def _cached_plan(pipeline: PipelineConfig, routes: tuple[Route, ...], backward: bool) -> Plan:
    return plan_for(pipeline, routes, backward)


def _describe(error: Exception) -> str:
    return str(error).splitlines()[0][:400] if str(error) else type(error).__name__
