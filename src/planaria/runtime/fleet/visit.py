"""What a run and a machine that joins it say to each other: JSON of bounded size, on a line with a shared key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from planaria.config.names import FileName
from planaria.faults.trace import Fault

MAX_WORKERS = 256
BEAT_S = 0.25
"""between two beats of a machine"""
_Name = Annotated[str, Field(max_length=200)]
_Incarnation = Annotated[int, Field(ge=0, lt=1 << 31)]


class Word(BaseModel):
    """Base of all: immutable, nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WorkerWord(Word):
    """About one worker."""

    worker: FileName
    """its log and its files on their way are called after it"""
    incarnation: _Incarnation


class JoinRequest(Word):
    """A machine would like to join, and what it has."""

    kind: Literal["join"] = "join"
    called: _Name
    """by its owner"""
    version: _Name
    """of planaria"""
    workers: Annotated[int, Field(ge=0, le=MAX_WORKERS)]
    """0: as many as one replica has"""
    at: _Name = ""
    """HOST:PORT where it listens, to be tried: can others reach it?"""


class Settled(Word):
    """The machine has all that its workers need: they may be started."""

    kind: Literal["settled"] = "settled"


class Beat(Word):
    """Whoever says so is well; the run answers each of a machine's."""

    kind: Literal["beat"] = "beat"


class Started(WorkerWord):
    """A worker's process is there."""

    kind: Literal["started"] = "started"


class Failed(WorkerWord):
    """A worker's process could not be started."""

    kind: Literal["failed"] = "failed"
    detail: _Name


class Departing(Word):
    """The machine will go as soon as it is not needed; it takes no more workers."""

    kind: Literal["departing"] = "departing"
    detail: _Name


class Strike(Word):
    """No machine calls, but the run's owner: let this fault strike at the next occasion."""

    kind: Literal["strike"] = "strike"
    fault: Fault


class Welcome(Word):
    """The machine may join, under this name, with a run of this setup (JSON)."""

    kind: Literal["welcome"] = "welcome"
    host: FileName
    setup: str
    cwd: str
    """where the controller runs; relative paths of the run start there"""
    reachable: bool = True
    """could the controller open a connection to it?"""


class Start(WorkerWord):
    """Start a worker."""

    kind: Literal["start"] = "start"


class Signal(WorkerWord):
    """Send a signal to a worker."""

    kind: Literal["signal"] = "signal"
    number: Annotated[int, Field(ge=1, le=64)]


class Goodbye(Word):
    """The machine is not needed any more, or not wanted."""

    kind: Literal["goodbye"] = "goodbye"
    reason: str
    welcome: bool = True
    """may it come again?"""
    again: bool = False
    """is it to call again at once? The run begins anew, and knows it no more"""


FromGuest = JoinRequest | Settled | Beat | Started | Failed | Departing | Strike
ToGuest = Welcome | Start | Signal | Beat | Goodbye
FROM_GUEST: TypeAdapter[FromGuest] = TypeAdapter(Annotated[FromGuest, Field(discriminator="kind")])
TO_GUEST: TypeAdapter[ToGuest] = TypeAdapter(Annotated[ToGuest, Field(discriminator="kind")])
