"""What a run wants from the place where its workers are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from planaria.fleet.base import Entry, Fleet
from planaria.fleet.devices import ON_CPUS, Needs


@dataclass(frozen=True)
class Work:
    """What the workers of a run are, wherever they run."""

    entry: Entry
    """importable; called in the worker process"""
    preload: list[str]
    """modules that workers are born with"""
    workers: int
    """workers alive at once, spares included"""
    folders: tuple[Path, ...]
    """what they read and write"""
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
