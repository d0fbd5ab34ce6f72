"""``planaria recipes``: list the shipped recipes, and copy one for editing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from planaria.cli.flags import command, flag, recipe_argument
from planaria.common.errors import UserError
from planaria.config import shipped

FILE_SETTINGS = (("chaos", "trace"), ("network", "topology"), ("routing", "schedule"), ("compare", "clock"))
"""settings whose value is the path of a file, relative to the recipe"""


@command("recipes", code=False)
def _recipes(
    recipe: Annotated[Path | None, recipe_argument(kinds=())] = None,
    *,
    to: Annotated[
        Path | None, flag("FILE", "copy it to this file, such as my.toml, with the files that it names")
    ] = None,
) -> int:
    """List the recipes that come with planaria; with a name, print or copy that one."""
    from planaria.config.recipe import read

    if recipe is None:
        if to is not None:
            raise UserError(f"--to {to}: name the recipe to copy, as in `planaria recipes demo --to {to}`")
        print("\n".join(_recipe_lines()))
    elif to is None:
        read(recipe)  # raises UserError unless the file is a recipe
        print(recipe.read_text(encoding="utf-8"), end="")
    else:
        files, then = _copy(recipe, to)
        print("\n".join(map(str, files)))
        print(f"next          {then}")
    return 0


def _recipe_lines() -> Iterator[str]:
    """Yield a line for each shipped recipe: its name, its command, and the first sentence of its comment."""
    from planaria.config import kinds, recipe

    recipes = shipped.names()
    width = max(map(len, recipes))
    for name in recipes:
        path = shipped.find(name)
        command = " or ".join(sorted(map(kinds.command_of, kinds.kinds_of(recipe.read(path)))))
        yield f"{name:{width}}  {command:13}  {_first_sentence(path)}"


def _copy(path: Path, to: Path) -> tuple[list[Path], str]:
    """Copy the recipe ``path`` to ``to``, with the files that its settings name.

    The copy is named after its file. Return all copies, and the command that runs the recipe.
    :raises UserError: if ``path`` is not a recipe, or a file exists; then nothing is written.
    """
    from planaria.common import atomic
    from planaria.config import kinds, names, recipe

    tree = recipe.read(path)
    copies = {to: path} | {to.parent / name: path.parent / name for name in _referenced_files(tree)}
    existing = [file for file in copies if file.exists()]
    if existing:
        raise UserError(f"{existing[0]} already exists; use another name, or remove it")
    if not to.parent.is_dir():
        raise UserError(f"{to}: folder {to.parent} does not exist; create it, or use another path")
    for file, original in copies.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        text = original.read_text(encoding="utf-8")
        atomic.write_text(file, _with_name(text, names.name_of_recipe(to.stem)) if original == path else text)
    return list(copies), f"planaria {kinds.command_of(kinds.kinds_of(tree)[0])} {to}"


def _with_name(text: str, name: str) -> str:
    head, table, rest = text.partition("\n[")  # the name is not in a table
    return re.sub(r"^name *= *([\"']).*?\1", f'name = "{name}"', head, count=1, flags=re.MULTILINE) + table + rest


def _referenced_files(tree: Mapping[str, Any]) -> Iterator[str]:
    for section, field in FILE_SETTINGS:
        name = tree.get(section, {}).get(field)
        if isinstance(name, str) and not Path(name).is_absolute():
            yield name


def _first_sentence(path: Path) -> str:
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    text = " ".join(lines)
    return re.split(r"(?<=[.?]) ", text)[0].rstrip(".:")
