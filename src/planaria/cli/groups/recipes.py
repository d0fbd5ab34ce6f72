"""The command on recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from planaria.cli.flags import command, flag, recipe_argument
from planaria.common.errors import UserError


@command("recipes", code=False)
def _recipes(
    recipe: Annotated[Path | None, recipe_argument(kinds=())] = None,
    *,
    to: Annotated[
        Path | None, flag("FILE", "copy it to this file, such as my.toml, with the files that it names")
    ] = None,
) -> int:
    """List the recipes that come with planaria; with a name, print or copy that one."""
    from planaria.cli.commands.recipes import copy, recipe_lines
    from planaria.config.recipe import read

    if recipe is None:
        if to is not None:
            raise UserError(f"--to {to}: name the recipe to copy, as in `planaria recipes demo --to {to}`")
        print("\n".join(recipe_lines()))
    elif to is None:
        read(recipe)  # raises UserError unless the file is a recipe
        print(recipe.read_text(encoding="utf-8"), end="")
    else:
        files, then = copy(recipe, to)
        print("\n".join(map(str, files)))
        print(f"next          {then}")
    return 0
