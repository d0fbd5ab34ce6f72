"""TensorBoard event files, written without torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from planaria.report.observe.tracker import Tracker

if TYPE_CHECKING:  # half a second of imports
    from tensorboard.compat.proto.summary_pb2 import Summary


class TensorBoard(Tracker):
    """Writes event files into the run's ``tensorboard/``; a resumed run adds a file."""

    _writer: Any = PrivateAttr()

    def open(self, folder: Path) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        # The library's EventFileWriter writes in a thread whose errors cannot be caught here.
        events = folder / "tensorboard"
        events.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}.{os.getpid()}"
        self._writer = RecordWriter((events / name).open("xb"))
        self._write_event(file_version="brain.Event:2")
        if self._settings:
            rows = [f"| {name} | {value} |" for name, value in self._settings.items()]
            table = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._write_summary(0, text_pb("configuration", table))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write_summary(
            step, Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        )

    def close(self) -> None:
        self._writer.close()

    def _write_summary(self, step: int, summary: Summary) -> None:
        self._write_event(step=step, summary=summary)

    def _write_event(self, **fields: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()
