"""Kinds of result folders besides runs, which other parts of planaria list in ``PART/folder_kinds.py`` as ``KINDS``.

These modules import little. Each method imports what it needs, so a run's report loads no other part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from planaria.common.errors import UserError
from planaria.config import shipped

PAGE = "report.html"
"""default name of a report"""
FIX = "restore the file that planaria wrote"
"""advice for damaged files"""


class ReportPage(NamedTuple):
    """The report of a folder of any kind."""

    file: Path
    """default path of its page"""
    write: Callable[[Path], Path]
    """writes the page to a path, and returns the path"""
    body: Callable[[], Iterator[str]]
    """yields the sections as HTML"""
    check: Callable[[], None] = lambda: None
    """raises LedgerError if samples of a run were lost or used twice"""


class FolderKind:
    """A kind of folder."""

    name = ""
    marker = ""
    """file or folder that only this kind has"""
    has_own_config = False
    """whether its config.toml is not a run's recipe"""
    functions: ClassVar[Mapping[str, str]] = {}
    """functions that commands call with such folders: name → MODULE:FUNCTION, imported when called"""

    def matches(self, folder: Path) -> bool:
        """Return whether ``folder`` is of this kind."""
        return (folder / self.marker).exists()

    def report(self, folder: Path) -> ReportPage:
        """Return the report; UserError if there is none."""
        raise NotImplementedError

    def page_source(self, folder: Path) -> Any:
        """Return the source of the folder's live page, or None if the folder is of another kind.

        :raises UserError: if folders of this kind have no live page.
        """
        if self.matches(folder):
            raise UserError(f"{folder} has results of {self.name!r}, which have no live page; see its report.html")
        return None

    def function(self, name: str) -> Callable[..., Any]:
        """Return one of ``functions``."""
        module, _, function = self.functions[name].partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), function)
        return loaded


@cache
def folder_kinds() -> tuple[FolderKind, ...]:
    """Return all registered kinds."""
    return shipped.registered_kinds("folder_kinds")


def kind_of(folder: Path) -> FolderKind | None:
    """Return the kind of ``folder``; None for a run, or anything unknown."""
    return next((kind for kind in folder_kinds() if kind.matches(folder)), None)


def find_kind(name: str) -> FolderKind:
    """Return the registered kind ``name``."""
    return next(kind for kind in folder_kinds() if kind.name == name)
