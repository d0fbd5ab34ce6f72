"""A tracker of your own: a run's numbers as a table for spreadsheets, in the run's folder.

cd examples
planaria train demo --allow-code --observe.trackers "tensorboard, own_tracker:Table" --observe.options.name losses.csv
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from pydantic import PrivateAttr

from planaria.report.observe.tracker import Tracker


class Table(Tracker):
    """Its fields are its options; names with an underscore hold its state during the run."""

    name: str = "numbers.csv"
    """of the file in the run's folder"""
    _file: TextIO = PrivateAttr()

    def open(self, folder: Path) -> None:
        self._file = (folder / self.name).open("a", encoding="utf-8", buffering=1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._file.write(f"{step},{name},{value}\n")

    def close(self) -> None:
        self._file.close()
