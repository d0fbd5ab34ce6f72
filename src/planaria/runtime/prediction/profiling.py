"""``pipeline.layers = "auto"``: measure the machines before the run, and size the stages accordingly.

The run's fleet starts with one layer in each block stage, which fits on any of its machines. Each worker reports the
time of a layer and exits. Machines that joined reconnect for the run itself.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

from pydantic import ValidationError

from planaria.common.documents import first_error
from planaria.common.errors import RunStopped, UserError
from planaria.common.stdio import Notify
from planaria.config.schema import RunConfig
from planaria.control.facts.events import REPORT, WorkerFailed, WorkerJoined
from planaria.control.facts.orders import ExitWorker
from planaria.data.shards import Data, tokenise_corpus
from planaria.runtime.engine.run_fleet import FleetRequest, open_fleet
from planaria.runtime.engine.stopping import stop_requested
from planaria.runtime.fleet.base import Joined, Reported, WorkerEnded
from planaria.runtime.fleet.joinable_fleet import JoinableFleet
from planaria.runtime.prediction.layer_division import WorkerCapacity, divide
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.preparation.requirements import device_needs, layer_loads, smallest_layout, stage_work
from planaria.runtime.preparation.resumption import with_flags
from planaria.runtime.preparation.run_start import START, run_started
from planaria.runtime.resolved_run import ResolvedRun

Timed = tuple[str, WorkerJoined]
"""machine that joined, or "" for the controller's, and a worker's report from it"""


def with_measured_layers(
    config: RunConfig, data: Data, notify: Notify, stop: Callable[[], bool] | None = None
) -> RunConfig:
    """Return the recipe with measured numbers instead of ``pipeline.layers = "auto"``.

    In one process all stages are equally fast and get equal sizes, or nearly. ``stop`` is polled.

    :raises UserError: if the model does not fit on the machines.
    :raises RunStopped: if too few machines can be timed, or by a signal or ``stop``.
    """
    if config.pipeline.layers != "auto":
        return config
    if config.engine == "inline":
        return with_layers(config, config.model.block_layers)
    stages = config.pipeline.stages
    with stop_requested(stop) as requested:
        timed = _time_passes(config, data, notify, requested)
    layers = layer_loads(config)
    layer_counts = divide(layers, stages, stage_work(config)[0], worker_capacities(config, [*timed.values()]))
    pace = ", ".join(f"{name} {report.layer_s * 1e3:.3g}" for name, (_, report) in timed.items())
    notify(f"stages of {layer_counts} layers (pipeline.layers); a layer's milliseconds: {pace}")
    chosen = with_layers(config, tuple(layer_counts))
    notify(_least_time(chosen, [report.layer_s for _, report in timed.values()]))
    return chosen


def _least_time(config: RunConfig, layer_s: Sequence[float]) -> str:
    """Return a line about the run's shortest duration with workers of this pace, the fastest at the largest stages."""
    loads, pace = sorted(stage_work(config), reverse=True), sorted(layer_s)
    slowest = max(load * seconds for load, seconds in zip(loads, pace, strict=False))
    hours = config.train.steps * config.pipeline.microbatches * slowest / 3600
    return f"time          at least {hours:#.2g} h for {config.train.steps} steps, by the passes of the slowest stage"


def resumed_layers(
    folder: Path, changes: Mapping[str, object], notify: Notify, stop: Callable[[], bool] | None = None
) -> Mapping[str, object]:
    """Return the changed settings of a resumed run, with numbers instead of ``pipeline.layers = "auto"``.

    :raises UserError, RunStopped: as :func:`with_measured_layers`.
    """
    if changes.get("pipeline.layers") != "auto":
        return changes
    config = with_flags(run_folders.config_of(folder, *run_folders.RUN_FILES), changes, folder)
    check(config)
    measured = with_measured_layers(
        config, tokenise_corpus(config.data, config.model.vocab, context=config.model.context), notify, stop
    )
    return {**changes, "pipeline.layers": list(measured.pipeline.layers or ())}


def with_layers(config: RunConfig, layers: tuple[int, ...] | None) -> RunConfig:
    """Return the recipe with block stages of these sizes."""
    pipeline = config.pipeline.model_copy(update={"layers": layers})
    model = config.model.model_copy(update={"block_layers": layers})
    return config.model_copy(update={"pipeline": pipeline, "model": model})


