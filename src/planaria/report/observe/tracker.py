"""Base class of trackers, which receive a run's metrics (``report/observe/trackers/``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from planaria.common.errors import missing_package
from planaria.config.registry import Choice
from planaria.report.observe.settings import Setting


class Tracker(Choice, ABC):
    """Receives a run's metrics; its fields are its options.

    All methods but :meth:`require` are called in a separate thread. After an error or a hang, the run continues without
    the tracker (``report/observe/watch.py``).
    """

    former_members: ClassVar[Mapping[str, str]] = {"introduced": "identify"}

    def require(self) -> None:
        """Check requirements; called before any worker starts and by recipe checks.

        :raises UserError: if the tracker cannot work until the user fixes its cause.
        """

    def identify(self, identity: str, settings: Mapping[str, Setting]) -> None:
        """Identify the run; called before :meth:`open`.

        :param identity: 32 hexadecimal digits, unchanged when the run is resumed.
        :param settings: configuration without secrets, dotted name → value.
        """

    @abstractmethod
    def open(self, folder: Path) -> None:
        """Start or resume the run in ``folder``."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record one point per named curve. Steps repeat after a rollback."""

    @abstractmethod
    def close(self) -> None:
        """End the run; called only if :meth:`open` succeeded."""


def require_library(tracker: str, module: str, extra: str) -> None:
    """Check that a tracker's library is installed.

    :raises UserError: if it is not, with the command that installs it.
    """
    if not is_installed(module):
        raise missing_package(f"observe.trackers: {tracker!r}", module, extra)


def is_installed(module: str) -> bool:
    """Return whether a library is installed, without importing it."""
    return find_spec(module) is not None
