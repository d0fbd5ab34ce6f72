"""Workers on the nodes of a Ray cluster.

Ray decides where workers are (placement groups: one CPU each, spread over the nodes), holds one actor on every node
that has some (its nursery, which forks them), and says when nodes come, drain and die. Nothing that a step waits for
goes through Ray: orders and reports travel on lines of their own (``fleet/switchboard.py``), tensors on edges.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from planaria.config import FleetConfig
from planaria.errors import UserError
from planaria.fleet.cluster_errors import cannot_serve, explain, reach, refuse_unfit
from planaria.fleet.ground import Work
from planaria.fleet.nursery import Facts, Nursery, Orders
from planaria.fleet.remote import Born, Ears, Lost, RemoteFleet
from planaria.fleet.seats import Seat, Seats
from planaria.fleet.switchboard import Switchboard

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise UserError(
        f"fleet.kind = 'ray': Ray cannot be imported ({error}); install it with `pip install 'planaria[ray]'`"
    ) from None

_ROOM_S = 30
"""how long a cluster may take to find room for the whole crew"""
_READY_S = 120
"""how long the first nurseries may take to start"""
_LOOK_S = 1.0
"""between two looks where the seats are, and between two looks of a nursery whether its node drains"""
_APART_S = 3.0
"""between two workers that leave a draining node: the first one's stage is rebuilt by then"""
_WAIT_S = 600.0
"""how long a birth may wait for room: machines may have to be rented first"""
_IDLE_S = 60.0
"""an extra seat that nobody has used for so long is given back"""
_CLOSE_S = 2.0
_CALLS = 16
"""of one nursery at the same time; one of them watches its node, and births may have to wait for imports"""
_SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""for a cluster that is started here; by Ray's own values workers give way to all else on a busy machine, and a minute
passes until a node is known to be gone"""
_OBJECT_STORE_BYTES = 80 << 20
"""about the least that Ray allows: nothing of ours goes there"""


Name = tuple[str, int]
"""worker, incarnation"""


class Cluster:
    """A Ray cluster that this process has joined, or has started for itself."""

    def __init__(self, config: FleetConfig, crew: int) -> None:
        """:raises UserError: when there is none at the address, or it is of another version."""
        self._config = config
        reach(config.address)
        self.host = config.host
        try:
            if config.address == "embedded":
                _start(crew)
            else:
                ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
                if config.host in ("127.0.0.1", "localhost"):  # the workers may be elsewhere
                    self.host = ray.util.get_node_ip_address()
        except (RuntimeError, ValueError, OSError, RayError) as error:
            raise explain(error, config.address) from None

    def fleet(self, work: Work) -> RayFleet:
        """:raises UserError: when a node is not fit, or the cluster too small."""
        return RayFleet(self.host, self._config.heartbeat_s, self._config.missed, work)

    def leave(self) -> None:
        """Actors and reservations that are left go with this process's job."""
        ray.shutdown()


def _start(crew: int) -> None:
    """Start Ray on this machine. It dies with this process, and like its workers it is deaf to SIGTERM, which service
    managers send to all processes of a run: only the controller is to act on it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        ray.init(
            address="local",
            num_cpus=crew,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _system_config=_SETTINGS,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RayFleet(RemoteFleet):
    """The fleet protocol on a Ray cluster."""

    def __init__(self, host: str, heartbeat_s: float, missed: int, work: Work) -> None:
        """:raises UserError: when a node is not fit, or the cluster too small; no worker has started then."""
        super().__init__(host, heartbeat_s, missed, partial(_RayHosts, work))


class _DrainAware(Nursery):
    """A nursery that knows its node's fate."""

    def until_drained(self) -> int:
        """Return when the node begins to drain: the deadline in milliseconds since 1970, 0 if there is none."""
        me = ray.get_runtime_context().get_node_id()
        while True:
            draining: dict[str, int] = ray._private.state.state.get_draining_nodes()
            if me in draining:
                return draining[me]
            time.sleep(_LOOK_S)

    def ping(self) -> None:
        """Answer."""


@dataclass
class _Node:
    nursery: Any
    """its actor's handle"""
    drains: str = ""
    """how the news of the node's end reads"""


