"""``pipeline.layers = "auto"``: time the machines before the run, and give each stage as many layers as it can carry.

The run's own fleet is started for a recipe with one layer in each block stage, which any of its machines has room for.
Each worker reports the time of a layer, and all are released. Machines that joined are asked to call again for the run
itself.
"""

from __future__ import annotations

import heapq
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pydantic import ValidationError

from planaria.common.documents import first
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import RunConfig
from planaria.control.decisions import Leave
from planaria.control.events import REPORT, WorkerFailed, WorkerJoined
from planaria.data.shards import Data, prepare
from planaria.runtime.engine import runs
from planaria.runtime.engine.check import check
from planaria.runtime.engine.fleet import opened
from planaria.runtime.engine.needs import least, needs, work
from planaria.runtime.engine.origin import START, run_started
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.resumption import changed
from planaria.runtime.engine.stopping import stop_asked
from planaria.runtime.fleet.base import Gone, Joined, Said
from planaria.runtime.fleet.guests import OpenFleet

Say = Callable[[str], None]
Timed = tuple[str, WorkerJoined]
"""machine that has joined, or "", and a worker's report from there"""


def sized(config: RunConfig, data: Data, say: Say, stop: Callable[[], bool] | None = None) -> RunConfig:
    """The recipe with numbers in place of ``pipeline.layers = "auto"``; any other as it is.

    In one process all stages are equally fast: they get as many layers, or nearly. ``stop`` is asked again and again.

    :raises UserError: when the machines have no room for the model.
    :raises RunStopped: when too few can be timed, or a signal or ``stop`` ends it.
    """
    if config.pipeline.layers != "auto":
        return config
    if config.engine == "inline":
        return with_layers(config, config.model.block_layers)
    model, stages = config.model, config.pipeline.stages
    with stop_asked(stop) as asked:
        timed = _timed(config, data, say, asked)
    layers = model.layers - model.ends_layers
    found = divide(layers, stages, work(config)[0], machines(config, [*timed.values()]))
    pace = ", ".join(f"{name} {report.layer_s * 1e3:.3g}" for name, (_, report) in timed.items())
    say(f"stages of {found} layers (pipeline.layers); a layer's milliseconds: {pace}")
    return with_layers(config, tuple(found))


def sized_anew(
    folder: Path, changes: Mapping[str, object], say: Say, stop: Callable[[], bool] | None = None
) -> Mapping[str, object]:
    """The settings with which the run in ``folder`` goes on, with numbers in place of ``pipeline.layers = "auto"``.

    :raises UserError: and RunStopped, as :func:`sized`.
    """
    if changes.get("pipeline.layers") != "auto":
        return changes
    config = changed(runs.config_of(folder, *runs.KEPT), changes, folder)
    check(config)
    found = sized(config, prepare(config.data, config.model.vocab), say, stop)
    return {**changes, "pipeline.layers": list(found.pipeline.layers or ())}


def with_layers(config: RunConfig, layers: tuple[int, ...] | None) -> RunConfig:
    """The recipe with block stages of these sizes."""
    pipeline = config.pipeline.model_copy(update={"layers": layers})
    model = config.model.model_copy(update={"block_layers": layers})
    return config.model_copy(update={"pipeline": pipeline, "model": model})


