"""The ``fleet`` engine: real worker processes under one controller."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from planaria.config.schema import RunConfig
from planaria.control.controller import Controller
from planaria.control.decisions import Finish, Replan
from planaria.control.events import Replanned
from planaria.control.protocols import Observer
from planaria.control.relay_watch import RelayWatch
from planaria.control.saving import all_saved, unchanged
from planaria.data.shards import Data
from planaria.faults.injector import TraceChaos
from planaria.planner.problem import Problem, Solution
from planaria.planner.replan import measured, replan
from planaria.planner.schedule import Schedule
from planaria.runtime.engine import surveyor, worker
from planaria.runtime.engine.needs import needs, require_answers
from planaria.runtime.engine.one_process import of_one_process, one_process, whole
from planaria.runtime.engine.origin import START, Origin, run_started
from planaria.runtime.engine.prepare import Prepared
from planaria.runtime.engine.provision import settled
from planaria.runtime.engine.runs import SCHEDULE
from planaria.runtime.engine.setup import CHECKPOINTS, DATA, RUN, SETUP, Setup
from planaria.runtime.engine.snapshots import prepare_memory
from planaria.runtime.engine.stopping import stop_asked
from planaria.runtime.fleet.base import Elastic, Fleet, Ground, Work
from planaria.runtime.fleet.guests import OpenFleet, Told
from planaria.runtime.fleet.joining import kept_key
from planaria.runtime.fleet.local import ground
from planaria.runtime.transport.address import Reach
from planaria.runtime.transport.listener import no_answer
from planaria.runtime.transport.secure import new_key

PRELOAD = [worker.__name__, surveyor.__name__, "torch._dynamo"]
"""what workers are born with; an optimizer's first step would otherwise import torch._dynamo, a CPU-second in each"""


def train(
    prepared: Prepared, folder: Path, observer: Observer, origin: Origin = START, stop: Callable[[], bool] | None = None
) -> Finish:
    """Train with workers in processes, on a Ray cluster or in this process; return how the run ended.

    ``stop`` is asked again and again: when it says so, the run stops at a whole step, as after a signal.

    :raises UserError: when the port is taken or the cluster is not fit; no worker has started then.
    """
    inline = prepared.config.engine == "inline"
    if inline:
        prepared = prepared.with_config(of_one_process(prepared.config))
    config, resolved = prepared.config, prepared.run
    started = run_started(resolved, origin)
    planner = None if resolved.schedule is None else Replanner(resolved.schedule, config.seed)
    memory = prepare_memory(resolved, folder, started)
    with ExitStack() as ending:
        asked = ending.enter_context(stop_asked(stop))
        place: AbstractContextManager[Elastic] = (
            one_process(resolved, prepared.dataset, folder, started.offset, started.part)
            if inline
            else opened(config, prepared.dataset, folder, started.own_workers, started.offset, started.part)
        )
        fleet = ending.enter_context(place)
        chaos = TraceChaos(prepared.trace, fleet, folder / CHECKPOINTS, origin.next_fault)
        controller = Controller(config, started, fleet, folder, observer, chaos, planner, _relay_watch(config))
        finish = controller.run(asked)
        if inline:
            observer.on_worked(time.monotonic(), whole(controller.state.progress))
    saved = all_saved(controller.state) or unchanged(controller.state)
    if memory is not None and finish.outcome in ("finished", "stopped") and saved:
        memory.remove()
    return finish


def _relay_watch(config: RunConfig) -> RelayWatch | None:
    """Probes of the run's relays; None where it has none."""
    if not config.fleet.relays:
        return None
    relays = {name: relay.at for name, relay in config.fleet.relays.items()}
    watch = RelayWatch(relays, partial(no_answer, key=_key(config)))
    watch.start()
    return watch


@contextmanager
def opened(
    config: RunConfig, data: Data, folder: Path, workers: int, offset: int = 0, part: str = ""
) -> Iterator[OpenFleet]:
    """A run's fleet, with room for so many workers of its own; closed at the end.

    ``offset``: the first sample of block 0. ``part``: the name of this part of the run.

    :raises UserError: when the port is taken or the cluster is not fit.
    """
    with ground(config.fleet, workers) as place:
        reach = Reach(advertise=config.fleet.advertise, ports=config.fleet.ports)
        key, sign = _key(config), secrets.token_hex(16)
        require_answers(config.fleet, key)
        setup = Setup(config, folder, data.folder, place.host, key, offset, reach, part=part, sign=sign)
        with closing(_open(place, setup, data.folders, workers)) as fleet:
            yield fleet


def _key(config: RunConfig) -> bytes:
    """The run's key: that of the file which the recipe names, or a new one.

    :raises UserError: when the file cannot be read or made, or holds no key.
    """
    return new_key() if config.fleet.key is None else kept_key(Path(config.fleet.key), new_key())


def _open(place: Ground, setup: Setup, data: Sequence[Path], workers: int) -> OpenFleet:
    """The fleet of a place with so many workers, and a door in the run's folder for machines that join.

    ``data``: the folders of the prepared data.
    """
    config = setup.config
    theirs = replace(setup, folder=setup.folder.absolute(), dataset=setup.dataset.absolute())
    files = {f"{RUN}/{SCHEDULE}": setup.folder / SCHEDULE, CHECKPOINTS: setup.checkpoints}
    files |= {f"{DATA}/{part.name}": part for part in data}

    def home(relay: str) -> Fleet:
        entry = partial(worker.main, replace(setup, reach=replace(setup.reach, relay=relay)))
        settle = partial(settled, theirs, Path.cwd(), None, print)  # no relay: a cluster's nodes all reach each other
        return place.fleet(Work(entry, PRELOAD, workers, settle, files, setup.key, needs(config)))

    plain = SETUP.dump_json(replace(theirs, reach=Reach())).decode()
    told = Told(plain, config.pipeline.stages + 1, setup.sign, files)
    return OpenFleet(home, config.fleet, place.host, setup.key, told, setup.folder)


class Replanner:
    """Answers :class:`Replan` with :class:`Replanned`, one after the other."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        """Begins to warm up: what is compiled on first use takes seconds that a broken run does not have."""
        self._asked: SimpleQueue[Replan] = SimpleQueue()
        self._found: SimpleQueue[Replanned | BaseException] = SimpleQueue()
        self._problem, self._solution, self._seed = schedule.problem, schedule.solution, seed
        threading.Thread(target=self._work, name="replanner", daemon=True).start()

    def ask(self, request: Replan) -> None:
        self._asked.put(request)

    def answer(self) -> Replanned | None:
        """An answer that is ready and was not given yet; raises what went wrong while it was looked for."""
        try:
            found = self._found.get_nowait()
        except Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        try:
            _plan(self._problem, self._solution, list(range(self._problem.nodes)), self._seed)
            while True:
                asked = self._asked.get()
                problem = measured(self._problem, {(way.source, way.target): way.seconds for way in asked.ways})
                self._found.put(_plan(problem, self._solution, asked.nodes, self._seed))
        except BaseException as error:  # a thread's death would leave the run waiting for ever
            self._found.put(error)


def _plan(problem: Problem, solution: Solution, nodes: list[int], seed: int) -> Replanned:
    began = time.monotonic()
    found, step_s, before_s = replan(problem, solution, nodes, seed)
    return Replanned(
        nodes=nodes,
        routes=[list(route) for route in found.routes],
        step_s=step_s,
        before_s=before_s,
        seconds=time.monotonic() - began,
    )
