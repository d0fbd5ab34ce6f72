"""One process's membership in a group: its connections, and the worker that follows the group's controller.

The worker runs on a greenlet of the owner's thread. It runs while the owner is inside a call of planaria, and pauses
whenever it needs the owner's gradient; so the owner's model and optimizer are used by one thread only.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

from planaria.common.errors import RunStopped, UserError
from planaria.common.stdio import Notify
from planaria.config.names import WorkerId
from planaria.config.schema import FleetConfig
from planaria.control.facts import events as e
from planaria.control.facts.orders import ExitWorker
from planaria.group.member_runner import MemberRunner, OwnerLoopSteps
from planaria.group.member_state import MemberState
from planaria.models.group_family import group_family
from planaria.runtime.fleet.control_connections import BlockingConnection, call
from planaria.runtime.fleet.failover_connection import FailoverConnection
from planaria.runtime.fleet.joined_machine import Ending, RunMembership
from planaria.runtime.fleet.lasting_membership import Controllers, LastingMembership
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.edge import SocketTransport
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.secure import StrangerError
from planaria.runtime.worker.control_link import ControlLink
from planaria.runtime.worker.setup import Setup
from planaria.runtime.worker.worker import Worker

log = logging.getLogger(__name__)
_SILENCE_S = 30.0
"""a controller that is silent for longer is lost"""
_RETURN_S = 10.0
"""seconds to return to the next controller on the same machine"""
_END_S = 5.0
"""limit for the end of a membership whose worker has ended"""


class ConnectionLost(RunStopped):
    """The connection to the controller broke, or the controller lost this process; it may join again."""


def _controllers(fleet: FleetConfig, address: str) -> Controllers:
    """Return the controllers that may lead a group: on other machines only with a shared log."""
    if fleet.shared_log is None:
        return Controllers([address], _RETURN_S, _SILENCE_S)
    return Controllers(fleet.standby_addresses, fleet.orphan_s, 2 * fleet.lease_s)


class _OwnProcess:
    """The "process pool" of a member, whose only worker is this process itself."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[WorkerId | None] = queue.SimpleQueue()
        """the worker to become, or None once the membership has ended"""
        self.empty = False
        self.dismiss: Callable[[], object] = bool
        """ends the membership"""
        self.connection: FailoverConnection | None = None
        """the worker's, if its next controller has another address than a lost one"""
        self.address = ""

    def start(self, worker: str, incarnation: int) -> int:
        self.orders.put(WorkerId(worker, incarnation))
        return os.getpid()

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        """End the membership, not the process, when the controller kills the worker; ignore other signals."""
        if number == signal.SIGKILL:
            self.dismiss()

    def leave(self, address: str) -> None:
        """Let the worker leave the lost controller at HOST:PORT."""
        if self.connection is not None:
            self.connection.leave(address)


class _MemberLink(ControlLink):
    """The control channel of a worker that shares its owner's process: it never ends that process."""

    def leave(self, code: int = 0) -> NoReturn:
        if isinstance(getcurrent().parent, greenlet):
            raise GreenletExit
        self.inbox.put(ExitWorker())  # from a thread of this link
        raise SystemExit


