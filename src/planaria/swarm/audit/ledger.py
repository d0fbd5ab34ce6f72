"""What has been given away so far of each protected question, on disk: spent before it is given, and never forgotten.

No clock is read: nothing that was spent comes back with time, whatever a clock says. Processes take turns by a lock
that the kernel gives back when its holder dies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from planaria.common import atomic, documents
from planaria.common.cache import locked
from planaria.common.documents import Record
from planaria.common.errors import UserError

MOST = 1 << 22
"""bytes of a ledger"""
MEND = "bring it back; a new one would forget what was spent"
SLACK = 1e-9
"""nats: sums of many small numbers are rounded"""


class _Spent(Record):
    version: int = 1
    nats: dict[str, float] = Field(default_factory=dict)
    """question → what its counted replies may have told, in expectation"""
    replies: dict[str, int] = Field(default_factory=dict)


class Ledger:
    """Of all sessions and processes that name the same file."""

    def __init__(self, file: Path, budget: float) -> None:
        """``budget``: nats of each question, for everybody together and for good.

        :raises UserError: when the file is damaged, or cannot be written.
        """
        self.budget, self._file = budget, file
        try:
            with locked(self._lock, lambda: None):
                if file.exists():
                    self._read()
                else:
                    self._write(_Spent())
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({error.strerror}); give another --ledger FILE") from error

    def spend(self, costs: Mapping[str, float], replies: int = 1) -> bool:
        """Note what so many replies may tell of some questions together, before they are given. False: a budget would
        be passed, and nothing is noted.

        :raises UserError: when the file is gone or damaged, so that nobody knows what was spent.
        :raises OSError: when it cannot be written; what it said stays.
        """
        with locked(self._lock, lambda: None):
            before = self._read()
            nats = {key: before.nats.get(key, 0.0) + cost for key, cost in costs.items()}
            if any(spent > self.budget + SLACK for spent in nats.values()):
                return False
            counts = {key: before.replies.get(key, 0) + replies for key in costs}
            self._write(_Spent(nats=before.nats | nats, replies=before.replies | counts))
            return True

    def spent(self, key: str) -> float:
        """Nats."""
        return self._read().nats.get(key, 0.0)

    @property
    def _lock(self) -> Path:
        return self._file.with_name(f".{self._file.name}.lock")

    def _read(self) -> _Spent:
        return documents.unsealed(self._file, _Spent, MOST, MEND)

    def _write(self, spent: _Spent) -> None:
        with atomic.replacing(self._file) as unfinished, unfinished.open("w") as file:
            file.write(documents.sealed(spent))
            file.flush()
            os.fsync(file.fileno())