def machines(config: RunConfig, timed: Sequence[Timed]) -> list[Machine]:
    """What the timed workers can do; those that share a device have equal parts of its memory."""
    layers, stages = config.model.layers - config.model.ends_layers, needs(config).stages
    if not stages:
        return [Machine(report.layer_s, layers) for _, report in timed]
    ends, layer = stages[0], stages[1]  # of the least recipe: one layer
    sharing = Counter((host, report.device) for host, report in timed)
    found: list[Machine] = []
    for host, report in timed:
        room = report.memory // sharing[host, report.device]
        found.append(Machine(report.layer_s, min(layers, room // layer), room >= ends))
    return found


def _timed(config: RunConfig, data: Data, say: Say, asked: Callable[[], str]) -> dict[str, Timed]:
    """Start the fleet, and hear from its workers."""
    started = run_started(ResolvedRun(config), START)
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{config.name}-timing-", dir=out)
    except OSError as error:
        raise UserError(f"out = {config.out!r}: cannot be written to ({error.strerror})") from None
    with folder as name, opened(least(config), data, Path(name), started.own_workers) as fleet:
        profiling = _Profiling(fleet, config, say, asked)
        try:
            return profiling.heard(started.own_workers, config.pipeline.stages + 1)
        finally:
            fleet.part("timed; the run is about to begin")
            profiling.dismiss()


class _Profiling:
    """Starts workers wherever there is room, and collects their reports."""

    def __init__(self, fleet: OpenFleet, config: RunConfig, say: Say, asked: Callable[[], str]) -> None:
        """``asked`` says why the run is to stop; nothing while it is not."""
        self._fleet, self._config, self._say, self._asked = fleet, config, say, asked
        self._names = count()
        self._host_of: dict[str, str] = {}
        """of the workers that have been started: a machine that has joined; empty for one of the run's own"""
        self._found: dict[str, Timed] = {}

    def heard(self, own: int, least: int) -> dict[str, Timed]:
        """The reports of so many own workers, and of all on machines that join until there are the ``least`` it takes.

        :raises RunStopped: when a worker of this machine dies, too few machines join, or the run is to stop.
        """
        self._start(own, "")
        if own < least:
            self._say(
                f"waiting for machines to join, to time them (`planaria join`; {own} of {least} workers are here)"
            )
        until = time.monotonic() + self._config.fleet.join_s
        while len(self._found) < max(least, len(self._host_of)):
            if reason := self._asked():
                raise RunStopped(f"stopped by {reason} while the machines were timed; nothing was written")
            if len(self._host_of) < least and time.monotonic() > until:
                raise RunStopped(
                    f"pipeline.layers = 'auto': {len(self._host_of)} of {least} workers are here, and no machine with "
                    f"more has joined within {self._config.fleet.join_s:g} s (fleet.join_s); nothing was written"
                )
            for notice in self._fleet.poll(1.0):
                match notice:
                    case Joined(host=host, workers=workers):
                        self._start(workers, host)
                    case Said(worker=worker, text=text):
                        self._hear(worker, text)
                    case Gone(worker=worker):
                        self._lose(worker, f"{notice.cause}, {notice.detail}")
        return self._found

    def dismiss(self) -> None:
        """Let all go."""
        for worker in self._host_of:
            self._fleet.send(worker, Leave().model_dump_json().encode())

    def _start(self, workers: int, host: str) -> None:
        for _ in range(workers):
            worker = f"w{next(self._names)}"
            self._host_of[worker] = host
            self._fleet.spawn(worker, 1, host)

    def _hear(self, worker: str, text: bytes) -> None:
        try:
            report = REPORT.validate_json(text)
        except ValidationError as error:
            self._lose(worker, f"it sent an invalid report ({first(error)})")
            return
        match report:
            case WorkerJoined() if worker in self._host_of:
                self._found[worker] = self._host_of[worker], report
            case WorkerFailed():
                self._lose(worker, report.detail)

    def _lose(self, worker: str, reason: str) -> None:
        """A machine that has joined may go again; what it said counts no more."""
        host = self._host_of.pop(worker, "")
        self._found.pop(worker, None)
        if not host:
            raise RunStopped(f"{worker} is gone ({reason}) before the machines were timed; nothing was written")


@dataclass(frozen=True)
class Machine:
    """A worker, as it was timed."""

    layer_s: float
    """seconds that a decoder layer's passes of one microbatch take it"""
    most: int
    """decoder layers of a block stage for which it has room"""
    ends: bool = True
    """has it room for the ends?"""


def divide(layers: int, stages: int, ends: float, machines: Sequence[Machine]) -> list[int]:
    """The layers of each block stage, largest first, so that the slowest stage's passes take as little as they can.

    A pipeline is as fast as its slowest stage. One of the ``machines`` takes the ends, which are as much work as
    ``ends`` layers, and each block stage is on one of the others.

    :raises UserError: when they have no room for all layers.
    """
    limits = sorted({m.layer_s * n for m in machines for n in (ends, *range(1, min(layers, m.most) + 1))})
    low, high = 0, len(limits)
    while low < high:  # the lowest limit under which there is room
        middle = (low + high) // 2
        if _within(limits[middle], layers, stages, ends, machines) is None:
            low = middle + 1
        else:
            high = middle
    chosen = _within(limits[low], layers, stages, ends, machines) if low < len(limits) else None
    if chosen is None:
        room = sum(sorted((m.most for m in machines), reverse=True)[:stages])
        raise UserError(
            f"pipeline.layers = 'auto': the {len(machines)} workers that were timed have room for {room} of {layers} "
            f"layers in {stages} stages beside the ends; lower model.layers, or raise pipeline.stages"
        )
    return _spread(layers, chosen)


def _within(limit_s: float, layers: int, stages: int, ends: float, machines: Sequence[Machine]) -> list[Machine] | None:
    """The machines of the block stages if no stage's passes are to take longer than ``limit_s``; None if some must.

    The ends go where the fewest layers would.
    """
    able = [m for m in machines if m.ends and m.layer_s * ends <= limit_s]
    if not able:
        return None
    others = list(machines)
    others.remove(min(able, key=lambda m: _room(m, limit_s)))
    chosen = sorted(others, key=lambda m: -_room(m, limit_s))[:stages]
    rooms = [_room(m, limit_s) for m in chosen]
    return chosen if len(rooms) == stages and min(rooms) >= 1 and sum(rooms) >= layers else None


def _room(machine: Machine, limit_s: float) -> int:
    """Layers that a machine can pass within the limit."""
    return min(machine.most, math.floor(limit_s / machine.layer_s * (1 + 1e-9)))


def _spread(layers: int, machines: Sequence[Machine]) -> list[int]:
    """One layer each, and then each further one where it takes the stage the least long."""
    counts = [1] * len(machines)
    waiting = [(2 * m.layer_s, n) for n, m in enumerate(machines) if m.most > 1]
    heapq.heapify(waiting)
    for _ in range(layers - len(machines)):
        _, n = heapq.heappop(waiting)
        counts[n] += 1
        if counts[n] < machines[n].most:
            heapq.heappush(waiting, ((counts[n] + 1) * machines[n].layer_s, n))
    return sorted(counts, reverse=True)
