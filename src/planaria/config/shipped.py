"""The recipes that come with planaria: found by name, from any folder."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "recipes"
_TOPOLOGIES = "topologies"


def names() -> list[str]:
    """What :func:`find` knows, such as ``demo`` and ``drills/alone``."""
    found = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.toml"))
    return sorted(name.as_posix() for name in found if name.parts[0] != _TOPOLOGIES)


def find(text: str) -> Path:
    """The recipe that ``text`` means: a file, or else the shipped recipe of that name.

    The path that was given, when it is neither: reading it says so.
    """
    given, ours = Path(text), FOLDER / f"{text}.toml"
    return ours if not given.is_file() and text in names() else given
