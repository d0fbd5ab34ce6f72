"""Lending a machine to a run that is under way: workers are born here, and take their orders from the controller."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from planaria.common.documents import first, refuse_nul
from planaria.common.errors import RunStopped, UserError
from planaria.common.signals import interrupted
from planaria.runtime.engine.fleet import PRELOAD
from planaria.runtime.engine.needs import needs
from planaria.runtime.engine.provision import settled
from planaria.runtime.engine.setup import SETUP, Setup
from planaria.runtime.engine.stopping import stop_asked
from planaria.runtime.fleet.devices import require_devices
from planaria.runtime.fleet.guest import Ending, Visit
from planaria.runtime.fleet.joining import DOOR, Door, read_door, read_key
from planaria.runtime.fleet.process_pool import Orders, ProcessPool
from planaria.runtime.transport.address import REACHABLE, Reach

_AGAIN_S = 0.5
"""between two requests at a door where nobody answers"""
_TIMES, _LEAST_S = 2, 10.0
"""how many times as long as the run waits to hear from a machine, the machine waits for the run, which knows better;
and how many seconds at least: a controller may be stopped for a while, and then go on"""

Told = Callable[[str], None]


@dataclass(frozen=True)
class Offer:
    """What a machine offers to a run, and on which terms."""

    workers: int = 0
    """0: as many as one replica has"""
    patience_s: float = 60.0
    """how long a run that cannot be reached any more is called again"""
    first_s: float = 0.0
    """how long a run that may have to begin yet is called"""
    reach: Reach = REACHABLE
    """how others can reach this machine"""
    cache: Path | None = None
    """where it keeps the run's files if it does not see the run's folder; the user's cache unless given"""


@dataclass(frozen=True)
class FolderEntrance:
    """A run whose folder this machine sees."""

    folder: Path
    forsaken: Callable[[], bool]
    """does nobody train it any more?"""

    def door(self) -> Door:
        """:raises UserError: when the run is over."""
        return read_door(self.folder)

    @property
    def closed(self) -> bool:
        """Has the run ended?"""
        return not (self.folder / DOOR).exists()

    def unanswered(self, error: OSError) -> UserError:
        """What to tell the user when nobody answers."""
        if self.forsaken():
            return UserError(
                f"{self.folder / DOOR}: left behind by a controller that was killed; nobody trains the run now: go on "
                f"with `planaria train --resume {self.folder}`, then join that"
            )
        return UserError(
            f"{self.folder / DOOR}: nobody answers there ({error.strerror or error}); if the run is still on, can this "
            "machine reach the controller's (fleet.host)?"
        )

    def __str__(self) -> str:
        return str(self.folder)


@dataclass(frozen=True)
class AddressEntrance:
    """A run of which this machine knows an address and a file with the key."""

    at: str
    """HOST:PORT of the controller"""
    key: Path

    def door(self) -> Door:
        """:raises UserError: when the key cannot be read."""
        return Door(at=self.at, key=read_key(self.key).hex())

    closed = False

    def unanswered(self, error: OSError) -> UserError:
        """What to tell the user when nobody answers."""
        return UserError(
            f"{self.at}: nobody answers there ({error.strerror or error}); is the run on, does its controller listen "
            "at an address that this machine can reach (fleet.host, fleet.port), and does the firewall let it through?"
        )

    def __str__(self) -> str:
        return self.at


Entrance = FolderEntrance | AddressEntrance


def join(entrance: Entrance, offer: Offer, told: Told) -> None:
    """Serve a run until it is over, or until a signal asks to leave.

    :raises UserError: when the run is over, or cannot be joined from here.
    :raises RunStopped: when it has not answered for ``offer.patience_s``, or has sent this machine away.
    """
    again = False
    while (stay := _arrived(entrance, offer, told, again)) is not None:
        with closing(stay), stop_asked() as asked:
            ending = stay.last(asked)
        if ending.how == "unwelcome":
            raise RunStopped(f"{entrance}: sent this machine away: {ending.reason}")
        if ending.how not in ("lost", "again"):
            told("left" if ending.how == "left" else ending.reason)
            return
        why = f"the run cannot be reached any more ({ending.reason})" if ending.how == "lost" else ending.reason
        told(f"{why}; calling it again for {offer.patience_s:g} s")
        again = True


