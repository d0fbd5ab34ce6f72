"""A run's log in a store that outlives the machine that leads: one object for each batch of lines.

An object is created once, under the next number: ``log/000000000001``, ``log/000000000002``, … Creating the next one is
the only way to append, so a controller whose machine was believed lost cannot append to a log that another one
continues. A new controller is elected by creating the next object with a higher term; it then has the whole log.
``lease.json`` is rewritten while a controller leads; standbys stand for election when it is not.

The store is a folder or bucket (``common/object_store.py``), or a quorum of holders (``control/log/quorum_store.py``).
It is trusted: all who can write to it can lead the run.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planaria.common.errors import RunStopped, UserError
from planaria.common.object_store import BadObject

MAX_BATCH_BYTES = 64 << 20
"""maximum size of a batch, bytes"""
MAX_FILE_BYTES = 16 << 20
"""maximum size of a run's file in the store, such as its configuration, bytes"""
_LEASE_BYTES = 1 << 10
_LEASE = "lease.json"
_PROBE = "probe"
Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class SharedPosition(NamedTuple):
    """A position between two batches of a shared log."""

    number: int = 1
    """number of the next batch"""
    lines: int = 0
    """lines before it"""
    term: int = 1
    """term of the previous batch"""


BEGIN = SharedPosition()


class Deposed(RunStopped):
    """Another controller leads the run."""

    def __init__(self, term: int) -> None:
        super().__init__(f"another machine leads this run, as term {term}")
        self.term = term


class LeadershipLost(RunStopped):
    """This process may no longer lead its run."""

    def __init__(self, message: str, position: SharedPosition) -> None:
        """:param position: after the last line of the shared log that this process is known to have appended"""
        super().__init__(message)
        self.position = position


class _Header(BaseModel):
    """First line of a batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    term: Annotated[int, Field(ge=1)]
    leader: Hex32
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Lease(BaseModel):
    """The last sign of life of the controller that leads; compared for equality only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    term: Annotated[int, Field(ge=1)]
    leader: Hex32
    count: Annotated[int, Field(ge=0)]
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """time of the renewal, seconds since 1970; only reports use it, since clocks differ"""


@dataclass(frozen=True)
class Batch:
    """Lines that a controller appended together."""

    term: int
    leader: str
    """random digits of the controller"""
    lines: tuple[str, ...]


class SharedStore(Protocol):
    """Small named objects that several machines read and write, as :class:`planaria.common.object_store.Store`."""

    @property
    def location(self) -> str: ...
    def read(self, path: str, most: int) -> bytes | None: ...
    def write(self, path: str, data: bytes) -> bool: ...
    def replace(self, path: str, data: bytes) -> None: ...
    def creates_once(self, path: str) -> bool: ...


