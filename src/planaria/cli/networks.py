"""Commands on networks: network measure, network relay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from planaria.cli.flags import Quiet, command, flag, recipe_argument
from planaria.cli.settings import Settings


@command("network measure", cls=Settings)
def _measure(
    recipe: Annotated[Path, recipe_argument("; its network.topology names the nodes, if given")],
    *,
    to: Annotated[Path, flag("DIR", "folder to write the topology to")],
    nodes: Annotated[int | None, flag("N", "without a topology: local nodes (default: one per stage)")] = None,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Measure latency and bandwidth between nodes, and write a topology."""
    from planaria.cli.commands.topology import measure
    from planaria.config.recipe import load

    return measure(load(recipe, settings, "train"), recipe, to, nodes, quiet)


@command("network relay", code=False, logged=True)
def _relay(
    *,
    key_file: Annotated[Path, flag("FILE", "the run's fleet.key; created if missing")],
    host: Annotated[str, flag("HOST", "address to listen on")] = "127.0.0.1",
    port: Annotated[int, flag("N", "port to listen on (default: any free one)", show_default=False)] = 0,
) -> int:
    """Forward edges between workers that cannot connect, until Ctrl-C."""
    return _forward(key_file, host, port)


def _forward(key: Path, host: str, port: int) -> int:
    """Forward edges between ends that prove the key in the file ``key``, until Ctrl-C; return the exit code.

    The file is created if missing.
    :raises UserError: if it cannot listen there, or the file has no key.
    """
    import threading

    from planaria.common.errors import UserError
    from planaria.common.signals import interrupted
    from planaria.runtime.fleet.joining import kept_key
    from planaria.runtime.transport.relay import relay_at
    from planaria.runtime.transport.secure import new_key

    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: give 1 to 65535, or 0 for any free one")
    is_new = not key.exists()
    secret = kept_key(key, new_key())
    try:
        listener, relay = relay_at(host, port, secret)
    except UserError:
        advice = "give an address of this machine and a free port (0: any)"
        raise UserError(f"--host {host} --port {port}: cannot listen there; {advice}") from None
    print(f"relay         {listener.address}", flush=True)
    if is_new:
        print(f"key           {key} is new; give the run a copy as fleet.key", flush=True)
    try:
        with interrupted():
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        listener.close()
        relay.close()
    return 0
