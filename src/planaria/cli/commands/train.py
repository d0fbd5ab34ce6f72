"""``planaria train``, implemented with ``planaria.train``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.cli.commands.plan import describe
from planaria.cli.commands.watch import serve_page
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.report.observe.trackers import trackers
from planaria.runtime.api.configure import configure
from planaria.runtime.api.training import existing_run, train
from planaria.runtime.engine.run_fleet import preload_for
from planaria.runtime.fleet.spawner import fork_server
from planaria.runtime.prediction.copy_costs import copies_stated
from planaria.runtime.prediction.memory import fit_to_this_machine
from planaria.runtime.prediction.preflight_table import table
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.config_checks import check, read_faults
from planaria.runtime.preparation.starting_weights import starting_weights, weight_warnings
from planaria.runtime.preparation.unused_settings import require_used

if TYPE_CHECKING:
    from planaria.report.live_page.serving import ServerAddress


@dataclass(frozen=True)
class LivePage:
    """The live page of a run: its address, and whether watchers may inject faults."""

    address: ServerAddress
    token_file: Path | None
    chaos: bool

    def __call__(self, folder: Path) -> AbstractContextManager[object]:
        """Return a context that serves the page of the run in ``folder``."""
        return serve_page(folder, self.address, self.token_file, self.chaos, print)


def start(
    recipe_file: Path,
    flags: Mapping[str, str],
    dry_run: bool,
    quiet: bool,
    auto: bool = False,
    live_page: LivePage | None = None,
) -> int:
    """Train a recipe from its first step, or with ``auto`` resume its run if there is one; return the exit code."""
    config = configure(recipe_file, settings=flags)
    fork_server([] if dry_run else _preload(config))
    if live_page is not None and config.engine == "simulate":
        raise UserError("--live: a simulation writes no log to show; remove --engine simulate")
    if auto and config.engine == "simulate":
        raise UserError("--engine simulate: a simulation cannot be resumed; remove --resume auto")
    if dry_run or config.engine == "simulate":
        if config.engine != "simulate":
            require_used(config)
        run = check(config)
        fitted, note = (config, "") if config.engine == "simulate" else fit_to_this_machine(config)
        if config.engine != "simulate":
            read_faults(run)
        trackers(config.observe)
        print(recipe.dump(config).rstrip("\n") if dry_run else describe(config))
        for line in (*weight_warnings(run, starting_weights(config)), *copies_stated(run)) if dry_run else ():
            print(f"# {line}")
        for line in (*filter(None, (note,)), *table(fitted)) if dry_run and config.engine != "simulate" else ():
            print(f"# {line}")
        if auto:
            earlier = existing_run(config)
            print(f"# --resume auto: {f'continues {earlier}' if earlier else 'starts a new run'}")
        return 0
    train(
        recipe_file,
        resume="auto" if auto else False,
        settings=flags,
        progress=not quiet,
        notify=print,
        context=live_page,
    )
    return 0


def _preload(config: RunConfig) -> list[str]:
    """Return the modules to preload for worker processes of this machine, if the run has any."""
    return preload_for(config) if config.engine == "fleet" and config.fleet.kind == "local" else []


def resume(
    folder: Path | str,
    flags: Mapping[str, str],
    quiet: bool,
    checkpoint: str | None = None,
    live_page: LivePage | None = None,
) -> int:
    """Resume a run from its newest or the named checkpoint; return the exit code."""
    if (Path(folder) / run_folders.CONFIG).is_file():
        fork_server(_preload(recipe.with_flags(run_folders.config_of(Path(folder)), flags)))
    train(
        folder,
        resume=True,
        checkpoint=checkpoint,
        settings=flags,
        progress=not quiet,
        notify=print,
        context=live_page,
    )
    return 0
