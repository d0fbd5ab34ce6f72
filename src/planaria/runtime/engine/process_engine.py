"""The ``fleet`` engine: worker processes under one controller. It also leads ``inline`` runs."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType

from planaria.common.errors import RunStopped
from planaria.common.logs import from_environment
from planaria.config.schema import RunConfig
from planaria.control.checkpoint_decisions import all_saved, nothing_to_save
from planaria.control.facts.decisions import Finish, Replan
from planaria.control.facts.events import Replanned
from planaria.control.failover import FailoverState
from planaria.control.protocols import Observer
from planaria.control.state.run import RunState
from planaria.data.shards import Data
from planaria.faults.injector import TraceChaos
from planaria.models.families import family
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.replan import replan, with_measured_links
from planaria.planner.schedule import Schedule
from planaria.runtime.controller.controller import Controller
from planaria.runtime.controller.relay_watch import RelayWatch
from planaria.runtime.engine import link_survey_node
from planaria.runtime.engine.inline_fleet import inline_config, inline_fleet, peak_report
from planaria.runtime.engine.prepare import PreparedRun
from planaria.runtime.engine.requirements import device_needs, require_answers
from planaria.runtime.engine.run_files import local_workplace
from planaria.runtime.engine.run_folders import SCHEDULE
from planaria.runtime.engine.run_start import START, Origin, run_started
from planaria.runtime.engine.snapshot_recall import prepare_memory
from planaria.runtime.engine.stopping import stop_requested
from planaria.runtime.fleet.base import Elastic, Fleet, FleetWork, WorkerHost
from planaria.runtime.fleet.joinable_fleet import JoinableFleet, JoinInfo
from planaria.runtime.fleet.joining import kept_key
from planaria.runtime.fleet.local import devices_here, worker_host
from planaria.runtime.fleet.supervised_fleet import SupervisedFleet, start_supervisor
from planaria.runtime.prediction.memory import predicted_bytes
from planaria.runtime.transport.address import Reach
from planaria.runtime.transport.listener import no_answer
from planaria.runtime.transport.secure import new_key
from planaria.runtime.worker import process
from planaria.runtime.worker.setup import CHECKPOINTS, DATA, RUN, SETUP, Setup
from planaria.runtime.worker.snapshots import memory_of

log = logging.getLogger(__name__)
RETURN_LEASES, MIN_RETURN_S = 3, 10.0
"""multiple of ``fleet.lease_s`` in which the machines of a lost controller return to the next one, and at least (s)"""
PRELOAD = [process.__name__, link_survey_node.__name__, "torch._dynamo"]
"""modules that workers are forked with; an optimizer's first step would import torch._dynamo, a CPU-second in each"""


def preload_for(config: RunConfig) -> list[str]:
    """Return the modules that a run's workers are forked with."""
    return [*PRELOAD, *family(config.model).modules_to_preload]


def train(
    prepared: PreparedRun,
    folder: Path,
    observer: Observer,
    origin: Origin = START,
    stop: Callable[[], bool] | None = None,
    failover: FailoverState | None = None,
    listening: Callable[[str], object] | None = None,
    progress: bool = False,
) -> Finish:
    """Train with workers in processes, on a Ray cluster or in this process; return how the run ended.

    :param stop: polled; the run stops after a whole step when it returns true
    :param failover: lead the living workers of a run whose controller was lost
    :param listening: called with the HOST:PORT that other machines join
    :param progress: whether a standby that leads the run shows its progress
    :raises UserError: if the port is taken or the cluster is unsuitable; then no worker was started.
    """
    inline = prepared.config.engine == "inline"
    if inline:
        prepared = prepared.with_config(inline_config(prepared.config))
    config, resolved = prepared.config, prepared.run
    if failover is None:
        started = run_started(resolved, origin).model_copy(update={"predicted_bytes": predicted_bytes(config)})
    else:
        started = failover.state.settings
    planner = None if resolved.schedule is None else Replanner(resolved.schedule, config.seed)
    memory = prepare_memory(resolved, folder, started) if failover is None else memory_of(resolved, folder)
    with ExitStack() as ending:
        requested = ending.enter_context(stop_requested(stop))
        place: AbstractContextManager[Elastic] = (
            inline_fleet(resolved, prepared.dataset, folder, started.offset, started.part)
            if inline
            else opened(
                config, prepared.dataset, folder, started.own_workers, started.offset, started.part, failover, progress
            )
        )
        fleet = ending.enter_context(place)
        if listening is not None and isinstance(fleet, JoinableFleet):
            listening(fleet.address)
        next_fault = origin.next_fault if failover is None else failover.state.progress + 1
        chaos = TraceChaos(prepared.trace, fleet, folder / CHECKPOINTS, next_fault)
        relays = _relay_watch(config)
        controller = Controller(config, started, fleet, folder, observer, chaos, planner, relays, failover)
        if config.fleet.shared_log is not None and isinstance(fleet, JoinableFleet):
            observer.when_lost(fleet.abandon)
        finish = _lead(controller, fleet, config, requested)
        if inline:
            observer.on_worked(time.monotonic(), peak_report(controller.state.progress))
    saved = all_saved(controller.state) or nothing_to_save(controller.state)
    if memory is not None and finish.outcome in ("finished", "stopped") and saved:
        memory.remove()
    return finish


