"""Trackio: a local database, a Hugging Face Space or a server."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from planaria.report.observe.tracker import Tracker, require_library


class Trackio(Tracker):
    """One Trackio run per run, also when resumed; its name ends with the run's identity.

    Without ``space`` and ``server``, metrics stay on this machine (``trackio show``).
    """

    project: str = "planaria"
    """project of the run"""
    space: str = ""
    """user/name of the Hugging Face Space that the run is sent to; created if absent"""
    server: str = ""
    """http(s) URL of a Trackio server that the run is sent to"""
    _run: Any = PrivateAttr()

    def require(self) -> None:
        require_library("trackio", "trackio", "trackio")

    def open(self, folder: Path) -> None:
        self._run = import_module("trackio").init(
            project=self.project,
            name=f"{folder.name}-{self._identity[:8]}",
            resume="allow",
            config=dict(self._settings),
            space_id=self.space or None,
            server_url=self.server or None,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
