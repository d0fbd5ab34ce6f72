"""Commands on networks: network measure, network paths."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.cli.flags import Commands, add_fields, add_recipe, command, flagged


def add(commands: Commands) -> None:
    """Add both commands."""
    measure = command(
        commands, "network measure", "measure latency and bandwidth between nodes, and write a topology", _measure
    )
    add_recipe(measure, "; its network.topology names the nodes, if given")
    measure.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write the topology to")
    measure.add_argument(
        "--nodes", type=int, metavar="N", help="without a topology: local nodes (default: one per stage)"
    )
    measure.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(measure)
    paths = command(
        commands, "network paths", "compare a schedule's paths with the current topology, and move changed ones", _paths
    )
    add_recipe(paths, "; its routing.schedule was planned on [[link]] entries of its network.topology")
    paths.add_argument(
        "--moves", type=int, default=0, metavar="N", help="additional improving moves (default %(default)s)"
    )
    paths.add_argument("--to", type=Path, metavar="FILE", help="schedule file to write, with an HTML page beside it")
    add_fields(paths)


def _paths(given: argparse.Namespace) -> int:
    from planaria.cli.commands.paths import move_paths
    from planaria.config import recipe

    return move_paths(recipe.load(given.recipe, flagged(given), "train"), given.recipe, given.moves, given.to)


def _measure(given: argparse.Namespace) -> int:
    from planaria.cli.commands.topology import measure
    from planaria.config import recipe

    return measure(recipe.load(given.recipe, flagged(given), "train"), given.recipe, given.to, given.nodes, given.quiet)
