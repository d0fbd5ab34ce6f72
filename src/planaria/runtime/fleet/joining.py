"""A run's address file, with its key, and the messages between a run and a machine that joins.

The file is in the run's folder, readable only by its owner. Messages are JSON of bounded size on a connection whose
ends have proved the key.
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
from planaria.config.schema import FleetConfig
from planaria.faults.trace import Fault
from planaria.runtime.fleet.base import Message

RUN_ADDRESS_FILE = "address.json"
_ADDRESS_BYTES = 1 << 16
MAX_WORKERS = 256
BEAT_S = 0.25
"""seconds between heartbeats of a machine"""
_Name = Annotated[str, Field(max_length=200)]
_Incarnation = Annotated[int, Field(ge=0, lt=1 << 31)]
_KEY: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(pattern="^[0-9a-f]{64}$")])


class RunAddress(BaseModel):
    """Address and key of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    at: str
    """HOST:PORT"""
    key: Annotated[str, Field(pattern="^([0-9a-f]{2})+$")]
    """hexadecimal"""
    folder_id: str = ""
    """random for every start; identifies the run's folder, as opposed to another of the same path"""


def read_key(file: Path) -> bytes:
    """Return the key in a file of hexadecimal digits, or in a copy of a run's ``address.json``.

    :raises UserError: if it cannot be read, has no key, or other users can read it.
    """
    try:
        readable_by_others = file.stat().st_mode & 0o077
        with file.open("rb") as opened:
            text = documents.read_bounded(opened, _ADDRESS_BYTES).strip()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); copy it from where the run was started") from None
    try:
        key = bytes.fromhex(
            RunAddress.model_validate_json(text).key if text[:1] == b"{" else _KEY.validate_python(text.decode())
        )
    except (ValidationError, UnicodeDecodeError):
        raise UserError(f"{file} holds no key (64 hexadecimal digits, or a run's address.json)") from None
    if readable_by_others:
        raise UserError(f"{file}: other users can read it; `chmod 600 {file}`, since anyone with the key can join")
    return key


def read_or_create_key(file: Path, key: bytes) -> bytes:
    """Return the key in ``file``, or create the file with ``key``; atomic among several creators.

    :raises UserError: if it cannot be read or created, or has no key.
    """
    if file.exists():
        return read_key(file)
    try:
        with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.") as whole:  # readable by its owner only
            whole.write(key.hex().encode() + b"\n")
            whole.flush()
            os.link(whole.name, file)  # unlike a rename, never overwrites
    except FileExistsError:
        return read_key(file)
    except OSError as error:
        raise UserError(f"fleet.key = {str(file)!r} cannot be created ({error.strerror}); name another file") from None
    return key


def publish_run_address(folder: Path, address: str, key: bytes, folder_id: str = "") -> Path:
    """Write the file with the run's address; the caller removes it when the run ends."""
    path, unfinished = folder / RUN_ADDRESS_FILE, folder / f"{RUN_ADDRESS_FILE}.unfinished"
    unfinished.unlink(missing_ok=True)
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(handle, RunAddress(at=address, key=key.hex(), folder_id=folder_id).model_dump_json().encode())
    os.close(handle)
    unfinished.replace(path)
    return path


def read_run_address(folder: Path) -> RunAddress:
    """Return the address of the run in ``folder``; UserError if the run is over, or the file is another user's."""
    path = folder / RUN_ADDRESS_FILE
    try:
        with path.open("rb") as opened:
            return RunAddress.model_validate_json(documents.read_bounded(opened, _ADDRESS_BYTES))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: it is not being trained on a fleet; start it with `planaria train --resume {folder}`"
        ) from None
    except PermissionError:
        raise UserError(f"{path}: only the run's owner may read it; join as that user") from None
    except ValidationError:
        raise UserError(f"{path}: damaged, or from another version of planaria") from None


