"""Joining a machine to a running run: its workers run here and follow the run's controller."""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from planaria.common.address import REACHABLE, Reach
from planaria.common.documents import first_error, refuse_nul
from planaria.common.errors import RunStopped, UserError, exit_code
from planaria.common.logs import from_environment
from planaria.common.signals import STOPS, interrupt_on_stop
from planaria.common.stdio import Notify
from planaria.config.model_config import GROUP
from planaria.runtime.engine.run_files import local_workplace
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.engine.stopping import stop_requested
from planaria.runtime.fleet import spawner
from planaria.runtime.fleet.devices import free_memory, require_devices
from planaria.runtime.fleet.joined_machine import Ending, RunMembership
from planaria.runtime.fleet.joining import RUN_ADDRESS_FILE, RunAddress, read_key, read_run_address
from planaria.runtime.fleet.lasting_membership import Controllers, LastingMembership
from planaria.runtime.fleet.process_pool import PoolConfiguration, ProcessPool
from planaria.runtime.prediction.memory import require_room
from planaria.runtime.preparation.requirements import device_needs
from planaria.runtime.worker.setup import SETUP, Setup

log = logging.getLogger(__name__)
_RETRY_S = 0.5
"""seconds between attempts to reach the controller"""
_SILENCE_FACTOR, _MIN_SILENCE_S = 2, 10.0
"""silence after which the run counts as lost: a multiple of the run's own limit, and at least this many seconds, since
a controller may be paused"""


@dataclass(frozen=True)
class MachineOptions:
    """Workers that a machine offers to a run, its connections, and the time that it tries to join."""

    workers: int = 0
    """0: enough for one replica"""
    patience_s: float = 60.0
    """seconds to retry a run that became unreachable"""
    first_s: float = 0.0
    """seconds to retry a run that may not have started"""
    reach: Reach = REACHABLE
    """how others reach this machine"""
    cache: Path | None = None
    """cache for the run's files if this machine does not see the run's folder; default: the user's cache"""


@dataclass(frozen=True)
class FolderAccess:
    """Access to a run through its folder."""

    folder: Path
    abandoned: Callable[[], bool]
    """returns whether no controller trains the run any more"""

    def address(self) -> RunAddress:
        """Return the run's address and key; UserError if the run has ended."""
        return read_run_address(self.folder)

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return not (self.folder / RUN_ADDRESS_FILE).exists()

    def no_answer_error(self, error: OSError) -> UserError:
        """Return the error for a controller that does not answer."""
        if self.abandoned():
            return UserError(
                f"{self.folder / RUN_ADDRESS_FILE}: the run's controller was killed, and the run is not being trained; "
                f"resume it with `planaria train --resume {self.folder}`, then join"
            )
        return UserError(
            f"{self.folder / RUN_ADDRESS_FILE}: the controller does not answer ({error.strerror or error}); if the run "
            "is active, check that this machine can reach the controller's (fleet.host)"
        )

    def __str__(self) -> str:
        return str(self.folder)


@dataclass(frozen=True)
class AddressAccess:
    """Access to a run through the controller's address and a file with the key."""

    at: str
    """HOST:PORT of the controller"""
    key: Path

    def address(self) -> RunAddress:
        """Return the run's address and key; UserError if the key cannot be read."""
        return RunAddress(at=self.at, key=read_key(self.key).hex())

    has_ended = False

    def no_answer_error(self, error: OSError) -> Exception:
        """Return the error for a controller that does not answer."""
        return UserError(
            f"{self.at}: the controller does not answer ({error.strerror or error}); check that the run is active, "
            "that its controller listens at an address that this machine can reach (fleet.host, fleet.port), and the "
            "firewall"
        )

    def __str__(self) -> str:
        return self.at


@dataclass(frozen=True)
class KnownRunAccess(AddressAccess):
    """Access to a run whose key this machine has, such as one that another controller leads now."""

    known: RunAddress

    def address(self) -> RunAddress:
        return self.known


RunAccess = FolderAccess | AddressAccess


def join(access: RunAccess, options: MachineOptions, notify: Notify) -> None:
    """Serve a run until it ends, or until a signal asks to leave.

    :raises UserError: if the run has ended, or cannot be joined from here.
    :raises RunStopped: if it does not answer for ``options.patience_s``, or dismisses this machine.
    """
    again = False
    while (service := _prepare_service(access, options, notify, again)) is not None:
        with closing(service), stop_requested() as requested:
            ending = service.serve_until_end(requested)
        access = service.next_access or access
        if ending.how == "dismissed":
            raise RunStopped(f"{access}: the run dismissed this machine: {ending.reason}")
        if ending.how not in ("lost", "restarting"):
            notify("left" if ending.how == "left" else ending.reason)
            return
        why = f"the run is unreachable ({ending.reason})" if ending.how == "lost" else ending.reason
        notify(f"{why}; trying again for {options.patience_s:g} s")
        again = True


def serve_as_child(access: RunAccess, options: MachineOptions, output: int) -> None:
    """Entry point of a forked process that serves a run (see :func:`join`), and prints to a file descriptor."""
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (1, 2):
        os.dup2(output, stream)
    spawner.expect_fork()

    def serve() -> int:
        join(access, options, lambda line: print(line, flush=True))
        return 0

    sys.exit(exit_code(serve))


