"""``planaria recipes`` and ``planaria init``: list the shipped recipes, and copy one for editing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from planaria import atomic, recipe, shipped
from planaria.errors import UserError

BESIDE = (("chaos", "trace"), ("network", "topology"), ("routing", "schedule"), ("compare", "clock"))
"""settings that name a file, relative to the recipe"""


def listing() -> Iterator[str]:
    """A line for each shipped recipe: its name, the command that it is for, and the first sentence of its comment."""
    names = shipped.names()
    width = max(map(len, names))
    for name in names:
        path = shipped.find(name)
        kind = " or ".join(sorted(recipe.kinds_of(recipe.read(path))))
        yield f"{name:{width}}  {kind:8}  {_first_sentence(path)}"


def copy(source: str, to: Path) -> list[Path]:
    """Copy the recipe ``source`` (a name or a file) to ``to``, and beside it the files that it names; all of them.

    :raises UserError: when ``source`` is no recipe, or a file is there already: nothing is written then.
    """
    path = shipped.find(source)
    copies = {to: path} | {to.parent / name: path.parent / name for name in _named(recipe.read(path))}
    there = [file for file in copies if file.exists()]
    if there:
        raise UserError(f"{there[0]}: is there already; give another name, or remove it")
    if not to.parent.is_dir():
        raise UserError(f"{to}: there is no folder {to.parent}; make it, or give another path")
    for file, original in copies.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, original.read_text())
    return list(copies)


def _named(tree: Mapping[str, Any]) -> Iterator[str]:
    for section, field in BESIDE:
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
    return text.split(". ")[0].rstrip(".:")
