"""What hears of a run's numbers while it goes on: a registry. TensorBoard's files are written without torch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from pydantic import PrivateAttr
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from planaria.config import ObserveConfig
from planaria.errors import UserError
from planaria.registry import Choice, Registry


class Tracker(Choice, ABC):
    """Takes a run's numbers; its fields are its options. Called between steps, so a slow one slows the run down.

    One that raises is asked nothing more, and the run goes on without.
    """

    @abstractmethod
    def open(self, folder: Path) -> None:
        """The run in ``folder`` begins, or goes on there."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A step or a validation was measured: one point for each named curve."""

    @abstractmethod
    def close(self) -> None:
        """The run is over. Asked only where :meth:`open` did not raise."""


class TensorBoard(Tracker):
    """Writes TensorBoard's files into the run's ``tensorboard/``; made if absent."""

    _writer: EventFileWriter = PrivateAttr()

    def open(self, folder: Path) -> None:
        # The default of two minutes would hide most of a short run from a TensorBoard that is open beside it.
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=5)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def close(self) -> None:
        self._writer.close()


TRACKERS: Registry[Tracker] = Registry(
    "tracker",
    "observe.trackers",
    Tracker,  # type: ignore[type-abstract]
    {"tensorboard": TensorBoard},
)


def trackers(config: ObserveConfig) -> dict[str, Tracker]:
    """The trackers that the recipe names, by name; not yet open.

    :raises UserError: naming the tracker or option that is unknown, or the option's wrong value.
    """
    names = [name.strip() for name in config.trackers.split(",")] if config.trackers.strip() else []
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"observe.trackers = {config.trackers!r}: {twice!r} is there twice; remove one")
    return TRACKERS.make_all(names, config.options)
