"""The placement of a run's workers on machines that come and go: seats, and a process pool on every node with some.

:class:`Machines` reserves seats and opens process pools; Ray is one (``runtime/fleet/ray.py``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from planaria.common.errors import UserError
from planaria.runtime.fleet.base import Leaving
from planaria.runtime.fleet.cluster_errors import cannot_serve, refuse_unfit, refuse_unsettled, why
from planaria.runtime.fleet.devices import ON_CPUS, Needs
from planaria.runtime.fleet.process_pool import Facts
from planaria.runtime.fleet.remote import Born, Ears, Lost
from planaria.runtime.fleet.seats import Seat, Seats

LOOK_S = 1.0
"""between two looks where the seats are, and between two looks of a process pool whether its node drains"""
_WAIT_S = 600.0
"""how long a birth may wait for room: machines may have to be rented first"""
_FETCH_S = 6 * 3600.0
"""how long the first nodes may fetch the run's files; each piece has a deadline of its own (``files.py``)"""
_IDLE_S = 60.0
"""an extra seat that nobody has used for so long is given back"""
_CLOSE_S = 2.0

Name = tuple[str, int]
"""worker, incarnation"""


class Machines(Protocol):
    """Reserves seats and opens process pools. Its methods are called by one thread at a time, ``ask`` by any."""

    errors: tuple[type[Exception], ...]
    """what it raises when it cannot tell, or not now"""

    def reserve(self, seats: int) -> int:
        """Ask for a group of seats, spread over the nodes; the group's number. Room may be found later, or never."""

    def where(self) -> Mapping[int, Mapping[int, str | None]]:
        """Group → seat → the node it is on, if there is room for it."""

    def give_back(self, group: int) -> None: ...

    def device(self, seat: Seat, node: str) -> Future[str] | None:
        """The device that is reserved with a seat on a node; None where none is needed. Fails as ``ask`` does."""

    def open(self, node: str) -> Any:
        """The process pool of a node (:class:`planaria.runtime.fleet.process_pool.ProcessPool`), which can be asked."""

    def ask(self, pool: Any, method: str, *arguments: object) -> Future[Any]:
        """Call a process pool's method. The future fails when the process pool is dead, or dies meanwhile."""

    def kill(self, pool: Any) -> None: ...

    def called(self, node: str) -> str:
        """A node as its owner knows it."""


@dataclass
class _Birth:
    name: Name
    since: float = field(default_factory=time.monotonic)


