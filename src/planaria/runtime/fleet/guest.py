"""What a machine does that has joined a run: start workers as it is told to, and leave when it is to leave."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

import planaria
from planaria.common.documents import first
from planaria.common.errors import UserError
from planaria.runtime.fleet import joining
from planaria.runtime.fleet.base import Message
from planaria.runtime.fleet.joining import Door
from planaria.runtime.fleet.process_pool import ProcessPool
from planaria.runtime.fleet.silence import Silence
from planaria.runtime.fleet.switchboard import call
from planaria.runtime.transport.address import REACHABLE, Reach, listening
from planaria.runtime.transport.listener import VISITOR, listen
from planaria.runtime.transport.secure import StrangerError

_MAX_WORD_BYTES = 1 << 20
_CALL_S = 3
"""how long to wait for each word of the greeting; the next call may be luckier, a lost one has to wait for TCP"""
_PATIENCE_S = 10.0
"""how long to wait for the answer at the door"""

Told = Callable[[str], None]


@dataclass(frozen=True)
class Ending:
    """How a visit ended."""

    how: Literal["left", "over", "again", "unwelcome", "lost"]
    """it was to leave; the run said goodbye, until it has begun anew, or for good; the line broke, or nothing came any
    more"""
    reason: str = ""


@contextmanager
def _probed(host: str, key: bytes, reach: Reach) -> Iterator[str]:
    """A listener for the run to try, and where it says that it is; no address where nobody is to try.

    :raises UserError: when none of the ports is free.
    """
    if not reach.reachable:
        yield ""
        return
    listener = listen(host, key, reach.ports, lambda _, tls: tls.close())
    try:
        yield listening(listener.host, listener.port, reach).outside
    finally:
        listener.close()


class Visit:
    """One machine's visit to a run, from its request to its goodbye."""

    def __init__(self, door: Door, workers: int, reach: Reach = REACHABLE) -> None:
        """Ask to be let in with so many workers (0: as many as one replica has).

        ``reach`` says under which name this machine can be reached, at which ports, and whether that is to be tried.

        :raises OSError: when nobody answers at the door, or the run is about to begin anew.
        :raises UserError: when whoever answers does not know the key, or does not let this machine in.
        """
        name = f"{platform.node()}, pid {os.getpid()}"
        self.address, self.key = door.at, bytes.fromhex(door.key)
        self.workers, self._speaking = workers, threading.Lock()
        try:
            self._line = call(self.address, self.key, name[:100], VISITOR, _CALL_S)
            with _probed(self._line.own_address, self.key, reach) as at:
                request = joining.JoinRequest(called=name[:200], version=planaria.__version__, workers=workers, at=at)
                self._say(request)
                answer = self._hear(_PATIENCE_S)
        except EOFError:
            raise OSError("hung up") from None
        except ValidationError as error:
            detail = f"sent an invalid answer ({first(error)}); is it of another version of planaria?"
            raise UserError(f"{door.at}: {detail}") from None
        except StrangerError:
            raise UserError(f"{door.at} is not the run whose door this is, or has another key") from None
        if isinstance(answer, joining.Goodbye) and answer.again:
            raise OSError(answer.reason)
        if isinstance(answer, joining.Goodbye):
            raise UserError(f"not let in: {answer.reason}")
        if not isinstance(answer, joining.Welcome):
            raise OSError("no answer at the door")
        self.welcome = answer
        self.reach = replace(reach, machine=answer.host, reachable=bool(at) and answer.reachable, relay=self.address)
        self.own_address = self._line.own_address

    def stay(self, pool: ProcessPool, silence_s: float, asked_to_leave: Callable[[], str], told: Told) -> Ending:
        """Serve until the run is over or lost, or, once asked to leave, all workers have been let go.

        A run that is not heard for ``silence_s`` is lost: a broken network tells nobody that it is.
        """
        self._say(joining.Settled())
        told("joined")
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        leaving, silence = "", Silence[str](joining.BEAT_S, silence_s / joining.BEAT_S)
        silence.hear("the run")
        while True:
            try:
                self._line.poll(joining.BEAT_S)
                silence.look(joining.BEAT_S)
                word = self._hear(0.0)
            except (EOFError, OSError, ValidationError):
                return Ending("left") if leaving and pool.empty else Ending("lost", "the line broke")
            if word is not None:
                silence.hear("the run")
            for _, seconds in silence.too_long(lambda _: "unknown"):
                return Ending("lost", f"silent for {seconds:.1f} s")
            if isinstance(word, joining.Goodbye):
                return Ending("again" if word.again else "over" if word.welcome else "unwelcome", word.reason)
            self._heed(word, pool, leaving, told)
            if not leaving and (leaving := asked_to_leave()):
                told("leaving as soon as others have taken over what is here (again: at once)")
                self._say(joining.Departing(detail=leaving))
            elif leaving and pool.empty:
                return Ending("left")

    def end(self) -> None:
        self._line.close()

    def _heed(self, word: Message | None, pool: ProcessPool, leaving: str, told: Told) -> None:
        match word:
            case joining.Start() if not leaving:
                threading.Thread(target=self._start, args=(word, pool, told), name="birth", daemon=True).start()
            case joining.Signal():
                pool.signal(word.worker, word.incarnation, word.number)

    def _start(self, word: joining.Start, pool: ProcessPool, told: Told) -> None:
        """A birth may take its time; meanwhile the run is heard."""
        try:
            pid = pool.start(word.worker, word.incarnation)
        except OSError as error:
            told(str(error))
            self._say(joining.Failed(worker=word.worker, incarnation=word.incarnation, detail=str(error)[:200]))
            return
        told(f"started worker {word.worker} (pid {pid})")
        self._say(joining.Started(worker=word.worker, incarnation=word.incarnation))

    def _beat(self) -> None:
        while not self._line.closed:
            self._say(joining.Beat())
            time.sleep(joining.BEAT_S)

    def _say(self, word: Message) -> None:
        with self._speaking:
            try:
                self._line.send_bytes(word.model_dump_json().encode())
            except OSError:
                return  # whoever listens next hears that the line is dead

    def _hear(self, patience_s: float) -> joining.ToGuest | None:
        if not self._line.poll(patience_s):
            return None
        return joining.TO_GUEST.validate_json(self._line.recv_bytes(_MAX_WORD_BYTES))
