"""Kinds of result folders besides runs, which other parts of planaria list in ``PART/folder_kinds.py`` as ``KINDS``.

These modules import little. Each method imports its dependencies, so a run's report loads no other part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from planaria.config import parts

PAGE = "report.html"
"""default name of a report"""
FIX = "restore the file that planaria wrote"
"""advice for damaged files"""
Strategy = Literal["once", "vote", "tree"]
"""strategy by which a program is written: directly, as the best of several, or divided into functions"""
Choice = Literal["agreement", "plurality"]
"""selection of the best of several programs"""


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
    """A kind of folder. A kind overrides the methods of the commands that accept it."""

    name = ""
    marker = ""
    """file or folder that only this kind has"""
    has_own_config = False
    """whether its config.toml is not a run's recipe"""

    def matches(self, folder: Path) -> bool:
        """Return whether ``folder`` is of this kind."""
        return (folder / self.marker).exists()

    def report(self, folder: Path) -> ReportPage:
        """Return the report; UserError if there is none."""
        raise NotImplementedError

    def generate(
        self,
        folder: Path,
        prompt: str,
        max_new: int,
        temperature: float,
        top_k: int,
        seed: int,
        note: Callable[[str], object] | None = None,
    ) -> Iterator[str]:
        """Yield the continuation of ``prompt``, as :func:`planaria.runtime.api.completer.stream` does."""
        raise NotImplementedError

    def evaluate(self, folder: Path, text: str | None) -> int:
        """Print the perplexity on ``text``, or on the folder's own texts; return the exit code."""
        raise NotImplementedError

    def evaluate_exported(self, folder: Path, text: str | None) -> int:
        """Print the perplexity of an exported model, which may be made of such a folder; return the exit code."""
        raise NotImplementedError

    def weigh_worst(self, folder: Path, tokens: int | None, floor: float | None, tolerance: float | None) -> int:
        """Print the best weights for the domain with the largest loss; return the exit code."""
        raise NotImplementedError

    def write_program(
        self,
        folder: Path,
        task: str,
        problem: int,
        strategy: Strategy,
        tokens: int,
        top_k: int,
        seed: int,
        choose: Choice,
    ) -> int:
        """Print a program for a problem of ``task``, written by any model; return the exit code."""
        raise NotImplementedError

    def export_peer(self, folder: Path, peer: str, to: Path, number: int | None, note: Callable[[str], None]) -> Path:
        """Export the model of a peer after ``number`` rounds (None: the newest saved); return its folder."""
        raise NotImplementedError


@cache
def folder_kinds() -> tuple[FolderKind, ...]:
    """Return all registered kinds."""
    return parts.registered_kinds("folder_kinds")


def kind_of(folder: Path) -> FolderKind | None:
    """Return the kind of ``folder``; None for a run, or anything unknown."""
    return next((kind for kind in folder_kinds() if kind.matches(folder)), None)


def find_kind(name: str) -> FolderKind:
    """Return the registered kind ``name``."""
    return next(kind for kind in folder_kinds() if kind.name == name)
