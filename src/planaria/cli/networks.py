"""Commands on networks: topology measure, topology paths."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import add_fields, add_recipe, command, flagged
from planaria.config import recipe
from planaria.config.schema import RunConfig


def add(commands: Any) -> None:
    """Add both commands."""
    topology = commands.add_parser(
        "topology", help="measure a network for `planaria plan`, or check its paths", allow_abbrev=False
    )
    whats = topology.add_subparsers(dest="what", required=True, metavar="WHAT")
    measure = command(whats, "measure", "measure latency and bandwidth between nodes, and write a topology", _measure)
    add_recipe(measure, "; its network.topology names the nodes, if given")
    measure.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write the topology to")
    measure.add_argument(
        "--nodes", type=int, metavar="N", help="without a topology: local nodes (default: one per stage)"
    )
    measure.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(measure, RunConfig)
    paths = command(
        whats, "paths", "compare a schedule's paths with the current topology, and move changed ones", _paths
    )
    add_recipe(paths, "; its routing.schedule was planned on [[link]] entries of its network.topology")
    paths.add_argument(
        "--moves", type=int, default=0, metavar="N", help="additional improving moves (default %(default)s)"
    )
    paths.add_argument("--to", type=Path, metavar="FILE", help="schedule file to write, with an HTML page beside it")
    add_fields(paths, RunConfig)


def _paths(given: argparse.Namespace) -> int:
    from planaria.cli.commands.paths import move_paths

    return move_paths(recipe.load(given.recipe, flagged(given), "train"), given.recipe, given.moves, given.to)


def _measure(given: argparse.Namespace) -> int:
    from planaria.cli.commands.topology import measure

    return measure(recipe.load(given.recipe, flagged(given), "train"), given.recipe, given.to, given.nodes, given.quiet)
