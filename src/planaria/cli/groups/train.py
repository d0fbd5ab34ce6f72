"""Commands that train one model: train, join, plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from planaria.cli.flags import ADVANCED, DryRun, Quiet, command, flag, recipe_argument, reject_flags, run_option, switch
from planaria.cli.groups.watch import Live, live_address
from planaria.cli.serving import CHAOS, address_option, name_option, token_option
from planaria.cli.settings import Settings
from planaria.common.errors import UserError
from planaria.config.durations import seconds

RESUME = "continue a run (its folder, or URL in a checkpoint.store); auto: the recipe's run, else a new one"
PATIENCE = (
    "how long to retry a run that does not answer, such as 90 or 5min (default: 60 s once it has answered, 0 before)"
)


@command("train", cls=Settings, lasting=True, forks=True)
def _train(
    recipe: Annotated[Path | None, recipe_argument()] = None,
    *,
    resume: Annotated[str | None, run_option("--resume", RESUME)] = None,
    checkpoint: Annotated[str | None, flag("NAME", "with --resume: continue from this checkpoint instead")] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    live: Annotated[bool, switch("--live", "show the run in a browser, at the address that is printed")] = False,
    live_at: Annotated[str | None, address_option("--live-at", ADVANCED)] = None,
    live_name: Annotated[list[str] | None, name_option("--live-name", ADVANCED)] = None,
    live_token_file: Annotated[Path | None, token_option("--live-token-file", ADVANCED)] = None,
    standby: Annotated[
        str | None, flag("MODE", "auto or manual: survive the loss of the controller (fleet.standby)")
    ] = None,
    live_chaos: Annotated[bool, Option("--live-chaos", help=CHAOS, rich_help_panel=ADVANCED)] = False,
    settings: dict[str, str],
) -> int:
    """Train a recipe, or resume a run."""
    if standby is not None:
        settings = settings | {"fleet.standby": standby}
    if recipe is not None and resume is None:
        from planaria.config.recipe import read

        read(recipe)  # report errors before importing torch
    from planaria.cli.commands import train

    address = live_address(Live(live, live_at, live_name or [], live_token_file, live_chaos))
    live_page = train.LivePage(address, live_token_file, live_chaos) if address is not None else None
    auto = resume == "auto" and recipe is not None
    if (resume is None or auto) and checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint} requires --resume RUN")
    if resume is not None and not auto:
        if dry_run:
            raise UserError("--dry-run: requires a recipe, not --resume")
        if recipe is not None:
            raise UserError(f"train {recipe} --resume {resume}: use a recipe or a run to resume, not both")
        return train.resume(resume, settings, quiet, checkpoint, live_page)
    if recipe is None:
        raise UserError("train: name a recipe such as demo (`planaria recipes` lists more), or pass --resume runs/NAME")
    return train.start(recipe, settings, dry_run, quiet, auto, live_page)


@command("join", lasting=True, forks=True)
def _join(
    run: Annotated[str, Argument(metavar="RUN", help="the run's folder, or HOST:PORT of its controller")],
    *,
    key_file: Annotated[Path | None, flag("FILE", "with HOST:PORT: a copy of the run's key")] = None,
    workers: Annotated[int | None, flag("N", "worker processes (default: enough for one replica)")] = None,
    patience: Annotated[float | None, flag("S", PATIENCE, parser=seconds)] = None,
    advertise: Annotated[
        str, flag("HOST", "name or address under which others find this machine", show_default=False)
    ] = "",
    ports: Annotated[
        tuple[int, int] | None, flag("FIRST LAST", "where its workers listen (default: any free port)")
    ] = None,
    no_inbound: Annotated[bool, switch("--no-inbound", "other machines cannot connect to this one")] = False,
    cache: Annotated[Path | None, flag("DIR", "cache for files of a run whose folder it does not see")] = None,
    ray: Annotated[
        str,
        flag("ADDRESS", "add nodes of this Ray cluster (auto, HOST:PORT) instead of this machine", show_default=False),
    ] = "",
    machines: Annotated[int, flag("N", "with --ray: how many")] = 1,
    gpus: Annotated[float, flag("N", "with --ray: GPUs of each")] = 0.0,
    standby: Annotated[
        bool, switch("--standby", "add no workers: wait until the run's controller is lost, then lead the run")
    ] = False,
    at: Annotated[
        str, flag("HOST:PORT", "with --standby on another machine: where it leads; RUN is LOG/NAME", show_default=False)
    ] = "",
    hold: Annotated[
        str,
        flag("HOST:PORT", "add no workers: hold the log of a run (quorum://HOLDERS/NAME) here", show_default=False),
    ] = "",
) -> int:
    """Add this machine to a live run, until Ctrl-C; or wait to lead the run, or hold its log."""
    own = {"advertise": advertise or None, "ports": ports, "no-inbound": no_inbound or None}
    of_workers = {"workers": workers, "patience": patience, "cache": cache, "ray": ray or None} | own
    if hold:
        return _hold(run, hold, key_file, of_workers | {"standby": standby or None, "at": at or None})
    if standby:
        return _stand_by(run, at, key_file, of_workers)
    if at:
        raise UserError(f"--at {at}: is for a standby; add --standby, or remove it")
    from planaria.cli.commands.join import add_machine, add_nodes
    from planaria.common.address import Reach

    if ray:
        reject_flags(own, "has no effect with --ray; remove it")
        add_nodes(ray, machines, gpus, run, key_file, workers, patience, cache)
        return 0
    if machines != 1 or gpus:
        raise UserError("--machines and --gpus are for nodes of a Ray cluster; add --ray ADDRESS, or remove them")
    reach = Reach(advertise=advertise, reachable=not no_inbound, ports=ports)
    add_machine(run, key_file, workers, patience, reach, cache)
    return 0


def _stand_by(run: str, at: str, key: Path | None, of_workers: Mapping[str, object]) -> int:
    """Wait until the run's controller is lost, then lead the run; no flag of workers is valid."""
    reject_flags(of_workers, "has no effect with --standby, which adds no workers; remove it or --standby")
    if key is not None and not at:
        raise UserError(f"join {run} --standby --key-file {key}: add --at HOST:PORT, where this machine leads the run")
    from planaria.cli.commands.join import stand_by

    stand_by(run, at, key)
    return 0


