"""Scalars for TensorBoard, without importing torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Tracker:
    """Writes TensorBoard's files into ``folder``, a run's ``tensorboard/``; made if absent."""

    def __init__(self, folder: Path) -> None:
        # The default of two minutes would hide most of a short run from a TensorBoard that is open beside it.
        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each named curve."""
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def close(self) -> None:
        """Writes what is still queued."""
        self._writer.close()