class Placement:
    """Seats and process pools of one run. But for ``signal``, all is done by one thread, job by job."""

    def __init__(self, machines: Machines, ears: Ears, needs: Needs = ON_CPUS) -> None:
        """Start with the seats that ``machines`` has reserved already."""
        self._machines, self._ears, self._needs = machines, ears, needs
        self._seats = Seats()
        self._nodes: dict[str, Any] = {}
        """node → its process pool"""
        self._seated: dict[Name, tuple[Seat, str]] = {}
        self._homes: dict[Name, str] = {}
        """also of those that count as dead"""
        self._waiting: list[_Birth] = []
        self._silent: list[Seat] = []
        """resting, and their process pools did not answer"""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="places", daemon=True)

    def prepare(self, patience_s: float) -> None:
        """Open a process pool on every node with seats, let each have the run's files, then begin to work.

        :raises UserError: when a node is not fit, or cannot have the files.
        """
        self._find_seats()
        for node in self._seats.nodes():
            self._open(node)
        for node, found in self._answers("facts", patience_s):
            refuse_unfit(node, found, self._needs)
        for node, unsettled in self._answers("settle", _FETCH_S):
            refuse_unsettled(node, unsettled)
        self._thread.start()

    # ---- called by the controller's thread

    def start(self, worker: str, incarnation: int) -> None:
        self._jobs.put(partial(self._seat, _Birth((worker, incarnation))))

    def give_back(self, worker: str, incarnation: int) -> None:
        self._jobs.put(partial(self._unseat, (worker, incarnation)))

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        pool = self._nodes.get(self._homes.get((worker, incarnation), ""))
        if pool is not None:
            self._machines.ask(pool, "signal", worker, incarnation, int(number))

    def close(self) -> None:
        """End all workers and process pools; the reservations are their owner's to give back."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        wait([self._machines.ask(pool, "end") for pool in self._nodes.values()], _CLOSE_S)
        for pool in self._nodes.values():
            self._machines.kill(pool)

    # ---- the jobs

    def _work(self) -> None:
        look = time.monotonic() + LOOK_S
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, look - time.monotonic()))
            except Empty:
                job, look = self._look, time.monotonic() + LOOK_S
            if job is None:
                return
            with contextlib.suppress(*self._machines.errors):  # the next look will tell more
                job()

    def _open(self, node: str) -> Any:
        pool = self._nodes[node] = self._machines.open(node)
        self._ask(pool, "until_drained", then=partial(self._ended, node, pool))
        self._ask(pool, "facts", then=partial(self._judge, node, pool))
        return pool

    def _answers(self, method: str, patience_s: float) -> Iterator[tuple[str, Any]]:
        """Each node's name and its process pool's answer, before any work begins; UserError when there is none."""
        asked = {node: self._machines.ask(pool, method) for node, pool in self._nodes.items()}
        errors: tuple[type[Exception], ...] = (*self._machines.errors, TimeoutError)
        for node, answer in asked.items():
            try:
                yield self._machines.called(node), answer.result(patience_s)
            except errors as error:
                raise cannot_serve(self._machines.called(node), error) from None

    def _ask(self, pool: Any, method: str, *arguments: object, then: Callable[[Future[Any]], None]) -> None:
        """Call a process pool's method, and have a job done when the call has ended."""
        asked = self._machines.ask(pool, method, *arguments)
        asked.add_done_callback(lambda future: self._jobs.put(partial(then, future)))

    def _seat(self, birth: _Birth) -> None:
        """Begin a birth where there is room, or let it wait for some."""
        found = self._seats.take()
        if found is None:
            self._waiting.append(birth)
            return
        self._seated[birth.name], node = found, found[1]
        self._homes[birth.name] = node
        given = self._machines.device(*found)
        if given is None:
            self._start(birth, found[0], node)
        else:
            given.add_done_callback(lambda future: self._jobs.put(partial(self._given, birth, *found, future)))

    def _given(self, birth: _Birth, seat: Seat, node: str, future: Future[str]) -> None:
        """The seat's device is known."""
        if future.exception() is not None:
            self._begun(birth, seat, future)
        elif self._seated.get(birth.name, (None, ""))[0] == seat:
            self._start(birth, seat, node, future.result())

    def _start(self, birth: _Birth, seat: Seat, node: str, *device: str) -> None:
        pool = self._nodes.get(node) or self._open(node)
        self._ask(pool, "start", *birth.name, *device, then=partial(self._begun, birth, seat))

    def _begun(self, birth: _Birth, seat: Seat, future: Future[Any]) -> None:
        if self._seated.get(birth.name, (None, ""))[0] != seat:
            return  # given up meanwhile
        if future.exception() is None:
            self._ears.tell(Born(*birth.name))
        else:  # the process pool is dead, and perhaps its node
            self._unseat(birth.name)
            self._waiting.append(birth)

    def _unseat(self, name: Name) -> None:
        """Its seat is another's once its node has shown that it is well, or the seat has moved elsewhere."""
        self._waiting = [birth for birth in self._waiting if birth.name != name]
        seat, node = self._seated.pop(name, (None, ""))
        if seat is not None:
            self._seats.rest(seat)
            self._probe(seat, node)

    def _probe(self, seat: Seat, node: str) -> None:
        pool = self._nodes.get(node) or self._open(node)
        self._ask(pool, "ping", then=partial(self._answered, seat))

    def _answered(self, seat: Seat, future: Future[None]) -> None:
        if future.exception() is None:
            self._seats.free(seat)
            self._seat_waiting()
        else:
            self._silent.append(seat)  # asked again at the next look

    def _seat_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for birth in waiting:
            self._seat(birth)

    def _judge(self, node: str, pool: Any, future: Future[Facts | str]) -> None:
        """Close a process pool on an unfit node, opened while the run goes on; after its facts, by its files."""
        if future.exception() is not None:
            return  # whoever was to be born there waits for another
        called, found = self._machines.called(node), future.result()
        try:
            if isinstance(found, Facts):
                refuse_unfit(called, found, self._needs)
                self._ask(pool, "settle", then=partial(self._judge, node, pool))
            else:
                refuse_unsettled(called, found)
        except UserError as error:
            self._seats.shunned.add(node)
            self._lose_all(node, str(error))
            self._machines.kill(pool)

    def _ended(self, node: str, pool: Any, future: Future[int]) -> None:
        """A process pool's watch is over: its node drains, or it is dead."""
        if self._nodes.get(node) is not pool:
            return
        error = future.exception()
        if error is not None:  # perhaps the network's fault alone
            self._ask(pool, "ping", then=partial(self._mourn, node, pool, error))
        else:
            left = future.result() / 1e3 - time.time()
            gone = f", gone in {left:.0f} s" if left > 0 else ""
            self._seats.shunned.add(node)
            for name in self._seated_at(node):
                self._ears.tell(Leaving(*name, f"node {self._machines.called(node)} is draining{gone}"))

    def _mourn(self, node: str, pool: Any, error: BaseException, second: Future[None]) -> None:
        if self._nodes.get(node) is not pool:
            return
        if second.exception() is None:
            self._ask(pool, "until_drained", then=partial(self._ended, node, pool))
        else:
            del self._nodes[node]
            self._lose_all(node, f"node {self._machines.called(node)}: {why(error)}")

    def _lose_all(self, node: str, detail: str) -> None:
        for name in self._seated_at(node):
            self._ears.tell(Lost(*name, detail))

    def _seated_at(self, node: str) -> list[Name]:
        return [name for name, (_, where) in self._seated.items() if where == node]

    def _look(self) -> None:
        """What changes without a call that ends."""
        self._find_seats()
        silent, self._silent = self._silent, []
        for seat in silent:
            if (node := self._seats.resting_at(seat)) is not None:
                self._probe(seat, node)
        self._seat_waiting()
        for _ in range(len(self._waiting) - self._seats.to_come()):
            self._machines.reserve(1)
        now = time.monotonic()
        for birth in [birth for birth in self._waiting if now - birth.since > _WAIT_S]:
            self._waiting.remove(birth)
            self._ears.tell(Lost(*birth.name, f"the cluster has had no room for it for {_WAIT_S:g} s"))
        if not self._waiting:
            for number in self._seats.idle(_IDLE_S):
                self._machines.give_back(number)
                self._seats.forget(number)

    def _find_seats(self) -> None:
        for number, nodes in self._machines.where().items():
            self._seats.placed(number, nodes)
