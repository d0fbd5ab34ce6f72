"""Open a run's shared log: in a folder, in a bucket, or at holders.

Each holder has a connection and a thread, so that a silent holder does not delay the others. A request that failed may
have had its effect; the protocol (``control/log/quorum_store.py``) repeats it safely.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from planaria.common.errors import UserError
from planaria.common.object_store import Retry, Store, StoreUnreachable
from planaria.control.log.quorum import (
    SCHEME,
    Answer,
    Answers,
    Request,
    Roster,
    Round,
    Rounds,
    found_run,
    parse_quorum_location,
    with_folder_id,
)
from planaria.control.log.quorum_store import QuorumStore
from planaria.control.log.shared_log import SharedLog
from planaria.runtime.fleet.joining import read_key
from planaria.runtime.shared_log.messages import greeting_of, receive_answer, send
from planaria.runtime.transport.listener import cause, connect
from planaria.runtime.transport.secure import StrangerError, cut_off, prepare

log = logging.getLogger(__name__)
_OPEN_S = 5.0
"""least seconds for the first connections"""
_GRACE_S = 0.05
"""seconds to wait for the others once a majority has answered without agreeing"""
_PAUSE_S = 0.01
"""pause before the third round of an operation; doubles, ± 50 %, up to 0.2 s"""
_MAX_PAUSE_S = 0.2
_LEAST = 0.1
"""share of an operation's time that must be left for another round"""
T = TypeVar("T")


class HolderRefusedError(Exception):
    """A holder serves another run, or a run with other holders."""


_PERMANENT = (HolderRefusedError, StrangerError)
_Result = Answer | Exception
_Box = SimpleQueue[tuple[str, _Result]]


def open_shared_log(
    location: str, seconds: float, key: str | Path | None = None, setting: str = "fleet.shared_log"
) -> SharedLog:
    """Open the shared log of a run; a call that fails is repeated for ``seconds``.

    :param key: file with the run's key, for a quorum of holders
    :raises UserError: if the location is not supported, or its holders do not answer.
    """
    if location.startswith(SCHEME):
        if key is None:
            raise UserError(f"{setting}: {location} needs the run's key (fleet.key, --key-file)")
        return SharedLog(open_quorum_store(location, read_key(Path(key)), seconds, setting))
    return SharedLog(Store(location, setting, Retry(tries=100, seconds=seconds, first_s=0.05)))


def open_quorum_store(url: str, key: bytes, seconds: float, setting: str) -> QuorumStore:
    """Connect to the holders of a run, and return their store; each of its operations may take ``seconds``.

    :param url: ``quorum://…/RUN``
    :raises UserError: naming ``setting``, if too few holders answer, or they are another run's.
    """
    location = parse_quorum_location(url, setting)
    prepare(key)
    attendance = _Attendance(location.holders)
    connections = [_HolderConnection(at, key, greeting_of(location), attendance) for at in location.holders]
    try:
        roster = _Conductor(url, connections, {}, max(seconds, _OPEN_S))("opening", found_run(location.holders))
    except StoreUnreachable as error:
        if isinstance(error.last, StrangerError):
            advice = "copy the fleet.key file of the controller's machine"
            raise UserError(f"{setting}: {url}: {error.last}; {advice}") from None
        command = f"`planaria join {url} --hold HOST:PORT --key-file FILE`"
        advice = f"start the others with {command} (a run's first start needs all, later ones a majority)"
        raise UserError(f"{setting}: {url}: {error.last}; {advice}") from None
    attendance.reports = True
    return QuorumStore(url, len(connections), secrets.token_hex(16), _Conductor(url, connections, roster, seconds))


class _Attendance:
    """Which holders answered last. Logs each change. Thread-safe."""

    def __init__(self, holders: Sequence[str]) -> None:
        self._silent, self._holders, self._guarded = set[str](), holders, threading.Lock()
        self.reports = False
        """whether to log changes"""

    def record(self, at: str, failure: str) -> None:
        """Record that a holder answers, or why it does not (``failure``)."""
        with self._guarded:
            if bool(failure) == (at in self._silent):
                return
            self._silent ^= {at}
            number = len(self._holders)
            state = f"{number - len(self._silent)} of {number} holders answer; the log needs {number // 2 + 1}"
        if self.reports:
            log.warning("holder %s of the shared log: %s (%s)", at, failure or "answers again", state)


