"""Base class of trackers, which receive a run's metrics and its configuration without secrets."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from planaria.common.errors import missing_package
from planaria.common.filesystems import is_url, without_password
from planaria.config.registry import Choice
from planaria.config.schema import RunConfig

Setting = str | int | float | bool | None

SECRET = "***"
_SECRETS = re.compile(r"(?:^|_)(?:key|keys|token|secret|password|passwd|passphrase|credential|credentials|auth)$", re.I)
"""endings of the names of settings that hold secrets"""


class Tracker(Choice, ABC):
    """Receives a run's metrics; its fields are its options.

    All methods but :meth:`require` are called in a separate thread. After an error or a hang, the run continues without
    the tracker (``report/observe/run_observer.py``).
    """

    former_members: ClassVar[Mapping[str, str]] = {"introduced": "identify"}
    _identity: str = PrivateAttr("")
    _settings: Mapping[str, Setting] = PrivateAttr(default_factory=dict)

    def require(self) -> None:
        """Check requirements; called before any worker starts and by recipe checks.

        :raises UserError: if the tracker cannot work until the user fixes its cause.
        """

    def identify(self, identity: str, settings: Mapping[str, Setting]) -> None:
        """Identify the run; called before :meth:`open`.

        :param identity: 32 hexadecimal digits, unchanged when the run is resumed.
        :param settings: configuration without secrets, dotted name → value.
        """
        self._identity, self._settings = identity, settings

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


def settings(config: RunConfig) -> dict[str, Setting]:
    """Return all settings by dotted name, lists as text.

    Secrets are replaced by ``***``; URLs lose user, password and query.
    """
    return dict(_flatten(config.model_dump(mode="json"), ""))


def _flatten(table: Mapping[str, Any], location: str) -> Iterator[tuple[str, Setting]]:
    for key, value in table.items():
        name = f"{location}{key}"
        if value and not isinstance(value, bool) and _SECRETS.search(str(key)):
            yield name, SECRET
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, _plain_value(value)


def _plain_value(value: Any) -> Setting:
    if isinstance(value, list):
        return (
            "["
            + ", ".join(str(dict(_flatten(v, "")) if isinstance(v, Mapping) else _plain_value(v)) for v in value)
            + "]"
        )
    if isinstance(value, str) and is_url(value):
        return re.sub(r"\?[^\s,]*", f"?{SECRET}", without_password(value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)