class Membership:
    """A member's worker. All methods are for the owner's thread."""

    def __init__(
        self, run_membership: RunMembership, setup: Setup, owned: MemberState, patience_s: float, notify: Notify
    ) -> None:
        """Become a worker of the group, and wait at most ``patience_s`` to be one.

        :param notify: called with lines about lost controllers
        :raises RunStopped: if the group ends or does not accept this process in time.
        """
        self._pool = _OwnProcess()
        self._leaving = ""
        controllers = _controllers(setup.config.fleet, run_membership.address)
        self._lasting = LastingMembership(run_membership, controllers, notify, note)
        self._thread = threading.get_ident()
        self._ending: Ending | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._stay, name="group", daemon=True).start()
        self.worker, incarnation, self._connection = self._wait_for_admission(patience_s, controllers)
        setup = replace(setup, key=run_membership.key, host=run_membership.own_address, reach=run_membership.reach)
        self._link = _MemberLink(self._connection, setup.config.fleet.heartbeat_s, inbox=Inbox())
        if len(controllers.addresses) > 1:
            self._pool.connection = self._connection
        self._pool.dismiss = lambda: self._link.inbox.put(ExitWorker())
        resolved = ResolvedRun(setup.config)
        self.runner = MemberRunner(setup.config, owned, sums_gradients=resolved.replicas_per_plan > 1)
        self._transport = SocketTransport(self._link.inbox, self._connection.own_address, setup.key, setup.reach)  # type: ignore[arg-type]
        self._made = _worker(setup, resolved, self.worker, self._link, self._transport, self.runner, self._pause)
        self._connection.on_move = self._made.follow_controller
        self._greenlet = greenlet(lambda: self._made.run(incarnation))
        self.blocks: Sequence[int] = ()
        """blocks of samples whose gradients the worker waits for; empty once the membership has ended"""

    def _wait_for_admission(self, patience_s: float, controllers: Controllers) -> tuple[str, int, FailoverConnection]:
        """Return the name, the incarnation and the control connection of this process as a worker of the group."""
        run = self._lasting.current
        try:
            order = self._pool.orders.get(timeout=patience_s)
        except queue.Empty:
            raise RunStopped(f"{run.address}: the group did not admit this process within {patience_s:g} s") from None
        if order is None:
            raise self._ended_error()

        def dial(address: str) -> BlockingConnection:
            return call(address, run.key, *order)

        addresses = [run.address, *(at for at in controllers.addresses if at != run.address)]
        try:
            return *order, FailoverConnection(dial(run.address), dial, addresses, controllers.patience_s)
        except (OSError, StrangerError) as error:
            raise ConnectionLost(f"{run.address}: the group's controller does not answer ({error})") from None

    @property
    def address(self) -> str:
        """HOST:PORT of the controller that leads now."""
        return self._lasting.rejected_at or self._lasting.current.address

    @property
    def step(self) -> int:
        """Steps that this process has made."""
        return self.runner.steps

    @property
    def progress(self) -> int:
        """Updates so far, counted over all members."""
        return self.runner.progress

    @property
    def rounds(self) -> int:
        """Rounds of the exchange that this member has settled."""
        return self._made.messages.round_member.rounds

    def take_gradient(self, block: int, updates: bool) -> None:
        """Take the gradient of a block from the parameters; without ``updates`` the owner made no step with it."""
        self.runner.take_gradient(block, updates)

    def report(self, loss: float) -> None:
        """Report the loss of the current step."""
        self.runner.reported = loss

    def advance(self) -> None:
        """Let the worker run until it needs the gradients of :attr:`blocks`, or until the group's end.

        :raises ConnectionLost: if the controller was lost, or has lost this process.
        :raises RunStopped: if this process was dismissed.
        """
        if threading.get_ident() != self._thread:
            raise UserError("a group's samples and optimizer belong to the thread that read the first batch")
        self.blocks = ()
        if self._greenlet.dead:
            return
        self._greenlet.switch()
        if self._greenlet.dead:
            self._close()
            if not self._leaving and (ending := self._wait_for_ending()).how != "over":
                self._lasting.end()
                raise self._ended_error(ending)

    def leave(self) -> None:
        """Leave; the current block, if it is not committed, goes to another member."""
        self._leaving = "left"
        if self._connection.is_lost:
            self._connection.shut_down()
        if not self._greenlet.dead and self._greenlet:
            self._greenlet.switch()
        self._close()
        self._lasting.end()

    def _close(self) -> None:
        """Close the listener and end the threads of the worker."""
        self._pool.empty = True
        self._connection.shut_down()  # ends the threads for orders and heartbeats
        self._transport.close()
        self._link.inbox.close()  # type: ignore[attr-defined]

    def _pause(self, blocks: Sequence[int]) -> None:
        """Return to the owner until it has computed something."""
        self.blocks = blocks
        getcurrent().parent.switch()
        if self._leaving:
            self._made.assignment.report(e.WorkerFailed, detail="its owner left the group", leaves=True)
            self._link.leave()

    def _stay(self) -> None:
        self._ending = self._lasting.serve_until_end(self._pool, lambda: self._leaving)
        self._ended.set()
        self._pool.orders.put(None)
        self._pool.dismiss()  # the worker may wait for orders that will not come

    def _wait_for_ending(self) -> Ending:
        """Return how the membership ended, once it has."""
        self._ended.wait(_END_S)
        return self._ending or Ending("lost", "its worker was dismissed")

    def _ended_error(self, ending: Ending | None = None) -> RunStopped:
        ending = ending or self._wait_for_ending()
        kind = ConnectionLost if ending.how in ("lost", "restarting") else RunStopped
        reason = ending.reason or ending.how
        return kind(f"{self._lasting.current.address}: this process is no longer a member: {reason}; join again")


def _worker(
    setup: Setup,
    resolved: ResolvedRun,
    name: str,
    link: ControlLink,
    transport: SocketTransport,
    runner: MemberRunner,
    compute: Callable[[Sequence[int]], None],
) -> Worker:
    """Return the worker of a member, whose edges end at this machine's address on the route to the controller."""
    link.trouble = lambda: transport.trouble
    return Worker(setup, resolved, name, link, transport, runner, loop=OwnerLoopSteps(runner, resolved, compute))


def note(line: str) -> None:
    """Log a line about the membership."""
    log.info("%s", line)


def require_same(setup: Setup, owned: MemberState) -> None:
    """Raise UserError if this process's model is not that of the group."""
    family = group_family(setup.config.model)
    if family.layout != owned.layout:
        raise UserError(
            f"wrap: the model has {len(owned.parameters)} trained tensors of {owned.parameter_count:,} numbers, and "
            f"the group's has {family.tensors} of {family.numbers:,} with other names, shapes or frozen weights; "
            "use the same model at all members"
        )
    if family.optimizer != owned.optimizer_kind:
        raise UserError(
            f"wrap: the optimizer is {owned.optimizer_kind} here, and {family.optimizer} in the group; use the same"
        )