class _HolderConnection:
    """Sends requests to one holder in a thread, one after the other."""

    def __init__(self, at: str, key: bytes, greeting: bytes, attendance: _Attendance) -> None:
        self.at = at
        self._key, self._greeting, self._attendance = key, greeting, attendance
        self._tls: ssl.SSLSocket | None = None
        self._requests = SimpleQueue[tuple[Request, float, _Box]]()
        threading.Thread(target=self._serve, name=f"holder {at}", daemon=True).start()

    def ask(self, request: Request, until: float, box: _Box) -> None:
        """Send a request; the answer, or an error after ``until`` (monotonic seconds), arrives in ``box``."""
        self._requests.put((request, until, box))

    def _serve(self) -> None:
        while True:
            request, until, box = self._requests.get()
            result = self._result(request, until)
            self._attendance.record(self.at, cause(result) if isinstance(result, Exception) else "")
            box.put((self.at, result))

    def _result(self, request: Request, until: float) -> _Result:
        try:
            answer = self._wait_for_answer(request, until)
        except (OSError, ValueError, *_PERMANENT) as error:
            self._close()
            return error
        return OSError(answer.error) if answer.error else answer

    def _wait_for_answer(self, request: Request, until: float) -> Answer:
        if time.monotonic() >= until:
            raise TimeoutError("busy with an earlier request")
        if self._tls is not None:
            try:
                return _exchange(self._tls, request, until)
            except TimeoutError:
                raise
            except OSError:  # the holder was restarted, or has closed an idle connection
                self._close()
        self._tls = connect(self.at, self._key, self._greeting, max(0.001, until - time.monotonic()))
        if refusal := receive_answer(self._tls, until).error:
            raise HolderRefusedError(refusal)
        return _exchange(self._tls, request, until)

    def _close(self) -> None:
        if self._tls is not None:
            cut_off(self._tls)
            with suppress(OSError):
                self._tls.close()
            self._tls = None


def _exchange(tls: ssl.SSLSocket, request: Request, until: float) -> Answer:
    send(tls, request, until)
    return receive_answer(tls, until)


class _Conductor:
    """Conducts the rounds of operations with all holders."""

    def __init__(self, url: str, connections: list[_HolderConnection], roster: Roster, seconds: float) -> None:
        """:param roster: empty: while the run's is not known
        :param seconds: for an operation
        """
        self._url, self._connections, self._roster, self._seconds = url, connections, roster, seconds
        self._majority = len(connections) // 2 + 1

    def __call__(self, operation: str, rounds: Rounds[T], /) -> T:
        until, failures = time.monotonic() + self._seconds, dict[str, Exception]()
        try:
            requested = next(rounds)
            for number in itertools.count(1):
                answers, failed = self._ask(requested, until)
                requested = rounds.send(answers)
                failures |= failed
                hopeless = sum(isinstance(error, _PERMANENT) for error in failed.values()) >= self._majority
                pause = 0.0 if number < 2 else min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(number - 2, 8))
                pause *= random.uniform(0.5, 1.5)
                if hopeless or time.monotonic() + pause > until - _LEAST * self._seconds:
                    raise StoreUnreachable(self._url, operation, number, self._failure(answers, failures))
                time.sleep(pause)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("unreachable")

    def _ask(self, requested: Round, until: float) -> tuple[Answers, dict[str, Exception]]:
        """Send a request to all holders; return the answers, and the failures of the others."""
        answers, failures, box = Answers(), dict[str, Exception](), _Box()
        for connection in self._connections:
            connection.ask(with_folder_id(requested.request, self._roster.get(connection.at, "")), until, box)
        limit = until
        while len(answers) + len(failures) < len(self._connections) and not requested.enough(answers):
            try:
                at, result = box.get(timeout=max(0.0, limit - time.monotonic()))
            except Empty:
                break
            if isinstance(result, Exception):
                failures[at] = result
            else:
                answers[at] = result
            if len(answers) == self._majority and not requested.patient:
                limit = min(until, time.monotonic() + _GRACE_S)
        return answers, failures

    def _failure(self, answers: Answers, failures: dict[str, Exception]) -> Exception:
        """Return an error that names the holders that did not answer, with the reasons."""
        late = TimeoutError(f"no answer in {self._seconds:g} s")
        failures = {at: error for at, error in failures.items() if not isinstance(error, TimeoutError)}
        failures = {connection.at: late for connection in self._connections if connection.at not in answers} | failures
        if (left := len(self._connections) - len(failures)) >= self._majority and self._roster:
            return TimeoutError(f"no agreement in {self._seconds:g} s")
        if sum(isinstance(error, StrangerError) for error in failures.values()) >= self._majority:
            return StrangerError("its holders have another key")
        failed = [holder.at for holder in self._connections if holder.at in failures]
        reasons = ", ".join(f"{at} ({cause(failures[at])})" for at in failed)
        return OSError(f"{left} of {len(self._connections)} holders answer; not {reasons}")
