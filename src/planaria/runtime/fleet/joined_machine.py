"""A machine that has joined a run: it starts workers and leaves on request."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from pydantic import ValidationError

import planaria
from planaria.common.address import REACHABLE, Reach, listening
from planaria.common.documents import first_error
from planaria.common.errors import UserError
from planaria.common.stdio import Notify
from planaria.runtime.fleet import joining
from planaria.runtime.fleet.base import Message
from planaria.runtime.fleet.control_connections import call
from planaria.runtime.fleet.heartbeats import HeartbeatMonitor
from planaria.runtime.fleet.joining import RunAddress
from planaria.runtime.transport.listener import MACHINE, listen
from planaria.runtime.transport.secure import StrangerError

log = logging.getLogger(__name__)
JOINED = "joined"
"""printed once the run may start workers here"""
_MAX_MESSAGE_BYTES = 1 << 20
_CALL_S = 3
"""seconds for each message of the handshake; a lost packet would wait for TCP, while a new call may succeed"""
_PATIENCE_S = 10.0
"""seconds for the answer to the join request"""


class WorkerPool(Protocol):
    """The workers of a machine, such as a :class:`planaria.runtime.fleet.process_pool.ProcessPool`."""

    address: str
    """HOST:PORT of the controller that leads, to which new workers connect"""

    @property
    def empty(self) -> bool:
        """Whether no worker is left."""
        ...

    def start(self, worker: str, incarnation: int) -> int:
        """Start a worker; return its process id. OSError if none can start here."""
        ...

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        """Send a signal to a worker."""
        ...

    def leave(self, address: str) -> None:
        """Let workers leave the lost controller at HOST:PORT, perhaps a silent one."""
        ...


class Rejected(UserError):
    """The run does not accept this machine."""

    over = False
    """whether that is because the run is over"""


@dataclass(frozen=True)
class Ending:
    """The end of a membership."""

    how: Literal["left", "over", "restarting", "dismissed", "lost"]
    """cause: a requested leave, the end of the run, its restart, a dismissal of this machine, or a lost connection"""
    reason: str = ""


def _ending_of(message: joining.ConnectionClosing) -> Ending:
    if message.again:
        return Ending("restarting", message.reason)
    return Ending("over" if message.welcome else "dismissed", message.reason)


@contextmanager
def _probe_addresses(host: str, key: bytes, reach: Reach) -> Iterator[str]:
    """Yield the address of a listener for the run to test; "" if this machine is unreachable.

    :raises UserError: if none of the ports is free.
    """
    if not reach.reachable:
        yield ""
        return
    listener = listen(host, key, reach.ports, lambda _, tls: tls.close())
    try:
        yield listening(listener.host, listener.port, reach).outside
    finally:
        listener.close()


def own_name() -> str:
    """Return the name by which this process asks to join."""
    return f"{platform.node()}, pid {os.getpid()}"[:200]


class RunMembership:
    """One machine's membership in a run, from its request to its goodbye."""

    def __init__(self, address: RunAddress, workers: int, reach: Reach = REACHABLE, returning: str = "") -> None:
        """Request to join with ``workers`` workers (0: enough for one replica).

        ``returning``: this machine's name in the run, if the run's former controller was lost.

        ``reach``: name and ports at which this machine is reachable, and whether to test that.

        :raises OSError: if there is no answer, or the run is about to restart.
        :raises UserError: if the other end does not know the key, or rejects this machine.
        """
        name = own_name()
        self.address, self.key = address.at, bytes.fromhex(address.key)
        self.workers, self._sending = workers, threading.Lock()
        try:
            self._connection = call(self.address, self.key, name[:100], MACHINE, _CALL_S)
            with _probe_addresses(self._connection.own_address, self.key, reach) as at:
                request = joining.JoinRequest(
                    called=name, version=planaria.__version__, workers=workers, at=at, returning=returning
                )
                self._send(request)
                answer = self._receive(_PATIENCE_S)
        except EOFError:
            raise OSError("the connection closed") from None
        except ValidationError as error:
            detail = f"sent an invalid answer ({first_error(error)}); use the same version of planaria on both"
            raise UserError(f"{address.at}: {detail}") from None
        except StrangerError:
            raise UserError(
                f"{address.at} does not know this key: another run listens there, or the key is an old one; copy the "
                "run's fleet.key file or address.json again"
            ) from None
        if isinstance(answer, joining.ConnectionClosing) and answer.again:
            raise OSError(answer.reason)
        if isinstance(answer, joining.ConnectionClosing):
            rejected = Rejected(f"rejected: {answer.reason}")
            rejected.over = answer.welcome
            raise rejected
        if not isinstance(answer, joining.Welcome):
            raise OSError("no answer")
        self.welcome = answer
        self.reach = replace(reach, machine=answer.host, reachable=bool(at) and answer.reachable, relay=self.address)
        self.own_address = self._connection.own_address

    def serve_until_end(
        self,
        pool: WorkerPool,
        silence_s: float,
        asked_to_leave: Callable[[], str],
        notify: Notify,
        is_led_elsewhere: Callable[[], bool] | None = None,
    ) -> Ending:
        """Serve until the run ends or is lost, or, after a request to leave, all workers have ended.

        :param silence_s: after which a silent run is lost
        :param is_led_elsewhere: a silent run is lost only if this returns that it has another controller. It is called
            until one is found, the connection breaks, or the controller sends again, as after a short partition.
        """
        self._send(joining.MachineReady())
        notify(JOINED)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        leaving, silence = "", HeartbeatMonitor[str](joining.BEAT_S, silence_s / joining.BEAT_S)
        silence.receive("the run")
        while True:
            try:
                self._connection.poll(joining.BEAT_S)
                silence.look(joining.BEAT_S)
                message = self._receive(0.0)
            except (EOFError, OSError, ValidationError):
                return Ending("left") if leaving and pool.empty else Ending("lost", "the connection broke")
            if message is not None:
                silence.receive("the run")
            for _, seconds in silence.silent_too_long(lambda _: "unknown"):
                if is_led_elsewhere is None or is_led_elsewhere():
                    return Ending("lost", f"silent for {seconds:.1f} s")
            if isinstance(message, joining.ConnectionClosing):
                return _ending_of(message)
            self._process(message, pool, leaving, notify)
            if not leaving and (leaving := asked_to_leave()):
                notify("leaving once other machines have taken over (again: immediately)")
                self._send(joining.Departing(detail=leaving))
            elif leaving and pool.empty:
                return Ending("left")

    def end(self) -> None:
        self._connection.close()

    def _process(self, message: Message | None, pool: WorkerPool, leaving: str, notify: Notify) -> None:
        match message:
            case joining.Start() if not leaving:
                threading.Thread(target=self._start, args=(message, pool, notify), name="start", daemon=True).start()
            case joining.Signal():
                log.debug("worker %s gets signal %d", message.worker, message.number)
                pool.signal(message.worker, message.incarnation, message.number)

    def _start(self, order: joining.Start, pool: WorkerPool, notify: Notify) -> None:
        """Start a worker in a thread, since that may take long."""
        try:
            pid = pool.start(order.worker, order.incarnation)
        except OSError as error:
            notify(str(error))
            log.info("worker %s did not start: %s", order.worker, error)
            self._send(joining.Failed(worker=order.worker, incarnation=order.incarnation, detail=str(error)[:200]))
            return
        notify(f"started worker {order.worker} (pid {pid})")
        self._send(joining.Started(worker=order.worker, incarnation=order.incarnation))

    def _beat(self) -> None:
        while not self._connection.closed:
            self._send(joining.Beat())
            time.sleep(joining.BEAT_S)

    def _send(self, message: Message) -> None:
        with self._sending:
            try:
                self._connection.send_bytes(message.model_dump_json().encode())
            except OSError:
                return  # the next receive reports the dead connection

    def _receive(self, patience_s: float) -> joining.ToMachine | None:
        if not self._connection.poll(patience_s):
            return None
        return joining.TO_MACHINE.validate_json(self._connection.recv_bytes(_MAX_MESSAGE_BYTES))
