"""What hears of a run's numbers while it goes on: the base of all trackers (``report/live/trackers/``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from planaria.common.errors import missing_package
from planaria.config.registry import Choice
from planaria.report.live.settings import Setting


class Tracker(Choice, ABC):
    """Takes a run's numbers; its fields are its options. All but :meth:`require` is called in a thread of its own.

    One that raises, or hangs, is asked nothing more, and the run goes on without (``report/live/watch.py``).
    """

    def require(self) -> None:
        """Called before any worker starts, and when a recipe is only checked.

        :raises UserError: when something that the user can mend keeps this tracker from its work.
        """

    def introduced(self, identity: str, settings: Mapping[str, Setting]) -> None:
        """What run this is; told before :meth:`open`.

        :param identity: 32 hexadecimal digits, the same whenever the run is resumed.
        :param settings: its configuration, dotted name → value, without secrets.
        """

    @abstractmethod
    def open(self, folder: Path) -> None:
        """The run in ``folder`` begins, or goes on there."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Something was measured: one point for each named curve. After a rollback steps come again."""

    @abstractmethod
    def close(self) -> None:
        """The run is over. Asked only where :meth:`open` did not raise."""


def require_library(tracker: str, module: str, extra: str) -> None:
    """
    :raises UserError: when the library of a tracker is not installed, with the command that installs it.
    """
    if not installed(module):
        raise missing_package(f"observe.trackers: {tracker!r}", module, extra)


def installed(module: str) -> bool:
    """Is this library there? It is not imported for the answer."""
    return find_spec(module) is not None