def worker_capacities(config: RunConfig, timed: Sequence[Timed]) -> list[WorkerCapacity]:
    """Return the capacity of the timed workers; workers that share a device share its memory equally."""
    layers, stages = math.ceil(sum(load.size for load in layer_loads(config))), device_needs(config).stages
    if not stages:
        return [WorkerCapacity(report.layer_s, layers) for _, report in timed]
    ends, layer = stages[0], stages[1]  # of the recipe with one layer per stage
    sharing = Counter((host, report.device) for host, report in timed)
    capacities: list[WorkerCapacity] = []
    for host, report in timed:
        room = report.memory // sharing[host, report.device]
        capacities.append(WorkerCapacity(report.layer_s, min(layers, room // layer), room >= ends))
    return capacities


def _time_passes(config: RunConfig, data: Data, notify: Notify, requested: Callable[[], str]) -> dict[str, Timed]:
    started = run_started(ResolvedRun(config), START)
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{config.name}-timing-", dir=out)
    except OSError as error:
        raise UserError(f"out = {config.out!r} cannot be written to ({error.strerror})") from None
    workers = started.own_workers
    with folder as name, open_fleet(FleetRequest(smallest_layout(config), data, Path(name), workers)) as fleet:
        profiling = _Profiling(fleet, config, notify, requested)
        try:
            return profiling.collect(workers, config.pipeline.stages + 1)
        finally:
            fleet.announce_restart("timed; the run starts next")
            profiling.release_workers()


class _Profiling:
    """Starts workers on all machines, and collects their reports."""

    def __init__(self, fleet: JoinableFleet, config: RunConfig, notify: Notify, requested: Callable[[], str]) -> None:
        """``requested``: returns why the run should stop, or ""."""
        self._fleet = fleet
        self._config = config
        self._notify = notify
        self._requested = requested
        self._names = count()
        self._host_of: dict[str, str] = {}
        """worker → machine that joined; "" for one of the run's own"""
        self._found: dict[str, Timed] = {}

    def collect(self, own: int, wanted: int) -> dict[str, Timed]:
        """Return the reports of ``own`` workers, and of those on machines that join until there are ``wanted``.

        :raises RunStopped: if a worker of this machine exits, too few machines join, or the run should stop.
        """
        self._start(own, "")
        if own < wanted:
            self._notify(
                f"waiting for machines to join, to time them (`planaria join`; {own} of {wanted} workers are here)"
            )
        until = time.monotonic() + self._config.fleet.join_s
        while len(self._found) < max(wanted, len(self._host_of)):
            if reason := self._requested():
                raise RunStopped(f"stopped by {reason} while the machines were timed; nothing was written")
            if len(self._host_of) < wanted and time.monotonic() > until:
                raise RunStopped(
                    f"pipeline.layers = 'auto': {len(self._host_of)} of {wanted} workers are here, and no machine with "
                    f"more has joined within {self._config.fleet.join_s:g} s (fleet.join_s); nothing was written"
                )
            for notice in self._fleet.poll(1.0):
                match notice:
                    case Joined(host=host, workers=workers):
                        self._start(workers, host)
                    case Reported(worker=worker, text=text):
                        self._receive(worker, text)
                    case WorkerEnded(worker=worker):
                        self._lose(worker, f"{notice.cause}, {notice.detail}")
        return self._found

    def release_workers(self) -> None:
        """Send all workers the order to leave."""
        for worker in self._host_of:
            self._fleet.send(worker, ExitWorker().model_dump_json().encode())

    def _start(self, workers: int, host: str) -> None:
        for _ in range(workers):
            worker = f"w{next(self._names)}"
            self._host_of[worker] = host
            self._fleet.spawn(worker, 1, host)

    def _receive(self, worker: str, text: bytes) -> None:
        try:
            report = REPORT.validate_json(text)
        except ValidationError as error:
            self._lose(worker, f"it sent an invalid report ({first_error(error)})")
            return
        match report:
            case WorkerJoined() if worker in self._host_of:
                self._found[worker] = self._host_of[worker], report
            case WorkerFailed():
                self._lose(worker, report.detail)

    def _lose(self, worker: str, reason: str) -> None:
        """Remove a worker and its report; RunStopped if it is not on a machine that joined."""
        host = self._host_of.pop(worker, "")
        self._found.pop(worker, None)
        if not host:
            raise RunStopped(f"{worker} exited ({reason}) before the machines were timed; nothing was written")
