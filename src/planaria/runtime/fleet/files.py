"""File transfer to machines that do not see the run's folder, and of parts of checkpoints from them.

Requests are JSON of bounded size on a control connection; contents are pieces followed by their SHA-256. Files appear
complete at either end. The controller serves only the files that a joined machine needs, and stores only stages of
checkpoints that are being collected; a machine accepts only plain file names.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from planaria.common.atomic import replace_atomically
from planaria.common.documents import first_error
from planaria.config.names import STAGE_FILE, FileName
from planaria.runtime.fleet.base import Message
from planaria.runtime.fleet.control_connections import BlockingConnection, call
from planaria.runtime.transport.listener import FILES
from planaria.runtime.transport.secure import StrangerError

PATIENCE_S = 60.0
"""seconds to wait for the next message or piece"""
MAX_BYTES = 1 << 42
"""maximum size of one file, bytes"""
_PIECE = 1 << 19
_MAX_MESSAGE_BYTES = 1 << 20
_PLAIN, _STEP = "[A-Za-z0-9_][A-Za-z0-9_.-]*", "checkpoints/step-[0-9]{8,}"
_Text = Annotated[str, Field(max_length=400)]
_Size = Annotated[int, Field(ge=0, le=MAX_BYTES)]


class Get(Message):
    """Request a file."""

    kind: Literal["get"] = "get"
    name: _Text


class ListRequest(Message):
    """Request the names of a folder's files."""

    kind: Literal["index"] = "index"
    name: _Text


class Put(Message):
    """Offer a file; its content follows after :class:`Ready`."""

    kind: Literal["put"] = "put"
    name: _Text
    size: _Size


class FileContent(Message):
    """Announce a content of ``size`` bytes."""

    kind: Literal["content"] = "content"
    size: _Size


class Listed(Message):
    """The names of a folder's files."""

    kind: Literal["listed"] = "listed"
    names: Annotated[list[FileName], Field(max_length=4096)]


class Ready(Message):
    """Request the announced content."""

    kind: Literal["ready"] = "ready"


class Digest(Message):
    """SHA-256 of the sent content."""

    kind: Literal["digest"] = "digest"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileStored(Message):
    """The file was written to disk."""

    kind: Literal["stored"] = "stored"


class Refused(Message):
    """The request failed."""

    kind: Literal["refused"] = "refused"
    reason: _Text


_REQUEST: TypeAdapter[Get | ListRequest | Put] = TypeAdapter(
    Annotated[Get | ListRequest | Put, Field(discriminator="kind")]
)
_ALLOWED: dict[type[Message], re.Pattern[str]] = {
    Get: re.compile(
        rf"run/schedule\.json|data/{_PLAIN}/{_PLAIN}"
        rf"|{_STEP}(\.partial)?/(manifest\.json|(replica-[0-9]+/)?{STAGE_FILE})"
    ),
    ListRequest: re.compile(rf"data/{_PLAIN}"),
    Put: re.compile(rf"{_STEP}(\.g[0-9]+)?\.unfinished/(replica-[0-9]+\.g[0-9]+/)?{STAGE_FILE}"),
}
"""valid names of each request"""
_Answer = FileContent | Listed | Ready | Digest | FileStored | Refused
_Expected = TypeVar("_Expected", bound=_Answer)
_ANSWER: TypeAdapter[_Answer] = TypeAdapter(Annotated[_Answer, Field(discriminator="kind")])


