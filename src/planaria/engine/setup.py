"""What a worker process needs to know before its first order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from planaria.config import RunConfig


@dataclass(frozen=True)
class Setup:
    """Handed to every worker at its birth; the same for all of a run."""

    config: RunConfig
    folder: Path
    """the run's folder"""
    dataset: Path
    """folder of the prepared token shards"""
    host: str
    """where the controller listens, and the workers of its own machine"""
    key: Annotated[bytes, Field(exclude=True)] = field(default=b"", repr=False)
    """the run's, which all of its connections prove; a machine that joins knows it already"""
    offset: int = 0
    """the first sample of block 0 (``RunStarted.offset``)"""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


SETUP: TypeAdapter[Setup] = TypeAdapter(Setup)
