"""A run's files for machines that do not see its folder: the controller sends them, and takes parts of checkpoints.

Requests are JSON of bounded size on a line with the run's key (``runtime/fleet/switchboard.py``); contents are pieces
of bytes followed by their SHA-256. Files appear whole at either end. Both ends validate names: the controller serves
only what a joining machine needs, and stores only stages of checkpoints that are being collected; a machine accepts
only plain file names.
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

from planaria.common.atomic import replacing
from planaria.common.documents import first
from planaria.config.names import STAGE_FILE, FileName
from planaria.runtime.fleet.base import Message
from planaria.runtime.fleet.switchboard import WorkerLine, call
from planaria.runtime.transport.listener import FILES
from planaria.runtime.transport.secure import StrangerError

PATIENCE_S = 60.0
"""how long one end waits for the other's next word or piece"""
MOST_BYTES = 1 << 42
"""of one file"""
_PIECE = 1 << 19
_MOST_WORD_BYTES = 1 << 20
_PLAIN, _STEP = "[A-Za-z0-9_][A-Za-z0-9_.-]*", "checkpoints/step-[0-9]{8,}"
_Text = Annotated[str, Field(max_length=400)]
_Size = Annotated[int, Field(ge=0, le=MOST_BYTES)]


class Get(Message):
    """Send the file of this name."""

    kind: Literal["get"] = "get"
    name: _Text


class Index(Message):
    """Which files does this folder have?"""

    kind: Literal["index"] = "index"
    name: _Text


class Put(Message):
    """Take a file, whose content follows once the other end is ready for it."""

    kind: Literal["put"] = "put"
    name: _Text
    size: _Size


class Content(Message):
    """A file's content follows: so many bytes."""

    kind: Literal["content"] = "content"
    size: _Size


class Listed(Message):
    """The names of a folder's files."""

    kind: Literal["listed"] = "listed"
    names: Annotated[list[FileName], Field(max_length=4096)]


class Ready(Message):
    """Send the content."""

    kind: Literal["ready"] = "ready"


class Digest(Message):
    """SHA-256 of the content that was sent."""

    kind: Literal["digest"] = "digest"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Stored(Message):
    """The file is there, on its disk."""

    kind: Literal["stored"] = "stored"


class Refused(Message):
    """It cannot be done, and why."""

    kind: Literal["refused"] = "refused"
    reason: _Text


_ASKED: TypeAdapter[Get | Index | Put] = TypeAdapter(Annotated[Get | Index | Put, Field(discriminator="kind")])
_ALLOWED: dict[type[Message], re.Pattern[str]] = {
    Get: re.compile(
        rf"run/schedule\.json|data/{_PLAIN}/{_PLAIN}"
        rf"|{_STEP}(\.partial)?/(manifest\.json|(replica-[0-9]+/)?{STAGE_FILE})"
    ),
    Index: re.compile(rf"data/{_PLAIN}"),
    Put: re.compile(rf"{_STEP}(\.g[0-9]+)?\.unfinished/(replica-[0-9]+\.g[0-9]+/)?{STAGE_FILE}"),
}
"""the names that each request may have"""
_Answer = Content | Listed | Ready | Digest | Stored | Refused
_Heard = TypeVar("_Heard", bound=_Answer)
_ANSWER: TypeAdapter[_Answer] = TypeAdapter(Annotated[_Answer, Field(discriminator="kind")])


