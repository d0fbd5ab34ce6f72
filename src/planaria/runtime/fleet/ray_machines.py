"""Nodes of a Ray cluster that join a run, as other machines do.

Each is a detached actor that runs the joining process (``runtime/engine/machine_service.py``). It outlives the command
that created it and the run's controller, and ends with the run. If its node drains or dies, Ray starts it on another
one, where it joins again.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from planaria.common.errors import UserError
from planaria.common.stdio import Notify
from planaria.runtime.fleet.cluster_errors import cannot_serve, explain, reach
from planaria.runtime.fleet.joined_machine import JOINED
from planaria.runtime.fleet.placement import LOOK_S
from planaria.runtime.fleet.ray import connect, draining_nodes
from planaria.runtime.fleet.spawner import spawner

import ray  # isort: skip (``planaria.runtime.fleet.ray`` reports that it is missing)
from ray.exceptions import GetTimeoutError, RayError

log = logging.getLogger(__name__)
_JOIN_S = 120.0
"""seconds for an actor to find room, import what workers need, and join"""
_REPORT_S = 30.0
"""seconds that an actor waits to report why it could not join"""
Serve = Callable[[int], None]
"""main function of the joining process: writes to the given file descriptor, and prints ``JOINED`` once it has joined
"""


def join_nodes(
    cluster: str, name: str, machines: int, resources: Mapping[str, float], serve: Serve, preload: Sequence[str],
    notify: Notify,
) -> None:  # fmt: skip
    """Let ``machines`` actors, spread over the nodes of a cluster, join a run; return once they have.

    :param cluster: Ray's address, or "auto"
    :param name: start of the actors' names
    :param resources: that Ray reserves for each machine: num_cpus, num_gpus
    :param serve: importable on the nodes
    :param preload: modules with which the joining process is forked
    :raises UserError: if the cluster has no room for them, or one cannot join; then none does.
    """
    with _connect(cluster):
        kind, random = ray.remote(_Machine), secrets.token_hex(4)
        labels = [f"{name}-{random}-{number}" for number in range(machines)]
        options = {
            "lifetime": "detached", "namespace": "planaria", "max_restarts": -1, "max_concurrency": 2,
            "scheduling_strategy": "SPREAD", **resources,
        }  # fmt: skip
        joining = {label: kind.options(name=label, **options).remote(serve, preload) for label in labels}
        try:
            for label, actor in joining.items():
                _require_joined(label, actor, time.monotonic() + _JOIN_S)
                notify(f"{label} has joined")
        except BaseException:
            for actor in joining.values():
                with suppress(RayError):
                    ray.kill(actor)
            raise


@contextmanager
def _connect(cluster: str) -> Iterator[None]:
    reach(cluster, "--ray")
    try:
        connect(cluster)
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise explain(error, cluster, "--ray") from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_joined(label: str, actor: Any, until: float) -> None:
    """Wait until a machine has joined.

    :raises UserError: if it cannot, or is not ready in time.
    """
    try:
        answer = ray.get(actor.unjoined.remote(), timeout=until - time.monotonic())
    except GetTimeoutError:
        have, free = ray.cluster_resources(), ray.available_resources()
        room = ", ".join(
            f"{have.get(kind, 0):g} {kind}s, {free.get(kind, 0):g} of them free" for kind in ("CPU", "GPU")
        )
        raise UserError(
            f"{label} has not joined within {_JOIN_S:g} s; the Ray cluster has {room}; add nodes, or use fewer "
            "--machines or --workers"
        ) from None
    except RayError as error:
        raise cannot_serve(label, error) from None
    if answer:
        raise UserError(f"{label} cannot join: {answer}")


class _Machine:
    """The actor: runs the joining process of its node, and ends with it."""

    def __init__(self, serve: Serve, preload: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="planaria-join-"))
        self._output = self._folder / "output"
        self._reported = threading.Event()
        with self._output.open("w") as output:
            self._process = spawner().spawn("planaria join", serve, preload, [os.dup(output.fileno())])
        threading.Thread(target=self._watch, name="join", daemon=True).start()

    def unjoined(self) -> str:
        """Wait until it has joined; return "", or why it could not."""
        while JOINED not in self._lines():
            if self._has_ended():
                self._reported.set()
                return self._process.failure or " ".join(self._lines()[-1:]) or "it has ended"
            time.sleep(LOOK_S / 10)
        return ""

    def _lines(self) -> list[str]:
        with suppress(FileNotFoundError):
            return self._output.read_text(errors="replace").splitlines()
        return []

    def _has_ended(self) -> bool:
        return self._process.exitcode is not None or bool(self._process.failure)

    def _watch(self) -> None:
        """Let the process leave a node that drains; end this actor with it."""
        drains, node = False, ray.get_runtime_context().get_node_id()
        while not self._has_ended():
            try:
                leaves = not drains and node in draining_nodes()
            except Exception as error:  # of Ray's private interface; this actor must still end with its process
                log.warning("whether this node drains is unknown (%s)", error)
                leaves = False
            if leaves:
                drains = True
                self._process.signal(signal.SIGTERM)
            time.sleep(LOOK_S)
        if self._process.exitcode != 0:
            self._reported.wait(_REPORT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=not drains)
