"""Commands on checkpoints: show, convert, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from planaria.cli.flags import Run, command, flag, switch
from planaria.cli.settings import Settings
from planaria.config.shipped import find

FORMATS = "hf: Hugging Face, only weights; dcp: torch.distributed.checkpoint; universal: DeepSpeed's"
Format = Literal["hf", "dcp", "universal"]
Checkpoint = Annotated[str | None, flag("NAME", "this checkpoint of the run")]


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
    run: Run,
    *,
    checkpoint: Checkpoint = None,
    to: Annotated[Path, flag("FOLDER", "folder of checkpoints")],
    settings: dict[str, str],
) -> int:
    """Write a checkpoint as it would be resumed with other settings."""
    from planaria.cli.commands.checkpoint import convert

    print("\n".join(convert(run, checkpoint, settings, to)))
    return 0


@command("checkpoint import", cls=Settings)
def _import(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="folder that the other program has written")],
    recipe: Annotated[
        Path, Argument(metavar="RECIPE", parser=find, help="the run's recipe, or a run with that recipe")
    ],
    *,
    kind: Annotated[Format, Option("--format", help=FORMATS)],
    names: Annotated[Path | None, flag("FILE", "map of tensors to parameters, if not as in hf")] = None,
    settings: dict[str, str],
) -> int:
    """Start a run from another program's checkpoint."""
    from planaria.cli.commands.checkpoint import bring

    print("\n".join(bring(folder, recipe, settings, kind, names)))
    return 0
