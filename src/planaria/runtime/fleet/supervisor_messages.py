"""Messages between a run's supervisor and its controller (``runtime/fleet/supervisor.py``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from planaria.runtime.fleet.base import MAX_REPORT_BYTES, Message, Notice, Reported, WorkerEnded
from planaria.runtime.fleet.joining import Signal, Start

MAX_BYTES = 2 * MAX_REPORT_BYTES
"""maximum size of a message, a report as a JSON string, bytes"""


class LeadRequest(Message):
    """A controller requests the lead."""

    kind: Literal["hello"] = "hello"
    term: int
    received: int
    """number of the last notice in the log; 0: none"""


class Send(Message):
    """Forward an order to a worker."""

    kind: Literal["send"] = "send"
    worker: str
    incarnation: int | None = None
    """an incarnation that counts as dead, or None for the current one"""
    text: str


class Logged(Message):
    """The leader has processed all notices up to this number."""

    kind: Literal["logged"] = "logged"
    number: int


class Close(Message):
    """End all workers, then the supervisor."""

    kind: Literal["close"] = "close"


class LeadGranted(Message):
    """The controller leads now."""

    kind: Literal["welcome"] = "welcome"
    shared: str
    """what the first leader passes on to later ones, such as the run's key"""
    sent: dict[str, list[str]]
    """worker → its last orders, oldest first"""


class LeadTaken(Message):
    """Another controller leads."""

    kind: Literal["deposed"] = "deposed"
    term: int


class Relayed(Message):
    """A worker's report."""

    kind: Literal["relayed"] = "relayed"
    number: int
    worker: str
    incarnation: int
    text: str

    def notice(self) -> Notice:
        return Reported(self.worker, self.incarnation, self.text.encode(), self.number)


class Ended(Message):
    """A worker's end."""

    kind: Literal["ended"] = "ended"
    number: int
    worker: str
    incarnation: int
    cause: Literal["connection", "exit", "heartbeat"]
    detail: str

    def notice(self) -> Notice:
        return WorkerEnded(self.worker, self.incarnation, self.cause, self.detail, self.number)


FROM_LEADER: TypeAdapter[LeadRequest | Start | Send | Signal | Logged | Close] = TypeAdapter(
    Annotated[LeadRequest | Start | Send | Signal | Logged | Close, Field(discriminator="kind")]
)
TO_LEADER: TypeAdapter[LeadGranted | LeadTaken | Relayed | Ended] = TypeAdapter(
    Annotated[LeadGranted | LeadTaken | Relayed | Ended, Field(discriminator="kind")]
)