class FileServer:
    """The controller's end. :meth:`serve` runs in a thread per connection."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        """``roots``: first components of a name → file or folder."""
        self._roots = dict(roots)

    def serve(self, connection: BlockingConnection) -> None:
        """Answer one request, and close the connection."""
        with closing(connection), suppress(EOFError, OSError, ValidationError):
            request = _REQUEST.validate_json(_next(connection))
            try:
                self._answer(connection, request, self._path(request))
            except OSError as error:
                _send_message(connection, Refused(reason=f"{request.name}: {error.strerror or error}"[:400]))

    def _answer(self, connection: BlockingConnection, request: Get | ListRequest | Put, path: Path) -> None:
        match request:
            case Get():
                with _regular(path) as (file, size):
                    _send_message(connection, FileContent(size=size))
                    _send(connection, file)
            case ListRequest():
                names = (f.name for f in path.iterdir() if _ALLOWED[Get].fullmatch(f"{request.name}/{f.name}"))
                _send_message(connection, Listed(names=sorted(names)))
            case Put(size=size):
                if not path.parent.is_dir():
                    raise PermissionError("no such checkpoint is being collected")
                _send_message(connection, Ready())
                _receive(connection, path, size)
                _send_message(connection, FileStored())

    def _path(self, request: Get | ListRequest | Put) -> Path:
        """Return the path of the file or folder; OSError if the name is not valid for this request."""
        roots = (root for root in self._roots if f"{request.name}/".startswith(f"{root}/"))
        if not _ALLOWED[type(request)].fullmatch(request.name) or (root := next(roots, None)) is None:
            raise PermissionError("no such name in a run")
        return self._roots[root] / request.name.removeprefix(root).removeprefix("/")


class Files:
    """The other end: a machine that transfers files of the run. Methods are thread-safe."""

    def __init__(self, address: str, key: bytes) -> None:
        """``address``: HOST:PORT of the controller."""
        self.address, self._key = address, key

    def names(self, folder: str) -> list[str]:
        """Return the names of a folder's files.

        :raises OSError: if there is no such folder, or the controller's answer is missing or invalid.
        """
        with self._connection() as connection:
            _send_message(connection, ListRequest(name=folder))
            return self._answer(connection, Listed).names

    def fetch(self, name: str, to: Path) -> None:
        """Fetch a file to ``to``, creating its folder.

        :raises OSError: if it does not exist or is damaged, or the controller does not answer.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        with self._connection() as connection:
            _send_message(connection, Get(name=name))
            _receive(connection, to, self._answer(connection, FileContent).size)

    def put(self, path: Path, name: str) -> None:
        """Store a file at the controller; it is on disk when this returns.

        :raises OSError: if the controller rejects it, has no space, or does not answer.
        """
        with self._connection() as connection, path.open("rb") as file:
            _send_message(connection, Put(name=name, size=os.fstat(file.fileno()).st_size))
            self._answer(connection, Ready)
            _send(connection, file)
            self._answer(connection, FileStored)

    def _answer(self, connection: BlockingConnection, kind: type[_Expected]) -> _Expected:
        """Receive an answer of this ``kind``; OSError if another or none arrives."""
        answer = _ANSWER.validate_json(_next(connection))
        if isinstance(answer, Refused):
            raise OSError(answer.reason)
        if not isinstance(answer, kind):
            raise OSError(f"the controller at {self.address} answered {answer.kind!r} unexpectedly")
        return answer

    @contextmanager
    def _connection(self) -> Iterator[BlockingConnection]:
        try:
            with closing(call(self.address, self._key, "files", FILES, PATIENCE_S)) as connection:
                yield connection
        except EOFError:
            raise OSError(f"the controller at {self.address} closed the connection") from None
        except StrangerError:
            raise OSError(f"the controller at {self.address} is not this run's") from None
        except ValidationError as error:
            raise OSError(f"the controller at {self.address} sent an invalid answer ({first_error(error)})") from None


def _send_message(connection: BlockingConnection, message: Message) -> None:
    connection.send_bytes(message.model_dump_json().encode())


def _next(connection: BlockingConnection) -> bytes:
    if not connection.poll(PATIENCE_S):
        raise TimeoutError(f"received nothing for {PATIENCE_S:g} s")
    return connection.recv_bytes(_MAX_MESSAGE_BYTES)


def _send(connection: BlockingConnection, file: BinaryIO) -> None:
    """Send a content and its digest."""
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
        connection.send_bytes(piece)
    _send_message(connection, Digest(sha256=digest.hexdigest()))


def _receive(connection: BlockingConnection, path: Path, size: int) -> None:
    """Receive a content and its digest into a file, which appears complete and on disk.

    :raises OSError: if it cannot be written, or does not match the digest.
    """
    digest = hashlib.sha256()
    missing = size
    failure: OSError | None = None
    with replace_atomically(path) as unfinished, unfinished.open("wb") as file:
        while missing:
            piece = _next(connection)
            if not 0 < len(piece) <= missing:
                raise OSError(f"{path.name}: the content does not have the announced {size} bytes")
            missing -= len(piece)
            digest.update(piece)
            try:
                if failure is None:
                    file.write(piece)
            except OSError as error:  # receive the rest, so that the sender reads the error
                failure = error
        answer = _ANSWER.validate_json(_next(connection))
        if failure is not None:
            raise failure
        if not isinstance(answer, Digest) or answer.sha256 != digest.hexdigest():
            raise OSError(f"{path.name}: damaged in transfer")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file, not a link or device; yield it and its size."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file")
        yield file, os.fstat(file.fileno()).st_size
