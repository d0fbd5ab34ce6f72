"""Commands that train one model: train, join, plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria import recipe
from planaria.cli.flags import add_fields, add_recipe, command, flagged
from planaria.config import RunConfig
from planaria.errors import UserError


def add(commands: Any) -> None:
    train = command(commands, "train", "train a recipe, or resume a run", _train)
    add_recipe(train, needed=False)
    train.add_argument("--resume", type=Path, metavar="RUN", help="continue this run from its newest checkpoint")
    train.add_argument("--checkpoint", metavar="NAME", help="with --resume: continue from this checkpoint instead")
    train.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    train.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(train, RunConfig)

    join = command(commands, "join", "add this machine to a live run, until Ctrl-C", _join)
    join.add_argument("run", type=Path)
    join.add_argument("--workers", type=int, metavar="N", help="worker processes (default: as many as one replica has)")
    join.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to keep reconnecting to an unreachable run (default %(default)g)",
    )

    plan = command(
        commands,
        "plan",
        "draw the plan of one step; with a topology, search for the best arrangement and routes",
        _plan,
    )
    add_recipe(plan, needed=False)
    plan.add_argument("--skip", metavar="SHARE", help="the same as --routing.skip")
    plan.add_argument("--budget", metavar="SIZE", default="60s", help="60s, 5min, or 300000moves (default %(default)s)")
    plan.add_argument("--to", type=Path, metavar="FILE", help="schedule file to write, with an HTML page beside it")
    plan.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(plan, RunConfig)


def _train(given: argparse.Namespace) -> int:
    from planaria.commands import train

    if given.resume is None and given.checkpoint is not None:
        raise UserError(f"--checkpoint {given.checkpoint}: goes with --resume RUN")
    if given.resume is not None and given.dry_run:
        raise UserError("--dry-run: goes with a recipe, not with --resume")
    if given.resume is not None:
        if given.recipe is not None:
            raise UserError(f"train {given.recipe} --resume {given.resume}: give a recipe or a run to resume, not both")
        return train.resume(given.resume, flagged(given), given.quiet, given.checkpoint)
    if given.recipe is None:
        raise UserError("train: give a recipe such as demo (`planaria recipes` lists more), or --resume runs/NAME")
    return train.start(given.recipe, flagged(given), given.dry_run, given.quiet)


def _join(given: argparse.Namespace) -> int:
    from planaria.commands.join import lend

    lend(given.run, given.workers, given.patience)
    return 0


def _plan(given: argparse.Namespace) -> int:
    from planaria.commands.plan import describe
    from planaria.engine.prepare import check

    flags = flagged(given) | ({"routing.skip": given.skip} if given.skip is not None else {})
    config = recipe.load(given.recipe, flags, "train")
    if config.network.topology is not None or given.skip is not None:
        from planaria.commands.schedule import plan_routes

        return plan_routes(config, given.recipe, given.budget, given.to, given.quiet)
    check(config)
    print(describe(config))
    return 0
