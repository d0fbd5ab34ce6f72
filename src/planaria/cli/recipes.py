"""Commands on recipes: recipes, init."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.cli.flags import Commands, command


def add(commands: Commands) -> None:
    command(commands, "recipes", "list the recipes that come with planaria", _recipes, code=False)

    init = command(commands, "init", "copy a recipe for editing", _init, code=False)
    init.add_argument("file", type=Path, help="file to write, such as my.toml")
    init.add_argument("--from", dest="source", default="demo", metavar="RECIPE", help="(default %(default)s)")


def _recipes(given: argparse.Namespace) -> int:
    from planaria.cli.commands.recipes import listing

    print("\n".join(listing()))
    return 0


def _init(given: argparse.Namespace) -> int:
    from planaria.cli.commands.recipes import copy

    files, then = copy(given.source, given.file)
    print("\n".join(map(str, files)))
    print(f"next          {then}")
    return 0
