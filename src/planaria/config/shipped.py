"""Contents of the package's parts, such as ``lab``: recipes in their ``recipes/``, and registrations with the core."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "recipes"
"""the recipes and topologies of the core"""
_TOPOLOGIES = "topologies"


def shipped_recipes() -> dict[str, Path]:
    """Return the file of each shipped recipe by its name, such as ``demo`` and ``drills/alone``."""
    recipes = {
        path.relative_to(folder).with_suffix(""): path
        for folder in PACKAGE.glob("*/recipes")
        for path in folder.rglob("*.toml")
    }
    return {name.as_posix(): path for name, path in sorted(recipes.items()) if name.parts[0] != _TOPOLOGIES}


def names() -> list[str]:
    """Return the names that :func:`find` accepts, in order."""
    return list(shipped_recipes())


def name_of(path: Path) -> str:
    """Return the name of the recipe ``path`` if it is shipped, else its path."""
    return next((name for name, own in shipped_recipes().items() if own == path), str(path))


def find(text: str) -> Path:
    """Return the recipe that ``text`` names: a file if there is one, else the shipped recipe of this name.

    If there is neither, return ``text`` as a path; reading it fails with a message.
    """
    path = Path(text)
    return path if path.is_file() else shipped_recipes().get(text, path)


def registered_kinds(module: str) -> tuple[Any, ...]:
    """Return the ``KINDS`` of every ``PART/module.py``, in the order of the parts' names."""
    parts = sorted(file.parent.name for file in PACKAGE.glob(f"*/{module}.py"))
    return tuple(kind for part in parts for kind in import_module(f"planaria.{part}.{module}").KINDS)
