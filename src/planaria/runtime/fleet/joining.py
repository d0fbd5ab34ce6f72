"""What a machine needs to join a run: the door, a file that says where, and the messages that the two exchange.

The door is in the run's folder, readable by its owner alone, and holds the key. Messages are JSON of bounded size, on a
line whose ends have both proved the key.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.names import FileName
from planaria.faults.trace import Fault
from planaria.runtime.fleet.base import Message

DOOR = "door.json"
_DOOR_BYTES = 1 << 16
MAX_WORKERS = 256
BEAT_S = 0.25
"""between two beats of a machine"""
_Name = Annotated[str, Field(max_length=200)]
_Incarnation = Annotated[int, Field(ge=0, lt=1 << 31)]
_KEY: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(pattern="^[0-9a-f]{64}$")])


class Door(BaseModel):
    """Where to call, and the key that both ends show that they know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    at: str
    """HOST:PORT"""
    key: Annotated[str, Field(pattern="^([0-9a-f]{2})+$")]
    """hexadecimal"""
    sign: str = ""
    """made anew at every start: who reads it in a folder sees this run's folder, and not another of the same name"""


def read_key(file: Path) -> bytes:
    """The key in a file of hexadecimal digits, or in a copy of a run's ``door.json``.

    :raises UserError: when it cannot be read, holds no key, or others can read it too.
    """
    try:
        if file.stat().st_mode & 0o077:
            raise UserError(f"{file}: others can read it; `chmod 600 {file}`, for the key is all it takes to join")
        with file.open("rb") as opened:
            text = documents.bounded(opened, _DOOR_BYTES).strip()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); copy it from where the run was started") from None
    try:
        return bytes.fromhex(
            Door.model_validate_json(text).key if text[:1] == b"{" else _KEY.validate_python(text.decode())
        )
    except (ValidationError, UnicodeDecodeError):
        raise UserError(f"{file}: holds no key (64 hexadecimal digits, or a run's door.json)") from None


def kept_key(file: Path, key: bytes) -> bytes:
    """The key in ``file``, which gets ``key`` if it is not there; of several who make it at once, one makes it.

    :raises UserError: when it cannot be read or made, or holds no key.
    """
    if file.exists():
        return read_key(file)
    try:
        with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.") as whole:  # its owner's alone
            whole.write(key.hex().encode() + b"\n")
            whole.flush()
            os.link(whole.name, file)  # unlike a renaming, never over one that is there
    except FileExistsError:
        return read_key(file)
    except OSError as error:
        raise UserError(f"fleet.key = {str(file)!r}: cannot be made ({error.strerror}); name another file") from None
    return key


def open_door(folder: Path, address: str, key: bytes, sign: str = "") -> Path:
    """Write the file; the caller removes it when the run is over."""
    path, unfinished = folder / DOOR, folder / f"{DOOR}.unfinished"
    unfinished.unlink(missing_ok=True)
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(handle, Door(at=address, key=key.hex(), sign=sign).model_dump_json().encode())
    os.close(handle)
    unfinished.replace(path)
    return path


def read_door(folder: Path) -> Door:
    """The door of the run in ``folder``.

    :raises UserError: when the run is over, or its door is another's.
    """
    path = folder / DOOR
    try:
        with path.open("rb") as opened:
            return Door.model_validate_json(documents.bounded(opened, _DOOR_BYTES))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: nobody is training it on a fleet; start it with `planaria train --resume {folder}`"
        ) from None
    except PermissionError:
        raise UserError(f"{path}: only the run's owner may read it; join as that user") from None
    except ValidationError:
        raise UserError(f"{path}: damaged, or of another version of planaria") from None


class WorkerMessage(Message):
    """About one worker."""

    worker: FileName
    """its log and its files on their way are called after it"""
    incarnation: _Incarnation


class JoinRequest(Message):
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


class Settled(Message):
    """The machine has all that its workers need: they may be started."""

    kind: Literal["settled"] = "settled"


class Beat(Message):
    """Whoever says so is well; the run answers each of a machine's."""

    kind: Literal["beat"] = "beat"


class Started(WorkerMessage):
    """A worker's process is there."""

    kind: Literal["started"] = "started"


class Failed(WorkerMessage):
    """A worker's process could not be started."""

    kind: Literal["failed"] = "failed"
    detail: _Name


class Departing(Message):
    """The machine will go as soon as it is not needed; it takes no more workers."""

    kind: Literal["departing"] = "departing"
    detail: _Name


class Strike(Message):
    """No machine calls, but the run's owner: let this fault strike at the next occasion."""

    kind: Literal["strike"] = "strike"
    fault: Fault


class Welcome(Message):
    """The machine may join, under this name, with a run of this setup (JSON)."""

    kind: Literal["welcome"] = "welcome"
    host: FileName
    setup: str
    cwd: str
    """where the controller runs; relative paths of the run start there"""
    reachable: bool = True
    """could the controller open a connection to it?"""


class Start(WorkerMessage):
    """Start a worker."""

    kind: Literal["start"] = "start"


class Signal(WorkerMessage):
    """Send a signal to a worker."""

    kind: Literal["signal"] = "signal"
    number: Annotated[int, Field(ge=1, le=64)]


class Goodbye(Message):
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
