"""``planaria train``: train a recipe, or resume a run, with ``planaria.train``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from planaria.cli.commands.watch import PageContext, live_page
from planaria.cli.flags import ADVANCED, DryRun, Quiet, command, flag, recipe_argument, run_option, switch
from planaria.cli.http_flags import CHAOS, address_option, name_option, token_option
from planaria.cli.settings import Settings
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig

RESUME = "continue a run (its folder, or URL in a checkpoint.store); auto: the recipe's run, else a new one"


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
    page = live_page(live, live_at, live_name or [], live_token_file, live_chaos)
    auto = resume == "auto" and recipe is not None
    if (resume is None or auto) and checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint} requires --resume RUN")
    if resume is not None and not auto:
        if dry_run:
            raise UserError("--dry-run: requires a recipe, not --resume")
        if recipe is not None:
            raise UserError(f"train {recipe} --resume {resume}: use a recipe or a run to resume, not both")
        return resume_run(resume, settings, quiet, checkpoint, page)
    if recipe is None:
        raise UserError("train: name a recipe such as demo (`planaria recipes` lists more), or pass --resume runs/NAME")
    return _train_recipe(recipe, settings, dry_run, quiet, auto, page)


def _train_recipe(
    recipe_file: Path,
    flags: Mapping[str, str],
    dry_run: bool,
    quiet: bool,
    auto: bool,
    page: PageContext | None,
) -> int:
    """Train a recipe from its first step, or with ``auto`` resume its run if there is one; return the exit code."""
    from planaria.runtime.api.configure import configure
    from planaria.runtime.api.training import train
    from planaria.runtime.fleet.spawner import fork_server

    config = configure(recipe_file, settings=flags)
    fork_server([] if dry_run else _preload(config))
    if config.engine == "simulate" and page is not None:
        raise UserError("--live: a simulation writes no log to show; remove --engine simulate")
    if config.engine == "simulate" and auto:
        raise UserError("--engine simulate: a simulation cannot be resumed; remove --resume auto")
    if dry_run:
        _print_dry_run(config, auto)
    elif config.engine == "simulate":
        _print_simulation(config)
    else:
        begin = partial(train, recipe_file, settings=flags, progress=not quiet, notify=print, context=page)
        begin(resume="auto" if auto else False)
    return 0


def _print_simulation(config: RunConfig) -> None:
    """Print the simulated step of a recipe."""
    from planaria.cli.commands.plan import describe
    from planaria.report.observe.trackers import trackers
    from planaria.runtime.preparation.config_checks import check

    check(config)
    trackers(config.observe)
    print(describe(config))


def _print_dry_run(config: RunConfig, auto: bool) -> None:
    """Print the complete recipe, and as comments what training it would need.

    :raises UserError: for an invalid setting; after printing, for invalid data or too little memory.
    """
    from planaria.config.recipe import dump
    from planaria.data.shards import check_first_records
    from planaria.report.observe.trackers import trackers
    from planaria.runtime.api.training import existing_run
    from planaria.runtime.prediction.copy_costs import copies_stated
    from planaria.runtime.prediction.memory import DoesNotFit, fit_to_this_machine
    from planaria.runtime.prediction.preflight_table import table
    from planaria.runtime.preparation.config_checks import check, read_faults
    from planaria.runtime.preparation.starting_weights import starting_weights, weight_warnings
    from planaria.runtime.preparation.unused_settings import require_used, without_effect

    simulated = config.engine == "simulate"
    if not simulated:
        require_used(config)
    run, needs, refusals = check(config), list[str](), list[UserError]()
    if not simulated:
        needs += without_effect(run, read_faults(run))
        try:
            check_first_records(config.data, config.model.vocab)
        except UserError as error:
            refusals.append(error)
        try:
            fitted, note = fit_to_this_machine(config)
        except DoesNotFit as error:
            fitted, note = error.config, ""
            refusals.append(error)
        needs += [*filter(None, (note,)), *table(fitted)]
    trackers(config.observe)
    print(dump(config).rstrip("\n"))
    notes = [*weight_warnings(run, starting_weights(config)), *copies_stated(run), *needs]
    if auto:
        earlier = existing_run(config)
        notes.append(f"--resume auto: {f'continues {earlier}' if earlier else 'starts a new run'}")
    for line in notes:
        print(f"# {line}")
    for other in refusals[1:]:
        print(f"# {other}")
    if refusals:
        raise refusals[0]


def _preload(config: RunConfig) -> list[str]:
    """Return the modules to preload for worker processes of this machine, if the run has any."""
    from planaria.runtime.engine.run_fleet import preload_for

    return preload_for(config) if config.engine == "fleet" and config.fleet.kind == "local" else []


def resume_run(
    folder: Path | str,
    flags: Mapping[str, str],
    quiet: bool,
    checkpoint: str | None = None,
    page: PageContext | None = None,
) -> int:
    """Resume a run from its newest or the named checkpoint; return the exit code."""
    from planaria.config.recipe import with_flags
    from planaria.runtime.api.training import train
    from planaria.runtime.fleet.spawner import fork_server
    from planaria.runtime.preparation import run_folders

    if (Path(folder) / run_folders.CONFIG).is_file():
        fork_server(_preload(with_flags(run_folders.config_of(Path(folder)), flags)))
    train(folder, resume=True, checkpoint=checkpoint, settings=flags, progress=not quiet, notify=print, context=page)
    return 0
