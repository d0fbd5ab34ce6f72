"""One-line errors of a Ray cluster, raised before a worker starts there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import planaria
from planaria.common.errors import UserError
from planaria.runtime.fleet.devices import ON_CPUS, DeviceNeeds, require_devices
from planaria.runtime.fleet.process_pool import NodeFacts

_CLIENT_PORT = 10001
_ANSWER_S = 5.0


def reach(address: str, setting: str = "fleet.address =") -> None:
    """Test whether anything listens at a cluster's address; Ray itself would retry for minutes, then end the process.

    :raises UserError: if nothing answers, or ``address`` is invalid.
    """
    where = f"{setting} {address!r}"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")  # takes precedence in Ray
        where += f" (RAY_ADDRESS = {address!r})"
    if address in ("auto", "embedded", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") and not host:
        host, port = port, str(_CLIENT_PORT)
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        own = "" if setting.startswith("--") else " 'embedded',"
        raise UserError(f"{where}: use 'auto',{own} HOST:PORT (Ray's is 6379), or ray://HOST:{_CLIENT_PORT}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"{where}: no Ray cluster answers there ({error.strerror or error}); `ray status` on its head node prints "
            "its address"
        ) from None


def explain(error: Exception, address: str, setting: str = "fleet.address =") -> UserError:
    """Return a one-line error with a fix for Ray's failure to connect."""
    own = "" if setting.startswith("--") else ", or use 'embedded'"
    text = " ".join(str(error).split())
    where = f"{setting} {address!r}"
    if "Could not find any running Ray instance" in text:
        return UserError(
            f"{where}: no Ray cluster runs on this machine; start one (`ray start --head`), or name one "
            f"(HOST:PORT){own}"
        )
    if "ersion" in text and ("mismatch" in text or "differ" in text or "incompatible" in text):
        return UserError(f"{where}: the cluster runs another version of Ray or Python than this process: {text[:300]}")
    if "Failed to connect to Ray cluster" in text or "uthentication" in text:
        return UserError(
            f"{where}: the cluster rejects this process; if it requires Ray's token, set "
            f"RAY_AUTH_MODE=token here too (Ray says: {text[:200]})"
        )
    return UserError(f"{where}: Ray says: {text[:300]}")


def require_suitable(node: str, found: NodeFacts, needs: DeviceNeeds = ON_CPUS) -> None:
    """Raise UserError if a node's planaria version differs from this process's, or its devices cannot hold a worker."""
    own = planaria.__version__
    if found.version != own:
        raise UserError(
            f"Ray node {node} has planaria {found.version}, this process {own}: install the same on all nodes"
        )
    workers = max(1, len(found.devices.devices))
    require_devices(f"Ray node {node}", needs, found.devices, workers, "let Ray know of no GPUs there (`--num-gpus 0`)")


def no_room(workers: int, bundle: Mapping[str, float], have: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Return why a cluster cannot reserve ``workers`` bundles."""
    resources = ", ".join(f"{have.get(kind, 0):g} {kind}s, {free.get(kind, 0):g} of them free" for kind in bundle)
    needed = " and ".join(f"{workers * share:g} {kind}s" for kind, share in bundle.items())
    fixes = {"CPU": "choose fewer fleet.spares", "GPU": "a smaller fleet.gpu_share"}
    fix = " or ".join(fixes[kind] for kind in bundle)
    return (
        f"the Ray cluster has {resources}; this run needs {needed}, the same for each stage and spare: add nodes (or "
        f"raise `ray start --num-cpus`), or {fix}"
    )


def cannot_serve(node: str, error: Exception) -> UserError:
    """Return the error for a process pool that could not be started."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else type(error).__name__)
    if "No module named" in cause or "ImportError" in cause:
        return UserError(f"Ray node {node} cannot import planaria ({cause[:200]}): install the same version there")
    return UserError(f"Ray node {node} cannot start workers: {cause[:300]}")


def why(error: BaseException) -> str:
    """Return the line of Ray's report that gives the cause of an actor's death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("The actor ")), (lines or [type(error).__name__])[0])[:200]
