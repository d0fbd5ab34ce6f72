"""Commands that compare strategies, by experiment or by prediction, and that measure links."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import add_fields, add_recipe, command, flagged
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig


def add(commands: Any) -> None:
    _add_comparisons(commands)
    _add_networks(commands)


def _add_comparisons(commands: Any) -> None:
    compare = command(commands, "compare", "compare strategies on the same failures; resumable", _compare, lasting=True)
    add_recipe(compare, " with a [compare] table, or any with --arms")
    compare.add_argument(
        "--arms", metavar="A,B", help="these of its arms alone, and strategies by name or as module:Class"
    )
    compare.add_argument("--seeds", metavar="1,2", help="instead of the recipe's")
    compare.add_argument("--together", type=float, metavar="P", help="instead of the recipe's compare.trace.together")
    compare.add_argument(
        "--lost", metavar="WHAT", help="what one failure takes instead: stage, adjacent, machine or region"
    )
    compare.add_argument("--steps", type=int, metavar="N", help="short for --train.steps")
    compare.add_argument("--dry-run", action="store_true", help="print what would run, and about how long; run nothing")
    compare.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="also write the table and figures there, for a paper: CSV, LaTeX, PDF, SVG",
    )
    compare.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(compare, RunConfig)

    advise = command(commands, "advise", "predict which recovery strategy suits a recipe", _advise)
    add_recipe(advise, " whose [network] states costs and the failure rate")
    advise.add_argument(
        "--delays",
        type=Path,
        metavar="RUN",
        help="which code of gradients suits replicas that are as late as those of this run (its folder) were",
    )
    advise.add_argument(
        "--compress", action="store_true", help="whether all-reduced gradients should travel in fewer bytes, and how"
    )
    add_fields(advise, RunConfig)


def _add_networks(commands: Any) -> None:
    topology = commands.add_parser(
        "topology", help="measure a network for `planaria plan`, or look at its paths", allow_abbrev=False
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
    paths = command(whats, "paths", "hold a schedule's paths against the topology as it is now; move what must", _paths)
    add_recipe(paths, "; its routing.schedule was planned on [[link]] entries of its network.topology")
    paths.add_argument("--moves", type=int, default=0, metavar="N", help="improving moves beside (default %(default)s)")
    paths.add_argument("--to", type=Path, metavar="FILE", help="schedule file to write, with an HTML page beside it")
    add_fields(paths, RunConfig)


def _compare(given: argparse.Namespace) -> int:
    from planaria.faults.blows import lost_of
    from planaria.lab.comparing import Asked
    from planaria.lab.comparison import compare, trace_laid
    from planaria.lab.dry_run import dry_run
    from planaria.lab.report.comparison_table import show_table

    settings: dict[str, object] = dict(flagged(given))
    if given.steps is not None:
        settings["train.steps"] = given.steps
    arms = None if given.arms is None else [name.strip() for name in given.arms.split(",")]
    seeds, progress, lost = _seeds(given.seeds), not given.quiet, lost_of(given.lost)
    if given.dry_run:
        laid = trace_laid(given.together, lost)
        dry_run(Asked(given.recipe, settings, seeds, arms, laid), print if progress else None)
        return 0
    result = compare(
        given.recipe, seeds=seeds, arms=arms, together=given.together, lost=lost, settings=settings, progress=progress
    )
    show_table(result.found)
    print(f"report        {result.report}\nnumbers       {result.numbers}")
    if given.to is not None:
        print(f"for a paper   {', '.join(result.write(given.to))} in {given.to}")
    return 0


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
        raise UserError(f"--seeds {text}: give whole numbers with commas between them, as in --seeds 1,2,3")
    return [int(word) for word in words]


def _advise(given: argparse.Namespace) -> int:
    from planaria.cli.commands.advise import advise

    return advise(given.recipe, flagged(given), given.delays, given.compress)


def _paths(given: argparse.Namespace) -> int:
    from planaria.cli.commands.paths import move_paths

    return move_paths(recipe.load(given.recipe, flagged(given), "train"), given.recipe, given.moves, given.to)


def _measure(given: argparse.Namespace) -> int:
    from planaria.cli.commands.topology import measure

    return measure(recipe.load(given.recipe, flagged(given), "train"), given.recipe, given.to, given.nodes, given.quiet)