@dataclass
class _Birth:
    name: Name
    since: float = field(default_factory=time.monotonic)


class _RayHosts:
    """Seats and nurseries. But for ``signal``, everything after the beginning is done by one thread, as a job."""

    def __init__(self, work: Work, ears: Ears, switchboard: Switchboard) -> None:
        self._ears, self._crew = ears, work.crew
        folders = tuple(folder.absolute() for folder in work.folders)
        self._orders = Orders(work.entry, work.preload, switchboard.address, switchboard.key, Path.cwd(), folders)
        self._seats = Seats()
        self._groups: dict[int, PlacementGroup] = {}
        self._numbers = count()
        self._nodes: dict[str, _Node] = {}
        self._seated: dict[Name, tuple[Seat, str]] = {}
        self._homes: dict[Name, str] = {}
        """also of those that count as dead"""
        self._waiting: list[_Birth] = []
        self._silent: list[Seat] = []
        """resting, and their nurseries did not answer"""
        self._next_departure = 0.0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._gather()
        self._thread = threading.Thread(target=self._work, name="ray", daemon=True)
        self._thread.start()

    # ---- called by the controller's thread

    def start(self, worker: str, incarnation: int) -> None:
        self._jobs.put(partial(self._seat, _Birth((worker, incarnation))))

    def give_back(self, worker: str, incarnation: int) -> None:
        self._jobs.put(partial(self._unseat, (worker, incarnation)))

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        home = self._nodes.get(self._homes.get((worker, incarnation), ""))
        if home is not None:
            home.nursery.signal.remote(worker, incarnation, int(number))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        ray.wait([node.nursery.end.remote() for node in self._nodes.values()] or [ray.put(None)], timeout=_CLOSE_S)
        for node in self._nodes.values():
            ray.kill(node.nursery)
        for group in self._groups.values():
            remove_placement_group(group)

    # ---- the beginning

    def _gather(self) -> None:
        """Reserve seats for the whole crew, and see that their nodes are fit."""
        if not self._reserve(self._crew).wait(_ROOM_S):
            have, free = (all_of().get("CPU", 0) for all_of in (ray.cluster_resources, ray.available_resources))
            raise UserError(
                f"the Ray cluster has {have:g} CPUs, {free:g} of them free; this run needs {self._crew}, one for each "
                "stage and spare: add nodes (or say `ray start --num-cpus` more), or choose fewer fleet.spares"
            )
        self._find_seats()
        opened = {node: self._open(node) for node in self._seats.nodes()}
        for node, home in opened.items():
            try:
                refuse_unfit(_called(node), ray.get(home.nursery.facts.remote(), timeout=_READY_S))
            except RayError as error:
                raise cannot_serve(_called(node), error) from None

    def _reserve(self, seats: int) -> PlacementGroup:
        group: PlacementGroup = placement_group([{"CPU": 1}] * seats, strategy="SPREAD")
        self._groups[next(self._numbers)] = group
        return group

    def _open(self, node: str) -> _Node:
        """A nursery on a node. No restarts: who is born again, and where, is the controller's to decide."""
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _CALLS, "scheduling_strategy": where}
        home = self._nodes[node] = _Node(ray.remote(_DrainAware).options(**options).remote(self._orders))
        self._then(home.nursery.until_drained.remote(), partial(self._ended, node, home))
        self._then(home.nursery.facts.remote(), partial(self._judge, node, home))
        return home

    # ---- the jobs

    def _work(self) -> None:
        look = time.monotonic() + _LOOK_S
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, look - time.monotonic()))
            except Empty:
                job, look = self._look, time.monotonic() + _LOOK_S
            if job is None:
                return
            job()

    def _then(self, ref: Any, heed: Callable[[Future[Any]], None]) -> None:
        """Have a job done when a call of an actor has ended."""
        ref.future().add_done_callback(lambda future: self._jobs.put(partial(heed, future)))

    def _seat(self, birth: _Birth) -> None:
        """Begin a birth where there is room, or let it wait for some."""
        found = self._seats.take()
        if found is None:
            self._waiting.append(birth)
            return
        self._seated[birth.name], node = found, found[1]
        self._homes[birth.name] = node
        home = self._nodes.get(node) or self._open(node)
        self._then(home.nursery.start.remote(*birth.name), partial(self._begun, birth, found[0]))

    def _begun(self, birth: _Birth, seat: Seat, future: Future[Any]) -> None:
        if self._seated.get(birth.name, (None, ""))[0] != seat:
            return  # given up meanwhile
        if future.exception() is None:
            self._ears.tell(Born(*birth.name))
        else:  # the nursery is dead, and perhaps its node
            self._unseat(birth.name)
            self._waiting.append(birth)

    def _unseat(self, name: Name) -> None:
        """Its seat is another's once its node has shown that it is well, or Ray has moved the seat elsewhere."""
        self._waiting = [birth for birth in self._waiting if birth.name != name]
        seat, node = self._seated.pop(name, (None, ""))
        if seat is not None:
            self._seats.rest(seat)
            self._probe(seat, node)

    def _probe(self, seat: Seat, node: str) -> None:
        home = self._nodes.get(node) or self._open(node)
        self._then(home.nursery.ping.remote(), partial(self._answered, seat))

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

    def _judge(self, node: str, home: _Node, future: Future[Facts]) -> None:
        """Close a nursery that has been opened on an unfit node while the run goes on."""
        try:
            refuse_unfit(_called(node), future.result())
        except RayError:
            return  # whoever was to be born there is told
        except UserError as error:
            self._seats.shunned.add(node)
            self._lose_all(node, str(error))
            ray.kill(home.nursery)

    def _ended(self, node: str, home: _Node, future: Future[int]) -> None:
        """A nursery's watch is over: its node drains, or it is dead."""
        if self._nodes.get(node) is not home:
            return
        error = future.exception()
        if error is None:
            left = future.result() / 1e3 - time.time()
            home.drains = f"node {_called(node)} is draining" + (f", gone in {left:.0f} s" if left > 0 else "")
            self._seats.shunned.add(node)
        else:
            del self._nodes[node]
            self._lose_all(node, f"node {_called(node)}: {_first_line(error)}")

    def _lose_all(self, node: str, detail: str) -> None:
        for name in [name for name, (_, where) in self._seated.items() if where == node]:
            self._ears.tell(Lost(*name, detail))

    def _look(self) -> None:
        """What changes without a call that ends."""
        self._find_seats()
        silent, self._silent = self._silent, []
        for seat in silent:
            if (node := self._seats.resting_at(seat)) is not None:
                self._probe(seat, node)
        self._seat_waiting()
        leaving = [name for name, (_, node) in self._seated.items() if node in self._nodes and self._nodes[node].drains]
        for _ in range(len(self._waiting) + bool(leaving) - self._seats.to_come()):
            self._reserve(1)
        now = time.monotonic()
        for birth in [birth for birth in self._waiting if now - birth.since > _WAIT_S]:
            self._waiting.remove(birth)
            self._ears.tell(Lost(*birth.name, f"the Ray cluster has had no room for it for {_WAIT_S:g} s"))
        if leaving and now >= self._next_departure and self._seats.free_now():
            self._next_departure = now + _APART_S
            self._ears.tell(Lost(*leaving[0], self._nodes[self._seated[leaving[0]][1]].drains))
            self.signal(*leaving[0], signal.SIGKILL)
        if not leaving and not self._waiting:
            for number in self._seats.idle(_IDLE_S):
                remove_placement_group(self._groups.pop(number))
                self._seats.forget(number)

    def _find_seats(self) -> None:
        for number, group in self._groups.items():
            bundles = placement_group_table(group)["bundles_to_node_id"]
            self._seats.placed(number, {bundle: node or None for bundle, node in bundles.items()})


def _called(node: str) -> str:
    """A node as the user knows it: its address, and the beginning of Ray's name for it."""
    address = next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node), "unknown")
    return f"{address} ({node[:8]})"


def _first_line(error: BaseException) -> str:
    """The line that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("The actor ")), (lines or [type(error).__name__])[0])[:200]