def _hold(run: str, at: str, key: Path | None, others: Mapping[str, object]) -> int:
    """Hold the log of a run until Ctrl-C; no other flag is valid. Imports no torch."""
    reject_flags(others, "has no effect with --hold, which starts no workers and no standby; remove it")
    if key is None:
        raise UserError(f"join {run} --hold {at}: pass --key-file, the run's fleet.key; created if missing")
    from planaria.runtime.shared_log.holder import hold

    hold(run, at, key, lambda line: print(line, flush=True))
    return 0


@command("plan", cls=Settings)
def _plan(
    recipe: Annotated[Path | None, recipe_argument()] = None,
    *,
    skip: Annotated[str | None, flag("SHARE", "the same as --routing.skip")] = None,
    budget: Annotated[str | None, flag("SIZE", "60s, 5min, or 300000moves (default 60s)")] = None,
    update: Annotated[
        bool,
        switch("--update", "keep the arrangement in routing.schedule; move paths whose [[link]] entries changed"),
    ] = False,
    moves: Annotated[int | None, flag("N", "with --update: additional improving moves (default 0)")] = None,
    to: Annotated[Path | None, flag("FILE", "schedule file to write, with an HTML page next to it")] = None,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Draw the plan of one step; with a topology, search for the best arrangement and routes."""
    from planaria.cli.commands.plan import describe
    from planaria.cli.commands.schedule import parse_budget, plan_routes
    from planaria.config.recipe import load
    from planaria.runtime.preparation.config_checks import check

    spend = parse_budget(budget or "60s")
    config = load(recipe, settings | ({"routing.skip": skip} if skip is not None else {}), "train")
    if update:
        from planaria.cli.commands.paths import move_paths

        if budget is not None:
            raise UserError(f"--budget {budget}: limits a search, and --update makes --moves N; remove one of them")
        return move_paths(config, recipe, moves or 0, to)
    if moves is not None:
        raise UserError(f"--moves {moves} requires --update")
    routing = config.routing
    if (
        config.network.topology is not None
        or skip is not None
        or routing.wait_for_gradient_sums
        or routing.search != "anneal"
    ):
        return plan_routes(config, recipe, spend, to, quiet)
    check(config)
    print(describe(config))
    return 0
