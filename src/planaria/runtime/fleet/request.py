"""What a run wants from the place where its workers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from planaria.runtime.fleet.base import Entry, Fleet
from planaria.runtime.fleet.devices import ON_CPUS, Needs


@dataclass(frozen=True)
class Workplace:
    """What the workers of one machine are started with."""

    entry: Entry
    """importable; called in the worker process"""
    cwd: Path
    scratch: Path | None = None
    """files on their way, of no use once the workers have ended"""


Settle = Callable[[str, str], Workplace]
"""Finds the run's files on the machine that it is called on, or fetches them: (HOST:PORT of the controller, the
machine's name in the run) → what its workers start with. Raises UserError when that cannot be."""


@dataclass(frozen=True)
class Work:
    """What the workers of a run are, wherever they run."""

    entry: Entry
    """importable; called in the worker processes of this machine"""
    preload: list[str]
    """modules that workers are born with"""
    workers: int
    """workers alive at once, spares included"""
    settle: Settle
    """for every other machine; importable"""
    files: Mapping[str, Path]
    """folders whose files other machines may ask for, by the first words of a name"""
    key: bytes = field(repr=False)
    """the run's"""
    needs: Needs = ON_CPUS


class Ground(Protocol):
    """A place for workers."""

    @property
    def host(self) -> str:
        """The address at which the controller can be reached from there."""
        ...

    def fleet(self, work: Work) -> Fleet:
        """:raises UserError: when ``work`` cannot be done there."""
        ...
