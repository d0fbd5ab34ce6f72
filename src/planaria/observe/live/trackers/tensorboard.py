"""TensorBoard's files, written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import PrivateAttr
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from planaria.observe.live.settings import Setting
from planaria.observe.live.tracker import Tracker


class TensorBoard(Tracker):
    """Writes TensorBoard's files into the run's ``tensorboard/``; made if absent. A run that goes on adds a file."""

    _writer: EventFileWriter = PrivateAttr()
    _settings: Mapping[str, Setting] = PrivateAttr(default_factory=dict)

    def introduced(self, identity: str, settings: Mapping[str, Setting]) -> None:
        self._settings = settings

    def open(self, folder: Path) -> None:
        # The default of two minutes would hide most of a short run from a TensorBoard that is open beside it.
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=5)
        if self._settings:
            rows = [f"| {name} | {value} |" for name, value in self._settings.items()]
            table = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._add(0, text_pb("configuration", table))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
