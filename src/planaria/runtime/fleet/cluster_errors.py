"""What can be wrong with a cluster, in one line each, before a worker starts there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from planaria.common.errors import UserError
from planaria.runtime.fleet.devices import ON_CPUS, Needs, require_devices
from planaria.runtime.fleet.process_pool import Facts, facts

_CLIENT_PORT = 10001
_ANSWER_S = 5.0


def reach(address: str) -> None:
    """Try whether anybody listens where a cluster should be: Ray itself asks for minutes, then ends the process.

    :raises UserError: when nobody does, or ``address`` is none.
    """
    called = f"fleet.address = {address!r}"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")  # which Ray prefers to looking for itself
        called += f" (RAY_ADDRESS = {address!r})"
    if address in ("auto", "embedded", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") and not host:
        host, port = port, str(_CLIENT_PORT)
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"{called}: give 'auto', 'embedded', HOST:PORT (Ray's is 6379), or ray://HOST:{_CLIENT_PORT}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"{called}: no Ray cluster answers there ({error.strerror or error}); `ray status` on its head node tells "
            "its address"
        ) from None


def explain(error: Exception, address: str) -> UserError:
    """What Ray says when it cannot be joined, in one line with the mend."""
    text = " ".join(str(error).split())
    called = f"fleet.address = {address!r}"
    if "Could not find any running Ray instance" in text:
        return UserError(
            f"{called}: no Ray cluster runs on this machine; start one (`ray start --head`), name one (HOST:PORT), or "
            "use 'embedded'"
        )
    if "ersion" in text and ("mismatch" in text or "differ" in text or "incompatible" in text):
        return UserError(f"{called}: the cluster runs another version of Ray or Python than this process: {text[:300]}")
    if "Failed to connect to Ray cluster" in text or "uthentication" in text:
        return UserError(
            f"{called}: the cluster is there, but does not let this process in; if it asks for Ray's token, set "
            f"RAY_AUTH_MODE=token here too (Ray says: {text[:200]})"
        )
    return UserError(f"{called}: Ray says: {text[:300]}")


def refuse_unfit(node: str, theirs: Facts, needs: Needs = ON_CPUS) -> None:
    """:raises UserError: when a node's planaria is another one than this process's, or it lacks devices of which each
    can hold a worker."""
    mine = facts()
    if theirs.version != mine.version:
        raise UserError(
            f"Ray node {node} has planaria {theirs.version}, this process {mine.version}: install the same on all nodes"
        )
    crowd = max(1, len(theirs.found.devices))
    require_devices(f"Ray node {node}", needs, theirs.found, crowd, "let Ray know of no GPUs there (`--num-gpus 0`)")


def refuse_unsettled(node: str, wrong: str) -> None:
    """:raises UserError: when something is wrong about the run's files there."""
    if wrong:
        raise UserError(f"Ray node {node}: {wrong}")


def no_room(workers: int, bundle: Mapping[str, float], have: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Why a cluster cannot reserve a ``bundle`` for each of so many workers."""
    there = ", ".join(f"{have.get(kind, 0):g} {kind}s, {free.get(kind, 0):g} of them free" for kind in bundle)
    each = " and ".join(f"{workers * share:g} {kind}s" for kind, share in bundle.items())
    mends = {"CPU": "choose fewer fleet.spares", "GPU": "a smaller fleet.gpu_share"}
    mend = " or ".join(mends[kind] for kind in bundle)
    return (
        f"the Ray cluster has {there}; this run needs {each}, as much for each stage and spare: add nodes (or say `ray "
        f"start --num-cpus` more), or {mend}"
    )


def cannot_serve(node: str, error: Exception) -> UserError:
    """A process pool that could not be started."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else type(error).__name__)
    if "No module named" in told or "ImportError" in told:
        return UserError(f"Ray node {node} cannot import planaria ({told[:200]}): install the same version there")
    return UserError(f"Ray node {node} cannot start workers: {told[:300]}")


def why(error: BaseException) -> str:
    """The line of a long report that says why an actor is dead."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("The actor ")), (lines or [type(error).__name__])[0])[:200]