class FileServer:
    """The controller's end. :meth:`serve` is called in a thread of each caller's own."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        """``roots``: the beginning of a name, in whole components → the file or folder that it stands for."""
        self._roots = dict(roots)

    def serve(self, line: WorkerLine) -> None:
        """Answer the one request on a line, and close the line."""
        with closing(line), suppress(EOFError, OSError, ValidationError):
            asked = _ASKED.validate_json(_next(line))
            try:
                self._answer(line, asked, self._path(asked))
            except OSError as error:
                _say(line, Refused(reason=f"{asked.name}: {error.strerror or error}"[:400]))

    def _answer(self, line: WorkerLine, asked: Get | Index | Put, path: Path) -> None:
        match asked:
            case Get():
                with _regular(path) as (file, size):
                    _say(line, Content(size=size))
                    _send(line, file)
            case Index():
                found = (f.name for f in path.iterdir() if _ALLOWED[Get].fullmatch(f"{asked.name}/{f.name}"))
                _say(line, Listed(names=sorted(found)))
            case Put(size=size):
                if not path.parent.is_dir():
                    raise PermissionError("no such checkpoint is being collected")
                _say(line, Ready())
                _receive(line, path, size)
                _say(line, Stored())

    def _path(self, asked: Get | Index | Put) -> Path:
        """Return where the file or folder is.

        :raises OSError: when the name is not one that this request may have.
        """
        found = (root for root in self._roots if f"{asked.name}/".startswith(f"{root}/"))
        if not _ALLOWED[type(asked)].fullmatch(asked.name) or (root := next(found, None)) is None:
            raise PermissionError("no such name in a run")
        return self._roots[root] / asked.name.removeprefix(root).removeprefix("/")


class Files:
    """The other end: a machine that asks for files of the run. Its methods may be called by several threads."""

    def __init__(self, address: str, key: bytes) -> None:
        """``address``: HOST:PORT of the controller."""
        self.address, self._key = address, key

    def names(self, folder: str) -> list[str]:
        """Return the names of a folder's files, each of them plain.

        :raises OSError: when there is no such folder, or the controller does not answer as it should.
        """
        with self._line() as line:
            _say(line, Index(name=folder))
            return self._hear(line, Listed).names

    def fetch(self, name: str, to: Path) -> None:
        """Have a file at ``to``, whose folder is made if need be.

        :raises OSError: when it is not there, is damaged on its way, or the controller does not answer.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        with self._line() as line:
            _say(line, Get(name=name))
            _receive(line, to, self._hear(line, Content).size)

    def put(self, path: Path, name: str) -> None:
        """Have a file of this machine stored at the controller's; on its disk when this returns.

        :raises OSError: when it refuses, its disk is full, or it does not answer.
        """
        with self._line() as line, path.open("rb") as file:
            _say(line, Put(name=name, size=os.fstat(file.fileno()).st_size))
            self._hear(line, Ready)
            _send(line, file)
            self._hear(line, Stored)

    def _hear(self, line: WorkerLine, kind: type[_Heard]) -> _Heard:
        """:raises OSError: when the controller refuses, or says nothing, or something else."""
        answer = _ANSWER.validate_json(_next(line))
        if isinstance(answer, Refused):
            raise OSError(answer.reason)
        if not isinstance(answer, kind):
            raise OSError(f"the controller at {self.address} answered {answer.kind!r} out of turn")
        return answer

    @contextmanager
    def _line(self) -> Iterator[WorkerLine]:
        try:
            with closing(call(self.address, self._key, "files", FILES, PATIENCE_S)) as line:
                yield line
        except EOFError:
            raise OSError(f"the controller at {self.address} hung up") from None
        except StrangerError:
            raise OSError(f"the controller at {self.address} is not this run's") from None
        except ValidationError as error:
            raise OSError(f"the controller at {self.address} sent an invalid answer ({first(error)})") from None


def _say(line: WorkerLine, word: Message) -> None:
    line.send_bytes(word.model_dump_json().encode())


def _next(line: WorkerLine) -> bytes:
    if not line.poll(PATIENCE_S):
        raise TimeoutError(f"nothing came for {PATIENCE_S:g} s")
    return line.recv_bytes(_MOST_WORD_BYTES)


def _send(line: WorkerLine, file: BinaryIO) -> None:
    """A content and its digest."""
    seen = hashlib.sha256()
    while piece := file.read(_PIECE):
        seen.update(piece)
        line.send_bytes(piece)
    _say(line, Digest(sha256=seen.hexdigest()))


def _receive(line: WorkerLine, path: Path, size: int) -> None:
    """So many bytes and their digest, as a file that appears when it is whole and on its disk.

    :raises OSError: when it cannot be written, or is not what was sent.
    """
    seen, left, failure = hashlib.sha256(), size, None
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        while left:
            piece = _next(line)
            if not 0 < len(piece) <= left:
                raise OSError(f"{path.name}: {size} bytes were announced, others came")
            left -= len(piece)
            seen.update(piece)
            try:
                if failure is None:
                    file.write(piece)
            except OSError as error:  # a full disk: hear the rest, or who sends it would not hear why
                failure = error
        answer = _ANSWER.validate_json(_next(line))
        if failure is not None:
            raise failure
        if not isinstance(answer, Digest) or answer.sha256 != seen.hexdigest():
            raise OSError(f"{path.name}: damaged on its way")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file that is neither a link nor a device, and its size."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file")
        yield file, os.fstat(file.fileno()).st_size
