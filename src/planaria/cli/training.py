"""Commands that train one model: train, join, plan; network relay."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.cli.flags import Commands, add_fields, add_logs, add_recipe, command, duration, flagged
from planaria.cli.watching import add_live, live_of
from planaria.common.errors import UserError


def add(commands: Commands) -> None:
    train = command(commands, "train", "train a recipe, or resume a run", _train, lasting=True, forks=True)
    add_recipe(train, needed=False)
    train.add_argument(
        "--resume",
        metavar="RUN",
        help="continue this run (a folder, or its URL in a checkpoint.store); with a recipe, auto: continue its run if "
        "there is one, else start one",
    )
    train.add_argument("--checkpoint", metavar="NAME", help="with --resume: continue from this checkpoint instead")
    train.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    train.add_argument("--quiet", action="store_true", help="no progress display")
    add_live(train)
    add_fields(train)
    _add_join(commands)
    _add_relay(commands)
    _add_plan(commands)


def _add_join(commands: Commands) -> None:
    join = command(commands, "join", "add this machine to a live run, until Ctrl-C", _join, lasting=True, forks=True)
    join.add_argument("run", metavar="RUN", help="the run's folder, or HOST:PORT of its controller")
    join.add_argument("--key-file", type=Path, metavar="FILE", help="with HOST:PORT: a copy of the run's key")
    join.add_argument("--workers", type=int, metavar="N", help="worker processes (default: enough for one replica)")
    join.add_argument(
        "--patience",
        type=duration,
        metavar="S",
        help="how long to retry a run that does not answer, such as 90 or 5min (default: 60 s once it has "
        "answered, 0 before)",
    )
    join.add_argument(
        "--advertise", default="", metavar="HOST", help="name or address under which others find this machine"
    )
    join.add_argument(
        "--ports",
        type=int,
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="where its workers listen (default: any free port)",
    )
    join.add_argument("--no-inbound", action="store_true", help="other machines cannot connect to this one")
    join.add_argument("--cache", type=Path, metavar="DIR", help="cache for files of a run whose folder it does not see")


def _add_plan(commands: Commands) -> None:
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
    add_fields(plan)


def _add_relay(commands: Commands) -> None:
    relay = command(
        commands, "network relay", "forward edges between workers that cannot connect, until Ctrl-C", _relay, code=False
    )
    relay.add_argument(
        "--key-file", type=Path, required=True, metavar="FILE", help="the run's fleet.key; created if missing"
    )
    relay.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    relay.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on (default: any free one)")
    add_logs(relay)


def _train(given: argparse.Namespace) -> int:
    if given.recipe is not None and given.resume is None:
        from planaria.config import recipe

        recipe.read(given.recipe)  # report errors before importing torch
    from planaria.cli.commands import train

    live = live_of(given)
    shown = train.Shown(live, given.live_token_file, given.live_chaos) if live is not None else None
    auto = given.resume == "auto" and given.recipe is not None
    if (given.resume is None or auto) and given.checkpoint is not None:
        raise UserError(f"--checkpoint {given.checkpoint}: requires --resume RUN")
    if given.resume is not None and not auto:
        if given.dry_run:
            raise UserError("--dry-run: requires a recipe, not --resume")
        if given.recipe is not None:
            raise UserError(f"train {given.recipe} --resume {given.resume}: give a recipe or a run to resume, not both")
        return train.resume(given.resume, flagged(given), given.quiet, given.checkpoint, shown)
    if given.recipe is None:
        raise UserError("train: give a recipe such as demo (`planaria recipes` lists more), or --resume runs/NAME")
    return train.start(given.recipe, flagged(given), given.dry_run, given.quiet, auto, shown)


def _join(given: argparse.Namespace) -> int:
    from planaria.cli.commands.join import add_machine
    from planaria.runtime.transport.address import Reach

    ports = None if given.ports is None else (given.ports[0], given.ports[1])
    reach = Reach(advertise=given.advertise, reachable=not given.no_inbound, ports=ports)
    add_machine(given.run, given.key_file, given.workers, given.patience, reach, given.cache)
    return 0


def _relay(given: argparse.Namespace) -> int:
    from planaria.cli.commands.relay import carry

    return carry(given.key_file, given.host, given.port)


def _plan(given: argparse.Namespace) -> int:
    from planaria.cli.commands.plan import describe
    from planaria.cli.commands.schedule import parse_budget, plan_routes
    from planaria.config import recipe
    from planaria.runtime.engine.check import check

    budget = parse_budget(given.budget)
    flags = flagged(given) | ({"routing.skip": given.skip} if given.skip is not None else {})
    config = recipe.load(given.recipe, flags, "train")
    if config.network.topology is not None or given.skip is not None or config.routing.sums:
        return plan_routes(config, given.recipe, budget, given.to, given.quiet)
    check(config)
    print(describe(config))
    return 0
