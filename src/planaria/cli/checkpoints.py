"""Commands on checkpoints: show, verify, convert; export and import for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.cli.flags import Commands, add_fields, command, flagged
from planaria.config.shipped import find


def add(commands: Commands) -> None:
    for name, what, action in (
        ("show", "list the parameters of a checkpoint, with clocks, sizes and digests", _show),
        ("verify", "read a run's checkpoints, and check every digest", _verify),
        ("convert", "write a checkpoint as it would be resumed with other settings", _convert),
    ):
        checkpoint = command(commands, f"checkpoint {name}", what, action)
        checkpoint.add_argument("run", type=Path)
        checkpoint.add_argument("--checkpoint", metavar="NAME", help="this checkpoint of the run")
        if name == "convert":
            checkpoint.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder of checkpoints")
            add_fields(checkpoint)
    _add_foreign(commands)


def _add_foreign(commands: Commands) -> None:
    """Add the commands for checkpoints of other programs."""
    export = command(
        commands,
        "checkpoint export",
        "write a checkpoint for other programs, with moments and clocks",
        _export,
    )
    export.add_argument("run", type=Path)
    export.add_argument("--checkpoint", metavar="NAME", help="this checkpoint of the run")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    export.add_argument("--precision", choices=("fp32", "bf16"), help="hf: type of weights (default fp32)")
    export.add_argument("--shard", type=_megabytes, metavar="MB", help="hf: largest file of weights (default 4096)")

    bring = command(commands, "checkpoint import", "start a run from another program's checkpoint", _import)
    bring.add_argument("folder", type=Path)
    bring.add_argument("recipe", type=find, help="the run's recipe, or a run with that recipe")
    bring.add_argument("--names", type=Path, metavar="FILE", help="map of tensors to parameters, if not as in hf")
    add_fields(bring)
    text = "hf: Hugging Face, only weights; dcp: torch.distributed.checkpoint; universal: DeepSpeed's"
    for parser in (export, bring):
        parser.add_argument("--format", choices=("hf", "dcp", "universal"), required=True, help=text)


def _show(given: argparse.Namespace) -> int:
    from planaria.cli.commands.checkpoint import show
    from planaria.report import tables

    tables.show(show(given.run, given.checkpoint))
    return 0


def _verify(given: argparse.Namespace) -> int:
    from planaria.cli.commands.checkpoint import verify

    for line in verify(given.run, given.checkpoint):
        print(line)
    return 0


def _convert(given: argparse.Namespace) -> int:
    from planaria.cli.commands.checkpoint import convert

    print("\n".join(convert(given.run, given.checkpoint, flagged(given), given.to)))
    return 0


def _export(given: argparse.Namespace) -> int:
    from planaria.cli.commands.checkpoint import export

    lines = export(given.run, given.checkpoint, given.format, given.to, given.precision, given.shard)
    print("\n".join(lines))
    return 0


def _import(given: argparse.Namespace) -> int:
    from planaria.cli.commands.checkpoint import bring

    print("\n".join(bring(given.folder, given.recipe, flagged(given), given.format, given.names)))
    return 0


def _megabytes(text: str) -> int:
    """Parse the size of files in MB."""
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of MB from 1 to {1 << 20}")
    return int(text)
