"""A holder of a run's shared log (``planaria join quorum://… --hold HOST:PORT``): one member of a quorum.

It keeps each object as a file with a digest. An answer is sent once the state that it promises is on disk. The
process imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import ssl
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.common.signals import interrupt_on_stop
from planaria.common.stdio import Notify
from planaria.control.log.quorum import (
    MAX_VALUE_BYTES,
    Answer,
    Ballot,
    Enrolment,
    QuorumLocation,
    QuorumMember,
    Request,
    Slot,
    Vote,
    enrol,
    parse_quorum_location,
    vote,
)
from planaria.runtime.fleet.joining import read_or_create_key
from planaria.runtime.shared_log.messages import TRANSFER_S, greeting_of, receive_request, send
from planaria.runtime.transport.listener import EdgeListener, cause
from planaria.runtime.transport.secure import new_key, prepare

log = logging.getLogger(__name__)
FOLDER = Path("holders")
_MEMBER = "holder.json"
_HEADER_BYTES = 1 << 10
_MAX_CLIENTS = 64
"""connections at once"""
_IDLE_S = 60.0
"""seconds after which an idle connection is closed; a client that needs it connects again"""
_BALLOTS: TypeAdapter[tuple[Ballot, Ballot, str]] = TypeAdapter(tuple[Ballot, Ballot, str])
"""first line of an object's file: promised and accepted ballot, and the digest of both with the value"""


class HolderFolder:
    """A holder's state on disk; the objects are below ``objects``. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Open or create the folder.

        :raises UserError: if it cannot be written to, is damaged, or another process uses it.
        """
        self._folder, self._guarded = folder, threading.Lock()
        self._warned = False
        """whether the warning that this folder does not vote has been logged"""
        try:
            for path in (folder / "objects" / "log", folder / "objects" / "files"):
                path.mkdir(parents=True, exist_ok=True)
            atomic.sync_folder(folder / "objects")  # before the id with which it votes
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (folder / _MEMBER).exists():
                atomic.write_durable(
                    folder / _MEMBER, QuorumMember(id=secrets.token_hex(16)).model_dump_json().encode()
                )
        except BlockingIOError:
            raise UserError(f"{folder}: another holder uses it; start this one in another directory") from None
        except OSError as error:
            raise UserError(f"{atomic.write_error(folder, error)}; make room, or start it elsewhere") from None
        self.member = documents.read_model(folder / _MEMBER, QuorumMember, fix="the holder must not vote without it")

    def answer(self, request: Request) -> Answer:
        """Apply a request; its effect is on disk when this returns."""
        with self._guarded:
            try:
                return self._enrol(request) if isinstance(request, Enrolment) else self._vote(request)
            except (OSError, UserError) as error:
                log.warning("%s: %s", self._folder, error)
                return Answer(error=str(error)[:400])

    def _enrol(self, request: Enrolment) -> Answer:
        member, answer = enrol(self.member, request)
        if member != self.member:
            atomic.write_durable(self._folder / _MEMBER, member.model_dump_json().encode())
            self.member = member
        return answer

    def _vote(self, request: Vote) -> Answer:
        if request.holder != self.member.id and not self._warned:
            self._warned = True
            log.warning("%s does not vote: the run began with another folder here; restore that", self._folder)
        path = self._folder / "objects" / request.name
        before = _slot(path)
        slot, answer = vote(self.member, before, request)
        if slot != before:
            ballots = [*slot[:2], _digest(slot)]
            atomic.write_durable(path, json.dumps(ballots).encode() + b"\n" + slot.value)
        return answer

    def close(self) -> None:
        self._lock.close()


def _digest(slot: Slot) -> str:
    return hashlib.sha256(json.dumps(slot[:2]).encode() + slot.value).hexdigest()


def _slot(path: Path) -> Slot:
    """Return the state of the object in a file; UserError if it is damaged."""
    if not path.exists():
        return Slot()
    first, _, value = documents.read_bytes(path, MAX_VALUE_BYTES + _HEADER_BYTES).partition(b"\n")
    with suppress(ValidationError):
        promised, accepted, digest = _BALLOTS.validate_json(first)
        if digest == _digest(slot := Slot(promised, accepted, value)):
            return slot
    raise UserError(f"{path}: damaged; stop this holder, and let the others continue without it")


class LogHolder:
    """Serves the clients of one run until :meth:`close`, each in a thread."""

    def __init__(self, location: QuorumLocation, at: str, key: bytes, folder: HolderFolder) -> None:
        """:raises UserError: if it cannot listen at ``at``."""
        self._location, self._folder = location, folder
        self._places = threading.BoundedSemaphore(_MAX_CLIENTS)
        host, _, port = at.rpartition(":")
        prepare(key)
        try:
            self._listener = EdgeListener(host.strip("[]"), int(port), key, self._serve)
        except UserError as error:
            number = error.__context__.errno if isinstance(error.__context__, OSError) else None
            reason = os.strerror(number) if number else "no such address"
            advice = "use an address of this machine and a free port"
            raise UserError(f"--hold {at}: cannot listen there ({reason}); {advice}") from None

    def close(self) -> None:
        self._listener.close()

    def _serve(self, greeting: bytes, tls: ssl.SSLSocket) -> None:
        with closing(tls):
            if not self._places.acquire(blocking=False):
                return
            try:
                refusal = self._refusal(greeting)
                send(tls, Answer(ok=not refusal, error=refusal), time.monotonic() + TRANSFER_S)
                while not refusal:
                    answer = self._folder.answer(receive_request(tls, _IDLE_S))
                    send(tls, answer, time.monotonic() + TRANSFER_S)
            except (OSError, ValueError) as error:
                log.debug("a client's connection ended: %s", cause(error))
            finally:
                self._places.release()

    def _refusal(self, greeting: bytes) -> str:
        """Return why a client of another run, or with other holders, is refused, or an empty string if it is not."""
        if greeting == greeting_of(self._location):
            return ""
        return f"it holds the run {self._location.run!r} with the holders {', '.join(self._location.holders)}"


def hold(url: str, at: str, key: Path, notify: Notify) -> None:
    """Hold the shared log of a run until Ctrl-C.

    :param url: ``quorum://…/RUN``
    :param at: HOST:PORT of this holder
    :param key: file with the run's key; created if missing
    :raises UserError: if the location or the address is invalid, or the folder is in use.
    """
    location = parse_quorum_location(url, f"join {url}")
    if not location.run:
        raise UserError(f"join {url}: name the run, as in {url.rstrip('/')}/NAME")
    if at not in location.holders:
        raise UserError(f"--hold {at}: the holders are {', '.join(location.holders)}; use this machine's")
    folder = FOLDER / location.run / re.sub(r"[^A-Za-z0-9.]", "-", at)
    secret = read_or_create_key(key, new_key())
    with closing(HolderFolder(folder)) as kept, closing(LogHolder(location, at, secret, kept)):
        notify(f"holding       the log of {location.run} at {at} (pid {os.getpid()}, folder {folder})")
        with suppress(KeyboardInterrupt), interrupt_on_stop():
            threading.Event().wait()
