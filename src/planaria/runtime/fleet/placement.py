"""Placement of a run's workers on machines that come and go: bundles, and a process pool on each node with bundles.

:class:`BundleReserver` reserves bundles and opens process pools; Ray is one (``runtime/fleet/ray.py``).
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
from planaria.config.names import WorkerId
from planaria.runtime.fleet.base import Leaving
from planaria.runtime.fleet.bundles import Bundle, Bundles
from planaria.runtime.fleet.cluster_errors import cannot_serve, require_suitable, why
from planaria.runtime.fleet.devices import ON_CPUS, DeviceNeeds
from planaria.runtime.fleet.process_pool import NodeFacts
from planaria.runtime.fleet.remote import HostReportQueue, Lost, Spawned

LOOK_S = 1.0
"""seconds between checks of the bundles' nodes, and of a node's draining"""
_WAIT_S = 600.0
"""seconds that a worker's start may wait for room, since machines may have to be rented"""
_FETCH_S = 6 * 3600.0
"""seconds for the first nodes to fetch the run's files; each piece has its own deadline (``files.py``)"""
_IDLE_S = 60.0
"""seconds after which an unused extra bundle is returned"""
_CLOSE_S = 2.0


class BundleReserver(Protocol):
    """Reserves bundles and opens process pools. Methods are called by one thread at a time, ``ask`` by any."""

    errors: tuple[type[Exception], ...]
    """raised when it cannot answer, or not now"""

    def reserve(self, bundles: int) -> int:
        """Reserve a group of bundles spread over the nodes, and return its number; room may be found later or never."""

    def where(self) -> Mapping[int, Mapping[int, str | None]]:
        """Return group → number of a bundle → its node, None while there is no room."""

    def release_slot(self, group: int) -> None: ...

    def device(self, bundle: Bundle, node: str) -> Future[str] | None:
        """Return the device reserved with a bundle, or None if none is needed. Fails like ``ask``."""

    def open(self, node: str) -> Any:
        """Open a node's process pool (:class:`planaria.runtime.fleet.process_pool.ProcessPool`)."""

    def ask(self, pool: Any, method: str, *arguments: object) -> Future[Any]:
        """Call a process pool's method; the future fails if the pool is dead or dies."""

    def kill(self, pool: Any) -> None: ...

    def display_name(self, node: str) -> str:
        """Return a node's name for users."""


@dataclass
class _Request:
    worker: WorkerId
    since: float = field(default_factory=time.monotonic)