class SharedLog:
    """The shared log of one run."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    @property
    def location(self) -> str:
        """Location of the store, for messages."""
        return self._store.location

    def require_creation_once(self) -> None:
        """Raise UserError if the store lets a file be created twice, as some without conditional writes do."""
        if not self._store.creates_once(f"{_PROBE}/{secrets.token_hex(16)}"):
            raise UserError(
                f"fleet.shared_log: {self.location} does not keep a file from being created twice; use a folder that "
                "all machines mount, or an object store with conditional writes"
            )

    def read(self, number: int) -> Batch | None:
        """Return a batch, or None if it is not appended yet.

        :raises UserError: if it is damaged.
        """
        try:
            data = self._store.read(_name(number), MAX_BATCH_BYTES)
            return None if data is None else _parse_batch(data)
        except (BadObject, ValidationError, ValueError) as error:
            reason = error.reason if isinstance(error, BadObject) else "damaged"
            raise UserError(f"{self.location}/{_name(number)}: {reason}; restore the file from a copy") from None

    def since(self, number: int) -> Iterator[Batch]:
        """Yield the batches from ``number`` to the present end."""
        while (batch := self.read(number)) is not None:
            yield batch
            number += 1

    def newest(self) -> int:
        """Return the number of the last batch, or 0 if there is none, with few reads."""
        after = 1
        while self.read(after) is not None:
            after *= 2
        before = after // 2
        while after - before > 1:
            middle = (before + after) // 2
            if self.read(middle) is None:
                after = middle
            else:
                before = middle
        return before

    def append(self, number: int, batch: Batch) -> bool:
        """Create batch ``number``; return False if another controller has.

        A write whose outcome was lost is repeated, and finds its own file.
        """
        if self._store.write(_name(number), _text(batch)):
            return True
        there = self.read(number)
        return there is not None and (there.term, there.leader) == (batch.term, batch.leader)

    def renew(self, lease: Lease) -> None:
        self._store.replace(_LEASE, lease.model_dump_json().encode())

    def lease(self) -> Lease | None:
        """Return the last lease; None if there is none, or it cannot be read."""
        try:
            data = self._store.read(_LEASE, _LEASE_BYTES)
            return None if data is None else Lease.model_validate_json(data)
        except (BadObject, ValidationError):
            return None

    def put_file(self, name: str, data: bytes) -> None:
        """Store a file of the run for the other machines."""
        self._store.replace(f"files/{name}", data)

    def file(self, name: str) -> bytes | None:
        """Return a file of the run; None if it has none of that name.

        :raises UserError: if it cannot be read.
        """
        try:
            return self._store.read(f"files/{name}", MAX_FILE_BYTES)
        except BadObject as error:
            raise UserError(f"{self.location}/files/{name}: {error.reason}; restore the file from a copy") from None


@dataclass
class LogAppender:
    """The leading controller's end of a shared log. Lines are durable once :meth:`flush` returns."""

    log: SharedLog
    term: int = 1
    next_number: int = 1
    leader: str = field(default_factory=lambda: secrets.token_hex(16))
    lines: int = 0
    """lines of the log before the next batch"""
    _lines: list[str] = field(default_factory=list)

    @classmethod
    def after(cls, end: SharedPosition, log: SharedLog) -> LogAppender:
        """Return the appender of a controller that would continue the log from its end, in the next term."""
        return cls(log, end.term + 1, end.number, lines=end.lines)

    @property
    def position(self) -> SharedPosition:
        """Position after the last batch that is known to be appended."""
        return SharedPosition(self.next_number, self.lines, self.term)

    def stand(self) -> bool:
        """Stand for election at the end of the log; return whether this controller leads now."""
        elected = self.log.append(self.next_number, Batch(self.term, self.leader, ()))
        self.next_number += elected
        return elected

    def add(self, line: str) -> None:
        """Add a line to the next batch."""
        self._lines.append(line)

    def flush(self) -> None:
        """Append the lines added since the last call.

        :raises Deposed: if another controller has appended: its term is higher.
        :raises StoreUnreachable: if the store does not answer; whether the lines were appended is unknown.
        """
        if not self._lines:
            return
        if not self.log.append(self.next_number, Batch(self.term, self.leader, tuple(self._lines))):
            there = self.log.read(self.next_number)
            raise Deposed(self.term + 1 if there is None else there.term)
        self.next_number += 1
        self.lines += len(self._lines)
        self._lines = []


def _name(number: int) -> str:
    return f"log/{number:012d}"


def _text(batch: Batch) -> bytes:
    lines = "".join(f"{line}\n" for line in batch.lines).encode()
    header = _Header(term=batch.term, leader=batch.leader, sha256=hashlib.sha256(lines).hexdigest())
    return header.model_dump_json().encode() + b"\n" + lines


def _parse_batch(data: bytes) -> Batch:
    """:raises ValueError: if the batch is damaged."""
    first, _, lines = data.partition(b"\n")
    header = _Header.model_validate_json(first)
    if hashlib.sha256(lines).hexdigest() != header.sha256:
        raise ValueError("wrong digest")
    return Batch(header.term, header.leader, tuple(lines.decode().split("\n")[:-1]))
