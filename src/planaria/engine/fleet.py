"""The ``fleet`` engine: real worker processes under one controller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from planaria.control.controller import Controller
from planaria.control.protocols import Observer
from planaria.engine import worker
from planaria.engine.injector import TraceChaos
from planaria.engine.itinerary import Itinerary
from planaria.engine.needs import needs
from planaria.engine.origin import START, Origin, run_started
from planaria.engine.outliving import prepare_memory
from planaria.engine.prepare import Prepared
from planaria.engine.replanner import Replanner
from planaria.engine.setup import SETUP, Setup
from planaria.engine.stopping import stop_asked
from planaria.fleet.ground import ground
from planaria.fleet.open import OpenFleet
from planaria.fleet.request import Ground, Work
from planaria.record.decisions import Finish
from planaria.transport.secure import new_key

PRELOAD = [worker.__name__, "torch._dynamo"]
"""what workers are born with; an optimizer's first step would otherwise import torch._dynamo, a CPU-second in each"""


def train(
    prepared: Prepared, folder: Path, observer: Observer, origin: Origin = START, stop: Callable[[], bool] | None = None
) -> Finish:
    """Train on a fleet of processes, here or on a Ray cluster, until the run is over; how it ended.

    ``stop`` is asked again and again: when it says so, the run stops at a whole step, as after a signal.

    :raises UserError: when the port is taken or the cluster is not fit; no worker has started then.
    """
    config, dataset = prepared.config, prepared.dataset.folder
    itinerary = Itinerary(config)
    started = run_started(itinerary, origin)
    planner = None if itinerary.schedule is None else Replanner(itinerary.schedule, config.seed)
    memory = prepare_memory(config, folder, started)
    with ExitStack() as ending:
        asked = ending.enter_context(stop_asked(stop))
        place = ending.enter_context(ground(config.fleet, started.own_workers))
        setup = Setup(config, folder, dataset, place.host, new_key(), started.offset)
        entry, folders = partial(worker.main, setup), (folder, dataset)
        work = Work(entry, PRELOAD, started.own_workers, folders, setup.key, needs(config))
        fleet = ending.enter_context(closing(_opened(place, work, setup)))
        chaos = TraceChaos(prepared.trace, fleet, setup.checkpoints, origin.next_fault)
        controller = Controller(config, started, fleet, folder, observer, chaos, planner)
        finish = controller.run(asked)
    if memory is not None and finish.outcome in ("finished", "stopped"):  # all is on disk
        memory.remove()
    return finish


def _opened(place: Ground, work: Work, setup: Setup) -> OpenFleet:
    """The fleet of a place, and a door in the run's folder for machines that join."""
    config = setup.config.fleet
    told = SETUP.dump_json(replace(setup, folder=setup.folder.absolute(), dataset=setup.dataset.absolute())).decode()
    return OpenFleet(place.fleet(work), config, place.host, setup.key, told, setup.folder)
