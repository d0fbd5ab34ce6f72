"""Workers on the nodes of a Ray cluster.

Ray places workers (placement groups, spread over the nodes) and assigns GPUs, holds an actor on every used node (its
process pool, which forks the workers), and reports nodes that come, drain and die. No step waits for Ray: orders and
reports use control connections (``runtime/fleet/control_connections.py``), tensors use edges.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, cast

from planaria.common.errors import UserError, install_command
from planaria.common.signals import STOPS
from planaria.config import consent
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.base import FleetWork
from planaria.runtime.fleet.bundles import Bundle
from planaria.runtime.fleet.cluster_errors import explain, no_room, reach
from planaria.runtime.fleet.control_connections import ControlListener
from planaria.runtime.fleet.devices import VISIBLE
from planaria.runtime.fleet.files import FileServer
from planaria.runtime.fleet.placement import LOOK_S, Placement
from planaria.runtime.fleet.process import die_with_parent
from planaria.runtime.fleet.process_pool import PoolConfiguration, ProcessPool
from planaria.runtime.fleet.remote import HostReportQueue, RemoteFleet

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise UserError(
        f"fleet.kind = 'ray': Ray cannot be imported ({error}); install it with: {install_command('ray')}"
    ) from None

_ROOM_S = 30
"""seconds to find room for the initial workers"""
_READY_S = 120
"""seconds for each of the first process pools to start"""
_CALLS = 16
"""concurrent calls of a process pool: one watches its node, and starts may wait for imports"""
SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""settings of a cluster started here; with Ray's defaults, workers have a low priority, and a lost node is detected
after a minute"""
_ALL_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""let an actor without a GPU see all of the node's; some versions of Ray hide them"""
_OBJECT_STORE_BYTES = 80 << 20
"""size of Ray's object store, near the least that Ray allows, bytes; planaria stores nothing there"""


class Cluster:
    """A Ray cluster that this process has joined or started."""

    def __init__(self, config: FleetConfig, workers: int) -> None:
        """Connect to or start the cluster; UserError if there is none, or its version differs."""
        self._config = config
        reach(config.address)
        self.host = config.host
        try:
            if config.address == "embedded":
                with _own_handlers():
                    _start(workers * config.threads)
            else:
                connect(config.address)
            if config.address != "embedded" and config.host in ("127.0.0.1", "localhost"):
                self.host = ray.util.get_node_ip_address()  # workers may be on other machines
        except (RuntimeError, ValueError, OSError, RayError) as error:
            raise explain(error, config.address) from None

    def fleet(self, work: FleetWork) -> RayFleet:
        """Return a fleet; UserError if a node is unsuitable, or the cluster too small."""
        return RayFleet(self.host, self._config, work)

    def leave(self) -> None:
        """Disconnect; Ray removes remaining actors and reservations with this process's job."""
        ray.shutdown()


