"""The configuration that a worker process starts with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from planaria.common.address import REACHABLE, Reach
from planaria.common.logs import DEFAULT, LogSettings
from planaria.config.bounds import Natural
from planaria.config.names import NamedPath
from planaria.config.schema import RunConfig

# names of the run's folders for remote access (``runtime/fleet/files.py``)
RUN = "run"
DATA = "data"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Setup:
    """Configuration of every worker on a machine."""

    config: RunConfig
    folder: Path
    """the run's folder"""
    dataset: NamedPath
    """folder of the prepared token shards"""
    host: str
    """host at which the workers of this machine listen"""
    key: Annotated[bytes, Field(exclude=True)] = field(default=b"", repr=False)
    """key of the run, which authenticates its connections; not sent, since a machine that joins has it"""
    offset: Natural = 0
    """first sample of block 0 (``RunStarted.offset``)"""
    reach: Reach = REACHABLE
    """how other machines reach this one"""
    files: str = ""
    """HOST:PORT of the controller, if this machine does not see the run's folder; then its files are fetched from
    there, and ``folder`` is local
    """
    part: str = ""
    """name of the part of the run (``RunStarted.part``) for its snapshots in memory"""
    folder_id: str = ""
    """``RunAddress.folder_id`` (``runtime/fleet/joining.py``), which identifies ``folder``; empty: do not use it"""
    log: Annotated[LogSettings, Field(exclude=True)] = DEFAULT
    """logs of the workers; not sent, since a machine that joins has its own settings"""

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def scratch(self) -> Path:
        """Temporary files of transfers from and to the controller."""
        return self.folder / "scratch"


SETUP: TypeAdapter[Setup] = TypeAdapter(Setup)
