"""Lending a machine to a run that is under way: workers are born here, and take their orders from the controller."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from planaria.engine import worker
from planaria.engine.fleet import PRELOAD
from planaria.engine.needs import needs
from planaria.engine.setup import SETUP
from planaria.engine.stopping import stop_asked
from planaria.errors import RunStopped, UserError
from planaria.fleet.devices import require_devices
from planaria.fleet.door import FILE, read_door
from planaria.fleet.guest import Ending, Visit
from planaria.fleet.process_pool import Orders, ProcessPool

_AGAIN_S = 0.5
"""between two requests at a door where nobody answers"""
_TIMES, _LEAST_S = 2, 10.0
"""how many times as long as the run waits to hear from a machine, the machine waits for the run, which knows better;
and how many seconds at least: a controller may be stopped for a while, and then go on"""


def join(
    folder: Path, workers: int, patience_s: float, told: Callable[[str], None], forsaken: Callable[[], bool]
) -> None:
    """Serve the run in ``folder`` with so many workers until it is over, or until a signal asks to leave.

    A run that cannot be reached any more is called again for ``patience_s``. ``forsaken`` tells whether nobody trains
    it any more.

    :raises UserError: when the run is over, or cannot be joined from here.
    :raises RunStopped: when it has not answered for so long.
    """
    with stop_asked() as asked:
        visit: Visit | str = _first(folder, workers, forsaken)
        while isinstance(visit, Visit):
            with closing(_Stay(visit, told)) as stay:
                ending = stay.last(asked)
            if ending.how == "lost":
                told(f"the run cannot be reached any more ({ending.reason}); calling it again for {patience_s:g} s")
                visit = _again(folder, workers, patience_s, asked)
            else:
                visit = "left" if ending.how == "left" else ending.reason
        told(visit)


def _first(folder: Path, workers: int, forsaken: Callable[[], bool]) -> Visit:
    """:raises UserError: when nobody answers."""
    try:
        return Visit(read_door(folder), workers)
    except OSError as error:
        if forsaken():
            raise UserError(
                f"{folder / FILE}: left behind by a controller that was killed; nobody trains the run now: go on with "
                f"`planaria train --resume {folder}`, then join that"
            ) from None
        raise UserError(
            f"{folder / FILE}: nobody answers there ({error.strerror or error}); if the run is still on, can this "
            "machine reach the controller's (fleet.host)?"
        ) from None


def _again(folder: Path, workers: int, patience_s: float, asked_to_leave: Callable[[], str]) -> Visit | str:
    """Another visit to a run that was lost, or why there will be none; it may have ended without this machine.

    :raises RunStopped: when nobody has answered for so long.
    """
    until = time.monotonic() + patience_s
    while not asked_to_leave():
        if not (folder / FILE).exists():
            return "the run is over"
        try:
            return Visit(read_door(folder), workers)
        except OSError:
            if time.monotonic() > until:
                raise RunStopped(f"{folder}: the run has not answered for {patience_s:g} s") from None
        time.sleep(_AGAIN_S)
    return "left"


class _Stay:
    """A visit and the process pool that goes with it."""

    def __init__(self, visit: Visit, told: Callable[[str], None]) -> None:
        """:raises UserError: when this machine lacks what the run's workers need."""
        self._visit, self._told = visit, told
        try:
            setup = SETUP.validate_json(visit.welcome.setup)
        except ValidationError:
            raise UserError("the run's setup cannot be read: is it of another version of planaria?") from None
        setup = replace(setup, key=visit.key)
        entry, cwd = partial(worker.main, setup), Path(visit.welcome.cwd)
        wanted = needs(setup.config)
        orders = Orders(entry, PRELOAD, visit.address, visit.key, cwd, (setup.folder, setup.dataset), wanted)
        self._pool = ProcessPool(orders)
        found = self._pool.facts().found
        require_devices(
            f"this machine ({platform.node()})", wanted, found, visit.workers, "join from one that has more"
        )
        if missing := self._pool.facts().missing:
            raise UserError(
                f"this machine has no folder {missing[0]}: put `out` and `data.cache` where all machines see them "
                "under one path"
            )
        fleet = setup.config.fleet
        self._silence_s = max(_LEAST_S, _TIMES * fleet.heartbeat_s * fleet.missed)
        told(f"welcome in {setup.config.name} as {visit.welcome.host}; getting ready")
        self._pool.warm_up()

    def last(self, asked_to_leave: Callable[[], str]) -> Ending:
        return self._visit.stay(self._pool, self._silence_s, asked_to_leave, self._told)

    def close(self) -> None:
        self._pool.end()
        self._visit.end()