def _lead(controller: Controller, fleet: Elastic, config: RunConfig, requested: Callable[[], str]) -> Finish:
    """Lead the run to its end; if another controller takes over, leave it the machines that joined."""
    try:
        return controller.run(requested)
    except RunStopped:
        if config.fleet.shared_log is not None and isinstance(fleet, JoinableFleet):
            fleet.abandon()
        raise


def _relay_watch(config: RunConfig) -> RelayWatch | None:
    """Start the probes of the run's relays; None if it has none."""
    if not config.fleet.relays:
        return None
    relays = {name: relay.at for name, relay in config.fleet.relays.items()}
    watch = RelayWatch(relays, partial(no_answer, key=_key(config)))
    watch.start()
    return watch


@contextmanager
def opened(
    config: RunConfig,
    data: Data,
    folder: Path,
    workers: int,
    offset: int = 0,
    part: str = "",
    failover: FailoverState | None = None,
    progress: bool = False,
) -> Iterator[JoinableFleet]:
    """Yield a run's fleet with room for ``workers`` own workers.

    :param offset: first sample of block 0
    :param part: name of this part of the run
    :param failover: lead workers that a supervisor owns, instead of starting some
    :param progress: whether standbys show the run's progress
    :raises UserError: if the port is taken or the cluster is unsuitable.
    """
    with worker_host(config.fleet, workers) as host:
        here = failover is not None and not failover.elsewhere
        kept = SupervisedFleet(folder, failover.state.term + 1, failover.notice) if failover and here else None
        reach = Reach(advertise=config.fleet.advertise, ports=config.fleet.ports)
        key, sign = (_key(config), secrets.token_hex(16)) if kept is None else _shared(kept.shared)
        require_answers(config.fleet, key)
        logs = from_environment()
        setup = Setup(config, folder, data.folder, host.host, key, offset, reach, part=part, sign=sign, log=logs)
        returning = returning_workers(failover.state) if failover is not None and failover.elsewhere else {}
        hosts = () if failover is None else failover.state.hosts
        first = 1 + max([len(hosts), *(int(host[1:]) for host in hosts if host[1:].isdigit())])
        with closing(_open(host, setup, data.folders, workers, kept, first, returning, progress)) as fleet:
            yield fleet


def returning_workers(state: RunState) -> dict[str, list[tuple[str, int]]]:
    """Return the joined machines → living workers (name, incarnation) that a new controller expects to return."""
    returning: dict[str, list[tuple[str, int]]] = {name: [] for name, host in state.hosts.items() if host.workers}
    for name, worker in state.workers.items():
        if worker.host and worker.status not in ("dead", "starting"):
            returning.setdefault(worker.host, []).append((name, worker.incarnation))
    return returning


def _shared(text: str) -> tuple[bytes, str]:
    """Return the run's key and sign, as an earlier controller has left them with the supervisor."""
    shared = json.loads(text)
    return bytes.fromhex(shared["key"]), shared["sign"]


