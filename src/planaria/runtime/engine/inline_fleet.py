"""Runs in one process: the fleet's workers as greenlets, led by the fleet's controller."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Empty
from typing import NoReturn

import torch
from greenlet import GreenletExit

from planaria.common import logs
from planaria.common.memory_pool import keep_freed_memory
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import ORDER, InjectFault
from planaria.data.shards import Data
from planaria.exchange.coded.coded_worker import coded_steps
from planaria.faults.trace import CORRUPT_UPDATE, FATAL, LAGGING
from planaria.runtime.fleet.cooperative import CooperativeFleet, InProcessWorker
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.local import LocalTransport, Rendezvous
from planaria.runtime.worker.control_link import ControlLink
from planaria.runtime.worker.measurements import peaks
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.setup import Setup
from planaria.runtime.worker.sleeping_runner import new_runner
from planaria.runtime.worker.worker import Worker


def inline_config(config: RunConfig) -> RunConfig:
    """Return ``config`` with settings disabled that need several processes: spares, diagnosis, relays, emulated links,
    background saves."""
    fleet: dict[str, object] = {"spares": 0, "local_workers": None, "diagnose": "off", "replace": True, "relays": {}}
    return config.model_copy(
        update={
            "fleet": config.fleet.model_copy(update=fleet),
            "network": config.network.model_copy(update={"emulate": False}),
            "checkpoint": config.checkpoint.model_copy(update={"background": False}),
        }
    )


@contextmanager
def inline_fleet(
    run: ResolvedRun, data: Data, folder: Path, offset: int = 0, part: str = ""
) -> Iterator[CooperativeFleet]:
    """Yield a fleet of workers in this process, and set torch to one thread meanwhile.

    ``offset``: number of the first sample of block 0. ``part``: name of this part of the run.
    """
    setup, rendezvous = Setup(run.config, folder, data.folder, "", offset=offset, part=part), Rendezvous()
    last_runners: dict[int, StageRunner] = {}

    def work(slot: InProcessWorker) -> None:
        first = new_runner(run.config, 1, initialise=False)
        control_link = InProcessControlLink(slot, run)
        worker = Worker(
            setup, run, slot.worker, control_link, LocalTransport(rendezvous, slot.inbox), first, last_runners
        )
        try:
            with logs.add_context(worker.log_fields):
                worker.run(slot.incarnation)
        finally:
            rendezvous.leave(slot.inbox)
            worker.close()
            if run.recovery.control_strategy and worker.assignment.node >= 0:
                if control_link.doing == "commit":  # the other workers apply this step
                    worker.runner.commit(worker.assignment.step)
                worker.runner.drop()
                last_runners[worker.assignment.node] = worker.runner

    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # two OpenMP threads beside one busy process are many times slower
    try:
        with closing(CooperativeFleet(work)) as fleet:
            yield fleet
    finally:
        torch.set_num_threads(before)


def peak_report(step: int) -> e.WorkReport:
    """Return a report of this process's peak memory until ``step``."""
    return e.WorkReport(
        worker="inline", node=-1, stage=-1, generation=0, step=step, spans=[], sent_bytes={}, **peaks()._asdict()
    )


class InProcessControlLink(ControlLink):
    """The control channel of a worker that shares its process.

    The injected faults ``stop`` and ``stuck`` kill the worker, like ``kill``. ``slow`` makes it run after all others
    for one step, in runs whose steps do not wait for late replicas. Byzantine workers behave as on a fleet. Other
    faults are ignored.
    """

    reports_timings = False
    """timings in a shared process do not describe one worker"""

    def __init__(self, slot: InProcessWorker, run: ResolvedRun) -> None:
        super().__init__(slot, math.inf, inbox=slot.inbox)
        self._slot, self._skips_late = slot, coded_steps(run) is not None
        self._slowed: InjectFault | None = None
        self.doing = "orders"

    def open(self) -> None:
        self._slot.accept = self._receive

    def _receive(self, text: bytes) -> None:
        order = ORDER.validate_json(text)
        if isinstance(order, InjectFault):
            self._inject(order)
            return
        if isinstance(order, d.RunStep | d.Commit):
            self._slot.late, self._slowed = self._slowed is not None, None
        self.accept(order)

    def _inject(self, injection: InjectFault) -> None:
        if injection.signal in FATAL:
            self.accept(injection.model_copy(update={"signal": "kill"}))
        elif injection.signal == CORRUPT_UPDATE:
            self.accept(injection)
        elif injection.signal in LAGGING and self._skips_late:
            self._slowed = injection
            self.on_fault(injection.signal, injection)

    def set_activity(self, doing: str, step: int = -1, microbatch: int = -1, hop: int = -1) -> None:
        """Record the current action, and inject a fault that is scheduled for it."""
        self.doing = doing
        if self.faults is not None:
            self.faults.set_activity(doing, microbatch, hop)

    def _await(self, deadline: float | None) -> object:
        try:
            return self.inbox.get(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            return None

    def leave(self, code: int = 0) -> NoReturn:
        raise GreenletExit

    def end(self, number: object) -> None:
        self._slot.reason = "killed"
        raise GreenletExit
