"""What a worker process needs to know before its first order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

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
    port: int
    """where the controller's rendezvous store listens"""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


SETUP: TypeAdapter[Setup] = TypeAdapter(Setup)