def _key(config: RunConfig) -> bytes:
    """Return the run's key: from the file that the recipe names, or a new one.

    :raises UserError: if the file cannot be read or created, or has no key.
    """
    return new_key() if config.fleet.key is None else kept_key(Path(config.fleet.key), new_key())


def _open(
    host: WorkerHost,
    setup: Setup,
    data: Sequence[Path],
    workers: int,
    kept: SupervisedFleet | None = None,
    first: int = 1,
    returning: Mapping[str, Collection[tuple[str, int]]] = MappingProxyType({}),
    progress: bool = False,
) -> JoinableFleet:
    """Open a fleet and its entry file in the run's folder for machines that join; ``data``: folders of the prepared
    data; ``kept``: living workers of the run; ``first``: number of the first machine that joins; ``returning``: those
    of a controller that was lost with its machine; ``progress``: whether standbys show the run's progress.
    """
    config = setup.config
    remote = replace(setup, folder=setup.folder.absolute(), dataset=setup.dataset.absolute())
    files = {f"{RUN}/{SCHEDULE}": setup.folder / SCHEDULE, CHECKPOINTS: setup.checkpoints}
    files |= {f"{DATA}/{part.name}": part for part in data}

    def home(relay: str) -> Fleet:
        entry = partial(process.main, replace(setup, reach=replace(setup.reach, relay=relay)))
        # no relay: all nodes of a cluster reach each other
        prepare = partial(local_workplace, remote, Path.cwd(), None, _note)
        if kept is not None:
            return kept
        work = FleetWork(entry, preload_for(config), workers, prepare, files, setup.key, device_needs(config))
        if config.fleet.standby == "off":
            return host.fleet(work)
        shared = json.dumps({"key": setup.key.hex(), "sign": setup.sign})
        devices = devices_here(work.needs, work.workers).devices
        supervisor = start_supervisor(setup.folder, work, config.fleet, devices, shared, progress)
        return SupervisedFleet(setup.folder, term=1, child=supervisor)

    plain = SETUP.dump_json(replace(remote, reach=Reach())).decode()
    return_s = max(MIN_RETURN_S, RETURN_LEASES * config.fleet.lease_s)
    terms = JoinInfo(
        plain, config.pipeline.stages + 1, setup.sign, files, first, returning=returning, return_s=return_s
    )
    return JoinableFleet(home, config.fleet, host.host, setup.key, terms, setup.folder)


def _note(line: str) -> None:
    log.info("%s", line)


class Replanner:
    """Answers each :class:`Replan` with a :class:`Replanned`, in order."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        """Start the thread, which compiles the planner before its first request."""
        self._requests: SimpleQueue[Replan] = SimpleQueue()
        self._answers: SimpleQueue[Replanned | BaseException] = SimpleQueue()
        self._problem, self._solution = schedule.problem, schedule.solution
        self._seed = seed
        threading.Thread(target=self._work, name="replanner", daemon=True).start()

    def ask(self, request: Replan) -> None:
        self._requests.put(request)

    def answer(self) -> Replanned | None:
        """Return a finished answer, or None; raise the exception of a failed one."""
        try:
            answer = self._answers.get_nowait()
        except Empty:
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _work(self) -> None:
        try:
            _plan(self._problem, self._solution, list(range(self._problem.nodes)), self._seed)
            while True:
                request = self._requests.get()
                problem = with_measured_links(
                    self._problem, {(link.source, link.target): link.seconds for link in request.links}
                )
                self._answers.put(_plan(problem, self._solution, request.nodes, self._seed))
        except BaseException as error:  # otherwise the run would wait forever
            self._answers.put(error)


def _plan(problem: PlanningProblem, solution: Solution, nodes: list[int], seed: int) -> Replanned:
    began = time.monotonic()
    replanned, step_s, before_s = replan(problem, solution, nodes, seed)
    return Replanned(
        nodes=nodes,
        routes=[list(route) for route in replanned.routes],
        step_s=step_s,
        before_s=before_s,
        seconds=time.monotonic() - began,
    )
