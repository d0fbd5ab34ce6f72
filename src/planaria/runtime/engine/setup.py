"""What a worker process needs to know before its first order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from planaria.config.bounds import Natural
from planaria.config.names import NamedPath
from planaria.config.schema import RunConfig
from planaria.runtime.transport.address import REACHABLE, Reach

RUN, DATA, CHECKPOINTS = "run", "data", "checkpoints"
"""what the run's folders are called where files are asked for (``runtime/fleet/files.py``)"""


@dataclass(frozen=True)
class Setup:
    """Handed to every worker at its birth; the same for all of a run."""

    config: RunConfig
    folder: Path
    """the run's folder"""
    dataset: NamedPath
    """folder of the prepared token shards"""
    host: str
    """where the workers of this machine listen"""
    key: Annotated[bytes, Field(exclude=True)] = field(default=b"", repr=False)
    """the run's, which all of its connections prove; a machine that joins knows it already"""
    offset: Natural = 0
    """the first sample of block 0 (``RunStarted.offset``)"""
    reach: Reach = REACHABLE
    """how this machine is reached by others"""
    files: str = ""
    """HOST:PORT of the controller, on a machine that does not see the run's folder: its files are fetched from there,
    and ``folder`` is this machine's own"""
    part: str = ""
    """name of the part of the run (``RunStarted.part``), which labels its snapshots in memory"""
    sign: str = ""
    """``Door.sign`` of the run (``runtime/fleet/joining.py``), to recognise its ``folder``; empty: do not look there"""

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def scratch(self) -> Path:
        """For files that are on their way from or to the controller."""
        return self.folder / "scratch"


SETUP: TypeAdapter[Setup] = TypeAdapter(Setup)