def _arrived(entrance: Entrance, offer: Offer, told: Told, again: bool) -> _Stay | None:
    """The machine once it is ready to start workers; None, after a line, if there is nothing to stay for.

    The run has nothing here yet, so a signal ends the preparations at once, wherever they are.
    """
    with ExitStack() as unless_ready:
        try:
            with interrupted():
                visit = _called(entrance, offer, told, again)
                if visit is None:
                    told("the run is over")
                    return None
                unless_ready.callback(visit.end)
                stay = _Stay(visit, offer, isinstance(entrance, FolderEntrance), told)
        except KeyboardInterrupt:
            told("left")
            return None
        unless_ready.pop_all()
        return stay


def _called(entrance: Entrance, offer: Offer, told: Told, lost: bool = False) -> Visit | None:
    """A visit to a run; None if it was ``lost`` and has ended meanwhile.

    :raises UserError: when nobody has answered for so long, or the run cannot be joined from here.
    :raises RunStopped: when a run that was lost has not answered for so long.
    """
    patience_s, waiting = offer.patience_s if lost else offer.first_s, lost
    until = time.monotonic() + patience_s
    while True:
        if lost and entrance.closed:
            return None
        try:
            return Visit(entrance.door(), offer.workers, offer.reach)
        except OSError as error:
            if time.monotonic() >= until:
                stopped = RunStopped(f"{entrance}: the run has not answered for {patience_s:g} s")
                raise stopped if lost else entrance.unanswered(error) from None
        if not waiting:
            told(f"{entrance}: nobody answers there yet; calling for up to {patience_s:g} s")
            waiting = True
        time.sleep(_AGAIN_S)


class _Stay:
    """A visit and the process pool that goes with it."""

    def __init__(self, visit: Visit, offer: Offer, shared: bool, told: Told) -> None:
        """``shared``: this machine sees the run's folder.

        :raises UserError: when it lacks what the run's workers need.
        """
        self._visit, self._told = visit, told
        setup = replace(_setup(visit), host=visit.own_address, reach=visit.reach)
        if not shared:
            setup = replace(setup, sign="")
        settle = partial(settled, setup, Path(visit.welcome.cwd), offer.cache, told)
        wanted = needs(setup.config)
        start_s = setup.config.fleet.start_timeout_s
        orders = Orders(settle, PRELOAD, visit.address, visit.key, wanted, visit.welcome.host, start_s=start_s)
        self._pool = ProcessPool(orders)
        found, workers = self._pool.facts().found, visit.workers or setup.config.pipeline.stages + 1
        require_devices(f"this machine ({platform.node()})", wanted, found, workers, "join from one that has more")
        fleet = setup.config.fleet
        self._silence_s = max(_LEAST_S, _TIMES * fleet.heartbeat_s * fleet.missed)
        told(f"welcome in {setup.config.name} as {visit.welcome.host}; getting ready")
        if not visit.reach.reachable:
            told("others cannot open connections to this machine: it calls them, or they meet at the controller")
        if wrong := self._pool.settle():
            raise UserError(wrong)
        self._pool.warm_up()

    def last(self, asked_to_leave: Callable[[], str]) -> Ending:
        return self._visit.stay(self._pool, self._silence_s, asked_to_leave, self._told)

    def close(self) -> None:
        self._pool.end()
        self._visit.end()


def _setup(visit: Visit) -> Setup:
    """:raises UserError: when it is invalid, as of another version of planaria."""
    place = "the run's setup"
    refuse_nul(visit.welcome.setup, place)
    try:
        return replace(SETUP.validate_json(visit.welcome.setup), key=visit.key)
    except ValidationError as error:
        raise UserError(f"{place} is invalid ({first(error)}); is it of another version of planaria?") from None