def connect(address: str) -> None:
    """Connect this process to a cluster, with its own signal handlers."""
    with _own_handlers():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def draining_nodes() -> dict[str, int]:
    """Return the ids of the nodes that drain, and their deadlines in milliseconds since 1970; 0: none."""
    draining: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return draining


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep this process's signal handlers. Ray installs its own, which exit immediately without saving the run."""
    before = {number: signal.getsignal(number) for number in STOPS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # not installed by Python
                    signal.signal(number, handler)


def _start(cpus: int) -> None:
    """Start Ray on this machine. It ends with this process, and ignores signals from service managers and terminals,
    which the controller handles. (Ray handles Ctrl-C itself.)
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS} - {signal.SIGINT})
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _system_config=SETTINGS,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RayFleet(RemoteFleet[Placement]):
    """The fleet protocol on a Ray cluster."""

    def __init__(self, host: str, config: FleetConfig, work: FleetWork) -> None:
        """Start the process pools; UserError if a node is unsuitable, or the cluster too small."""

        def make_placement(queue: HostReportQueue, listener: ControlListener) -> Placement:
            listener.on_file_request = FileServer(work.files).serve
            configuration = PoolConfiguration(
                work.prepare_workplace, work.preload, listener.address, listener.key, work.needs,
                consent=consent.current_consent(), start_s=config.start_timeout_s,
            )  # fmt: skip
            placement = Placement(
                _Ray(configuration, work.workers, worker_resources(config, work.needs.cuda)), queue, work.needs
            )
            placement.prepare(_READY_S)
            return placement

        super().__init__(config, host, work.key, make_placement)


def worker_resources(config: FleetConfig, cuda: bool) -> dict[str, float]:
    """Return the resources that Ray reserves for one worker."""
    return {"CPU": config.threads} | ({"GPU": config.gpu_share} if cuda else {})


class _DrainAware(ProcessPool):
    """A process pool that reports the draining of its node."""

    def __init__(self, config: PoolConfiguration) -> None:
        die_with_parent()  # end with the node
        super().__init__(config)

    def until_drained(self) -> int:
        """Wait until the node drains; return the deadline in milliseconds since 1970, 0 without one."""
        me = ray.get_runtime_context().get_node_id()
        while True:
            if me in (draining := draining_nodes()):
                return draining[me]
            time.sleep(LOOK_S)


class _Ray:
    """Ray as :class:`planaria.runtime.fleet.placement.BundleReserver`: placement groups and actors."""

    errors: tuple[type[Exception], ...] = (RayError,)

    def __init__(self, config: PoolConfiguration, workers: int, resources: dict[str, float]) -> None:
        """Reserve a bundle of these ``resources`` for each worker; UserError if there is no room."""
        self._config, self._resources = config, resources
        self._devices: dict[tuple[Bundle, str], Future[str]] = {}
        """device check of each bundle and the node that held it"""
        self._groups: dict[int, PlacementGroup] = {}
        self._numbers = count()
        if not self._groups[self.reserve(workers)].wait(_ROOM_S):
            raise UserError(no_room(workers, resources, ray.cluster_resources(), ray.available_resources()))

    def reserve(self, bundles: int) -> int:
        number = next(self._numbers)
        self._groups[number] = placement_group([self._resources] * bundles, strategy="SPREAD")
        return number

    def where(self) -> Mapping[int, Mapping[int, str | None]]:
        tables = {number: placement_group_table(group) for number, group in self._groups.items()}
        return {n: {index: node or None for index, node in t["bundles_to_node_id"].items()} for n, t in tables.items()}

    def release_slot(self, group: int) -> None:
        remove_placement_group(self._groups.pop(group))

    def device(self, bundle: Bundle, node: str) -> Future[str] | None:
        """A bundle keeps its GPU while it is on a node; a task in it reads which one."""
        if "GPU" not in self._resources:
            return None
        device = self._devices.get((bundle, node))
        if device is None or (device.done() and device.exception() is not None):
            group = self._groups[bundle.group]
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle.number)
            gpus = self._resources["GPU"]
            options = {"num_cpus": 0, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": where}
            device = cast("Future[str]", ray.remote(_device_of_actor).options(**options).remote().future())
            self._devices[bundle, node] = device
        return device

    def open(self, node: str) -> Any:
        """Start an actor on the node, without restarts: the controller decides where workers restart."""
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _CALLS}
        if "GPU" in self._resources:
            options["runtime_env"] = {"env_vars": _ALL_DEVICES}
        options["scheduling_strategy"] = where
        return ray.remote(_DrainAware).options(**options).remote(replace(self._config, machine=node[:8]))

    def ask(self, pool: Any, method: str, *arguments: object) -> Future[Any]:
        return cast("Future[Any]", getattr(pool, method).remote(*arguments).future())

    def kill(self, pool: Any) -> None:
        ray.kill(pool)

    def display_name(self, node: str) -> str:
        """Return its address, and the start of Ray's id."""
        address = next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node), "unknown")
        return f"{address} ({node[:8]})"


def _device_of_actor() -> str:
    """Return the device that Ray assigned to the calling task, or an empty string if it assigns none."""
    return os.environ.get(VISIBLE, "")