def _prepare_service(access: RunAccess, options: MachineOptions, notify: Notify, again: bool) -> _MachineService | None:
    """Connect and prepare the workers; return None, after a message, if the run has ended or a signal arrives.

    The run does not use this machine yet, so a signal interrupts at once.
    """
    with ExitStack() as cleanup:
        try:
            with interrupt_on_stop():
                membership = connect(access, options, notify, again)
                if membership is None:
                    notify("the run is over")
                    return None
                cleanup.callback(membership.end)
                service = _MachineService(membership, options, isinstance(access, FolderAccess), notify)
        except KeyboardInterrupt:
            notify("left")
            return None
        cleanup.pop_all()
        return service


def connect(access: RunAccess, options: MachineOptions, notify: Notify, lost: bool = False) -> RunMembership | None:
    """Connect to a run; return None if it was ``lost`` and has ended.

    :raises UserError: if the controller does not answer in time, or the run cannot be joined from here.
    :raises RunStopped: if a run that was lost does not answer in time.
    """
    patience_s, waiting = options.patience_s if lost else options.first_s, lost
    until = time.monotonic() + patience_s
    while True:
        if lost and access.has_ended:
            return None
        try:
            return RunMembership(access.address(), options.workers, options.reach)
        except OSError as error:
            log.debug("%s: no answer: %s", access, error)
            if time.monotonic() >= until:
                stopped = RunStopped(f"{access}: the run has not answered for {patience_s:g} s")
                raise stopped if lost else access.no_answer_error(error) from None
        if not waiting:
            notify(f"{access}: no answer yet; trying for up to {patience_s:g} s")
            waiting = True
        time.sleep(_RETRY_S)


class _MachineService:
    """This machine's membership in a run, and its process pool."""

    def __init__(self, membership: RunMembership, options: MachineOptions, shared: bool, notify: Notify) -> None:
        """``shared``: this machine sees the run's folder.

        :raises UserError: if the machine lacks something that the run's workers need.
        """
        setup = replace(
            setup_of(membership), host=membership.own_address, reach=membership.reach, log=from_environment()
        )
        if setup.config.model.family == GROUP:
            raise UserError(
                f"{membership.address} belongs to a training group; join it with planaria.join in your training script"
            )
        fleet = setup.config.fleet
        if not shared or fleet.shared_log is not None:  # the next controller has another folder
            setup = replace(setup, folder_id="")
        prepare = partial(local_workplace, setup, Path(membership.welcome.cwd), options.cache, notify)
        wanted = device_needs(setup.config)
        start_s = setup.config.fleet.start_timeout_s
        pool_configuration = PoolConfiguration(
            prepare, PRELOAD, membership.address, membership.key, wanted, membership.welcome.host, start_s=start_s,
            standbys=tuple(fleet.standby_addresses), orphan_s=0.0 if fleet.shared_log is None else fleet.orphan_s,
        )  # fmt: skip
        self._pool = ProcessPool(pool_configuration)
        inventory = self._pool.facts().devices
        workers = membership.workers or setup.config.pipeline.stages + 1
        machine = f"this machine ({platform.node()})"
        require_devices(machine, wanted, inventory, workers, "join from one that has more")
        require_room(setup.config, workers, inventory, free_memory(), machine)
        silence_s = max(_MIN_SILENCE_S, _SILENCE_FACTOR * fleet.heartbeat_s * fleet.missed_heartbeats)
        if fleet.shared_log is not None:  # another machine leads soon
            silence_s = 2 * fleet.lease_s
        controllers = Controllers(fleet.standby_addresses, fleet.orphan_s, silence_s)
        self._lasting = LastingMembership(membership, controllers, notify, workers=options.workers, reach=options.reach)
        notify(f"joined {setup.config.name} as {membership.welcome.host}; starting workers")
        if not membership.reach.reachable:
            notify("others cannot connect to this machine; it connects to them, or through the controller")
        if wrong := self._pool.fetch_files():
            raise UserError(wrong)
        self._pool.warm_up()

    def serve_until_end(self, asked_to_leave: Callable[[], str]) -> Ending:
        """Serve the run at the controllers that lead it; return how that ended."""
        return self._lasting.serve_until_end(self._pool, asked_to_leave)

    @property
    def next_access(self) -> KnownRunAccess | None:
        """Access to a controller that leads now, but no longer waits for this machine."""
        at = self._lasting.rejected_at
        known = RunAddress(at=at, key=self._lasting.current.key.hex())
        return KnownRunAccess(at, Path(), known) if at else None

    def close(self) -> None:
        self._pool.end()
        self._lasting.end()


def setup_of(membership: RunMembership) -> Setup:
    """Return the run's setup; UserError if it is invalid, as from another version of planaria."""
    location = "the run's setup"
    refuse_nul(membership.welcome.setup, location)
    try:
        return replace(SETUP.validate_json(membership.welcome.setup), key=membership.key)
    except ValidationError as error:
        raise UserError(
            f"{location} is invalid ({first_error(error)}); use the version of planaria that the run uses"
        ) from None
