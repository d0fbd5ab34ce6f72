"""Train a prepared run: open its fleet, and let its controller lead it to the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from planaria.common.errors import RunStopped
from planaria.config.schema import RunConfig
from planaria.control.checkpoint_decisions import all_saved, nothing_to_save
from planaria.control.facts.decisions import Finish
from planaria.control.failover import FailoverState
from planaria.control.protocols import Observer
from planaria.faults.injector import TraceInjector
from planaria.runtime.controller.controller import Controller
from planaria.runtime.controller.relay_watch import RelayWatch
from planaria.runtime.engine.inline_fleet import inline_config, inline_fleet, peak_report
from planaria.runtime.engine.replanner import Replanner
from planaria.runtime.engine.run_fleet import FleetRequest, open_fleet, run_key
from planaria.runtime.engine.stopping import stop_requested
from planaria.runtime.fleet.base import Elastic
from planaria.runtime.fleet.joinable_fleet import JoinableFleet
from planaria.runtime.prediction.memory import predicted_bytes
from planaria.runtime.preparation.prepare import PreparedRun
from planaria.runtime.preparation.run_start import START, Origin, run_started
from planaria.runtime.preparation.snapshot_recall import prepare_memory
from planaria.runtime.transport.listener import no_answer
from planaria.runtime.worker.setup import CHECKPOINTS
from planaria.runtime.worker.snapshots import memory_of


def train_prepared(
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
        started = failover.state.started
    planner = None if resolved.schedule is None else Replanner(resolved.schedule, config.seed)
    memory = prepare_memory(resolved, folder, started) if failover is None else memory_of(resolved, folder)
    with ExitStack() as ending:
        requested = ending.enter_context(stop_requested(stop))
        fleet: Elastic
        if inline:
            fleet = ending.enter_context(inline_fleet(resolved, prepared.dataset, folder, started.offset, started.part))
        else:
            request = FleetRequest(
                config, prepared.dataset, folder, started.own_workers, started.offset, started.part, failover, progress
            )
            fleet = ending.enter_context(open_fleet(request))
        if listening is not None and isinstance(fleet, JoinableFleet):
            listening(fleet.address)
        next_fault = origin.next_fault if failover is None else failover.state.progress + 1
        injector = TraceInjector(prepared.trace, fleet, folder / CHECKPOINTS, next_fault)
        relays = _relay_watch(config)
        controller = Controller(config, started, fleet, folder, observer, injector, planner, relays, failover)
        if config.fleet.shared_log is not None and isinstance(fleet, JoinableFleet):
            observer.when_lost(fleet.abandon)
        finish = _run_controller(controller, fleet, config, requested)
        if inline:
            observer.on_worked(time.monotonic(), peak_report(controller.state.progress))
    saved = all_saved(controller.state) or nothing_to_save(controller.state)
    if memory is not None and finish.outcome in ("finished", "stopped") and saved:
        memory.remove()
    return finish


def _run_controller(controller: Controller, fleet: Elastic, config: RunConfig, requested: Callable[[], str]) -> Finish:
    """Run the controller to the end; if another one takes over, leave it the machines that joined."""
    try:
        return controller.run(requested)
    except RunStopped:
        if config.fleet.shared_log is not None and isinstance(fleet, JoinableFleet):
            fleet.abandon()
        raise


def _relay_watch(config: RunConfig) -> RelayWatch | None:
    """Start the probes of the run's relays; return None if it has none."""
    if not config.fleet.relays:
        return None
    relays = {name: relay.at for name, relay in config.fleet.relays.items()}
    watch = RelayWatch(relays, partial(no_answer, key=run_key(config)))
    watch.start()
    return watch