def join_command(fleet: FleetConfig, folder: Path, address: str) -> str:
    """Return the command for other machines, with what it needs there, or an empty string if the recipe expects none to
    join.

    :param address: HOST:PORT of the controller for other machines
    """
    if not fleet.port and fleet.key is None and fleet.local_workers is None:
        return ""
    key = folder / RUN_ADDRESS_FILE if fleet.key is None else Path(fleet.key)
    return f"planaria join {address} --key-file {key.name}    (with a copy of {key})"


def standby_commands(fleet: FleetConfig, name: str, key: str = "") -> list[str]:
    """Return the commands with which other machines stand by; empty without ``fleet.shared_log``.

    :param key: file with the key there; default: of the same name, in the current directory
    """
    if fleet.shared_log is None or fleet.key is None:
        return []
    location, key = f"{fleet.shared_log.rstrip('/')}/{name}", key or Path(fleet.key).name
    others = (at for at in fleet.standby_addresses if at != fleet.own_address)
    return [f"planaria join {location} --standby --at {at} --key-file {key}" for at in others]


class WorkerMessage(Message):
    """Base of messages about one worker."""

    worker: FileName
    """also names its log and temporary files"""
    incarnation: _Incarnation


class JoinRequest(Message):
    """A machine requests to join."""

    kind: Literal["join"] = "join"
    called: _Name
    """name for its owner"""
    version: _Name
    """version of planaria"""
    workers: Annotated[int, Field(ge=0, le=MAX_WORKERS)]
    """0: enough for one replica"""
    at: _Name = ""
    """HOST:PORT of a listener, to test whether others reach it"""
    returning: _Name = ""
    """its name in the run, if it was a machine of a former controller; its workers return too"""


class MachineReady(Message):
    """The machine is ready to start workers."""

    kind: Literal["machine_ready"] = "machine_ready"


class Beat(Message):
    """A heartbeat; the run answers each heartbeat of a machine."""

    kind: Literal["beat"] = "beat"


class Started(WorkerMessage):
    """A worker's process has started."""

    kind: Literal["started"] = "started"


class Failed(WorkerMessage):
    """A worker's process could not be started."""

    kind: Literal["failed"] = "failed"
    detail: _Name


class Departing(Message):
    """The machine leaves once its workers are not needed; it takes no more workers."""

    kind: Literal["departing"] = "departing"
    detail: _Name


class InjectFaultRequest(Message):
    """The run's owner, not a machine, requests that this fault be injected next."""

    kind: Literal["inject_fault"] = "inject_fault"
    fault: Fault


class Welcome(Message):
    """The machine may join under this name, with this setup (JSON)."""

    kind: Literal["welcome"] = "welcome"
    host: FileName
    setup: str
    cwd: str
    """the controller's working directory, for relative paths of the run"""
    reachable: bool = True
    """whether the controller could connect to it"""


class Start(WorkerMessage):
    """Start a worker."""

    kind: Literal["start"] = "start"


class Signal(WorkerMessage):
    """Send a signal to a worker."""

    kind: Literal["signal"] = "signal"
    number: Annotated[int, Field(ge=1, le=64)]


class ConnectionClosing(Message):
    """The controller ends the connection: the machine is no longer needed or not accepted, or a request is answered."""

    kind: Literal["goodbye"] = "goodbye"
    reason: str
    welcome: bool = True
    """whether it may join again"""
    again: bool = False
    """whether it should reconnect immediately, since the run restarts"""


FromMachine = JoinRequest | MachineReady | Beat | Started | Failed | Departing | InjectFaultRequest
ToMachine = Welcome | Start | Signal | Beat | ConnectionClosing
FROM_MACHINE: TypeAdapter[FromMachine] = TypeAdapter(Annotated[FromMachine, Field(discriminator="kind")])
TO_MACHINE: TypeAdapter[ToMachine] = TypeAdapter(Annotated[ToMachine, Field(discriminator="kind")])
