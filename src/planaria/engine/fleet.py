"""The ``fleet`` engine: real worker processes under one controller."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from planaria.chaos.trace import Trace
from planaria.config import RunConfig
from planaria.control.controller import Controller, Observer
from planaria.decisions import Finish
from planaria.engine import worker
from planaria.engine.chaos import TraceChaos
from planaria.engine.itinerary import Itinerary
from planaria.engine.origin import START, Origin, run_started
from planaria.engine.replanner import Replanner
from planaria.engine.setup import Setup
from planaria.engine.stopping import stop_signals
from planaria.fleet.local import LocalFleet
from planaria.plan.check import require
from planaria.transport.rendezvous import Rendezvous

PRELOAD = [worker.__name__, "torch._dynamo"]
"""what workers are born with; an optimizer's first step would otherwise import torch._dynamo, a CPU-second in each"""


def train(
    config: RunConfig,
    folder: Path,
    dataset: Path,
    observer: Observer,
    trace: Trace,
    origin: Origin = START,
) -> Finish:
    """Train on a fleet of local processes until the run is over; how it ended.

    :raises UserError: when the plan is not sound or the rendezvous port is taken; no worker has started then.
    """
    itinerary = Itinerary(config)
    require(itinerary.training(0))
    rendezvous = Rendezvous(config.fleet.host, config.fleet.port)
    setup = Setup(config, folder, dataset, rendezvous.host, rendezvous.port)
    fleet = LocalFleet(partial(worker.main, setup), PRELOAD, config.fleet.heartbeat_s, config.fleet.missed)
    started = run_started(itinerary, origin)
    planner = None if itinerary.schedule is None else Replanner(itinerary.schedule, config.seed)
    chaos = TraceChaos(trace, fleet, origin.next_fault)
    controller = Controller(config, started, fleet, folder, observer, chaos, planner)
    try:
        with stop_signals() as asked:
            return controller.run(lambda: asked[0] if asked else "")
    finally:
        fleet.close()
        rendezvous.close()
