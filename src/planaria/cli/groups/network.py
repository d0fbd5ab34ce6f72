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
    from planaria.cli.commands.network import measure
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
    from planaria.cli.commands.network import forward_edges

    return forward_edges(key_file, host, port)
