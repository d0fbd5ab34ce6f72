"""Commands on checkpoints: show, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from planaria.cli.flags import Run, command, flag, reject_flags, run_argument, switch
from planaria.cli.settings import Settings
from planaria.common.errors import UserError
from planaria.config.shipped import find

SOURCE = "a run; with --from, the folder of another program"
FROM = "format of another program's folder: dcp (torch.distributed.checkpoint) or universal (DeepSpeed's)"
RECIPE = "with --from: the new run's recipe, or a run with that recipe"
NAMES = "with --from: JSON of the folder's tensor names → parameters, if not those of Hugging Face"
Format = Literal["hf", "dcp", "universal"]
Checkpoint = Annotated[str | None, flag("NAME", "this checkpoint of the run (default: the newest)")]


@command("checkpoint show")
def _show(
    run: Run,
    *,
    checkpoint: Checkpoint = None,
    verify: Annotated[
        bool, switch("--verify", "read the run's checkpoints instead, or the named one, and check every digest")
    ] = False,
) -> int:
    """List the parameters of a checkpoint, with clocks, sizes and digests."""
    from planaria.cli.commands import checkpoint as commands
    from planaria.report import tables

    if verify:
        for line in commands.verify(run, checkpoint):
            print(line)
    else:
        tables.show(commands.show(run, checkpoint))
    return 0


@command("checkpoint convert", cls=Settings)
def _convert(
    run: Annotated[Path, run_argument(SOURCE)],
    *,
    to: Annotated[Path | None, flag("FOLDER", "for a run: folder of checkpoints to write the converted one to")] = None,
    checkpoint: Checkpoint = None,
    kind: Annotated[Format | None, Option("--from", metavar="dcp|universal", help=FROM)] = None,
    recipe: Annotated[Path | None, flag("RECIPE", RECIPE, parser=find)] = None,
    names: Annotated[Path | None, flag("FILE", NAMES)] = None,
    settings: dict[str, str],
) -> int:
    """Convert a run's checkpoint to other settings, or another program's checkpoint to a new run."""
    if kind is None:
        from planaria.cli.commands.checkpoint import convert

        reject_flags({"recipe": recipe, "names": names}, "requires --from, the format of another program's folder")
        if to is None:
            raise UserError(f"checkpoint convert {run}: pass --to FOLDER, or --from FORMAT for another program's")
        notes = convert(run, checkpoint, settings, to)
    else:
        from planaria.cli.commands.checkpoint import start_from_folder

        reject_flags(
            {"to": to, "checkpoint": checkpoint}, "is for a checkpoint of a run; --from writes a run, OUT/NAME"
        )
        if recipe is None:
            raise UserError(f"--from {kind}: pass --recipe RECIPE, the new run's recipe or a run with that recipe")
        notes = start_from_folder(run, recipe, settings, kind, names)
    print("\n".join(notes))
    return 0