class Placement:
    """Bundles and process pools of one run. All but ``signal`` runs as jobs in one thread."""

    def __init__(self, machines: BundleReserver, queue: HostReportQueue, needs: DeviceNeeds = ON_CPUS) -> None:
        """Start with the bundles that ``machines`` has reserved."""
        self._machines = machines
        self._queue = queue
        self._needs = needs
        self._bundles = Bundles()
        self._nodes: dict[str, Any] = {}
        """node → its process pool"""
        self._assigned: dict[WorkerId, tuple[Bundle, str]] = {}
        self._homes: dict[WorkerId, str] = {}
        """also of incarnations that count as dead"""
        self._waiting: list[_Request] = []
        self._silent: list[Bundle] = []
        """resting bundles whose process pools did not answer"""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="placement", daemon=True)

    def prepare(self, patience_s: float) -> None:
        """Open a process pool on every node with bundles, let each fetch the run's files, then start the thread.

        :raises UserError: if a node is unsuitable, or cannot get the files.
        """
        self._update_bundles()
        for node in self._bundles.nodes():
            self._open(node)
        for node, node_facts in self._answers("facts", patience_s):
            require_suitable(node, node_facts, self._needs)
        for node, failure in self._answers("fetch_files", _FETCH_S):
            if failure:
                raise UserError(f"Ray node {node}: {failure}")
        self._thread.start()

    # ---- called by the controller's thread

    def start(self, worker: str, incarnation: int) -> None:
        self._jobs.put(partial(self._assign, _Request(WorkerId(worker, incarnation))))

    def release_slot(self, worker: str, incarnation: int) -> None:
        self._jobs.put(partial(self._release, WorkerId(worker, incarnation)))

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        pool = self._nodes.get(self._homes.get(WorkerId(worker, incarnation), ""))
        if pool is not None:
            self._machines.ask(pool, "signal", worker, incarnation, int(number))

    def close(self) -> None:
        """End all workers and process pools; the owner releases the reservations."""
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
            with contextlib.suppress(*self._machines.errors):  # checked again at the next look
                job()

    def _open(self, node: str) -> Any:
        pool = self._nodes[node] = self._machines.open(node)
        self._ask(pool, "until_drained", then=partial(self._end_watch, node, pool))
        self._ask(pool, "facts", then=partial(self._check_node, node, pool))
        return pool

    def _answers(self, method: str, patience_s: float) -> Iterator[tuple[str, Any]]:
        """Yield each node's name and its process pool's answer; UserError if there is none."""
        answers = {node: self._machines.ask(pool, method) for node, pool in self._nodes.items()}
        errors: tuple[type[Exception], ...] = (*self._machines.errors, TimeoutError)
        for node, answer in answers.items():
            try:
                yield self._machines.display_name(node), answer.result(patience_s)
            except errors as error:
                raise cannot_serve(self._machines.display_name(node), error) from None

    def _ask(self, pool: Any, method: str, *arguments: object, then: Callable[[Future[Any]], None]) -> None:
        """Call a process pool's method, and run ``then`` as a job afterwards."""
        answer = self._machines.ask(pool, method, *arguments)
        answer.add_done_callback(lambda future: self._jobs.put(partial(then, future)))

    def _assign(self, request: _Request) -> None:
        """Start a worker on a free bundle, or let it wait for one."""
        free = self._bundles.take()
        if free is None:
            self._waiting.append(request)
            return
        bundle, node = free
        self._assigned[request.worker] = free
        self._homes[request.worker] = node
        device = self._machines.device(bundle, node)
        if device is None:
            self._start(request, bundle, node)
            return
        start = partial(self._start_on_device, request, bundle, node)
        device.add_done_callback(lambda future: self._jobs.put(partial(start, future)))

    def _start_on_device(self, request: _Request, bundle: Bundle, node: str, future: Future[str]) -> None:
        """Start a worker once its bundle's device is known."""
        if future.exception() is not None:
            self._record_start(request, bundle, future)
        elif self._assigned.get(request.worker, (None, ""))[0] == bundle:
            self._start(request, bundle, node, future.result())

    def _start(self, request: _Request, bundle: Bundle, node: str, *device: str) -> None:
        pool = self._nodes.get(node) or self._open(node)
        self._ask(pool, "start", *request.worker, *device, then=partial(self._record_start, request, bundle))

    def _record_start(self, request: _Request, bundle: Bundle, future: Future[Any]) -> None:
        if self._assigned.get(request.worker, (None, ""))[0] != bundle:
            return  # cancelled
        if future.exception() is None:
            self._queue.put(Spawned(*request.worker))
        else:  # the process pool is dead, and perhaps its node
            self._release(request.worker)
            self._waiting.append(request)

    def _release(self, worker: WorkerId) -> None:
        """Free a worker's bundle once its node answers, or the bundle has moved."""
        self._waiting = [request for request in self._waiting if request.worker != worker]
        bundle, node = self._assigned.pop(worker, (None, ""))
        if bundle is not None:
            self._bundles.rest(bundle)
            self._probe(bundle, node)

    def _probe(self, bundle: Bundle, node: str) -> None:
        pool = self._nodes.get(node) or self._open(node)
        self._ask(pool, "ping", then=partial(self._record_answer, bundle))

    def _record_answer(self, bundle: Bundle, future: Future[None]) -> None:
        if future.exception() is None:
            self._bundles.free(bundle)
            self._assign_waiting()
        else:
            self._silent.append(bundle)  # probed again at the next look

    def _assign_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._assign(request)

    def _check_node(self, node: str, pool: Any, future: Future[NodeFacts | str]) -> None:
        """Close a new process pool on an unsuitable node: first by its facts, then by its files."""
        if future.exception() is not None:
            return  # workers that should start there wait for another
        name, answer = self._machines.display_name(node), future.result()
        try:
            if isinstance(answer, NodeFacts):
                require_suitable(name, answer, self._needs)
                self._ask(pool, "fetch_files", then=partial(self._check_node, node, pool))
            elif answer:
                raise UserError(f"Ray node {name}: {answer}")
        except UserError as error:
            self._bundles.avoided_nodes.add(node)
            self._lose_all(node, str(error))
            self._machines.kill(pool)

    def _end_watch(self, node: str, pool: Any, future: Future[int]) -> None:
        """Handle the end of a pool's watch: its node drains, or it is dead."""
        if self._nodes.get(node) is not pool:
            return
        error = future.exception()
        if error is not None:  # may be a network failure only
            self._ask(pool, "ping", then=partial(self._confirm_loss, node, pool, error))
        else:
            remaining_s = future.result() / 1e3 - time.time()
            deadline = f", gone in {remaining_s:.0f} s" if remaining_s > 0 else ""
            self._bundles.avoided_nodes.add(node)
            for worker in self._workers_at(node):
                self._queue.put(Leaving(*worker, f"node {self._machines.display_name(node)} is draining{deadline}"))

    def _confirm_loss(self, node: str, pool: Any, error: BaseException, second: Future[None]) -> None:
        if self._nodes.get(node) is not pool:
            return
        if second.exception() is None:
            self._ask(pool, "until_drained", then=partial(self._end_watch, node, pool))
        else:
            del self._nodes[node]
            self._lose_all(node, f"node {self._machines.display_name(node)}: {why(error)}")

    def _lose_all(self, node: str, detail: str) -> None:
        for worker in self._workers_at(node):
            self._queue.put(Lost(*worker, detail))

    def _workers_at(self, node: str) -> list[WorkerId]:
        return [worker for worker, (_, home) in self._assigned.items() if home == node]

    def _look(self) -> None:
        """Check for changes that no call reports."""
        self._update_bundles()
        silent, self._silent = self._silent, []
        for bundle in silent:
            if (node := self._bundles.resting_at(bundle)) is not None:
                self._probe(bundle, node)
        self._assign_waiting()
        for _ in range(len(self._waiting) - self._bundles.to_come()):
            self._machines.reserve(1)
        now = time.monotonic()
        for request in [request for request in self._waiting if now - request.since > _WAIT_S]:
            self._waiting.remove(request)
            self._queue.put(Lost(*request.worker, f"the cluster had no room for it within {_WAIT_S:g} s"))
        if not self._waiting:
            for number in self._bundles.idle(_IDLE_S):
                self._machines.release_slot(number)
                self._bundles.forget(number)

    def _update_bundles(self) -> None:
        for number, nodes in self._machines.where().items():
            self._bundles.placed(number, nodes)
