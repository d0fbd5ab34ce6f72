"""The objects of a quorum of holders (``control/log/quorum.py``), as a store that a shared log needs.

An object ``log/N`` is created once, by single-decree Paxos (Lamport, Paxos Made Simple, 2001). One client's value is
chosen for ``log/N``, so that client alone may propose ``log/N+1`` without promises, in one round. Other objects are
registers in which the highest version wins (Attiya, Bar-Noy and Dolev, 1995).
"""

from __future__ import annotations

from collections import Counter
from threading import Lock

from planaria.common.object_store import BadObject
from planaria.control.log.quorum import NONE, WRITER_BYTES, Answers, Ballot, Conduct, Round, Rounds, Vote

_LOG = "log/"
_FIRST = 1
"""counter of the ballot that needs no promises"""
_LOOKS = 3
"""reads of an object that may be under way, before the reader completes it"""


class QuorumStore:
    """The objects of a quorum, with the methods of a store that a shared log needs. Thread-safe."""

    def __init__(self, location: str, holders: int, writer: str, conduct: Conduct) -> None:
        """:param writer: 32 random hexadecimal digits of this store"""
        self.location = location
        self._holders, self._majority = holders, holders // 2 + 1
        self._writer, self._conduct = writer, conduct
        self._counter, self._guarded = _FIRST, Lock()
        self._reserved = self._proposed = 0
        """next batch reserved for this store, for which phase 1 is skipped, and the last batch proposed that way"""

    def read(self, path: str, most: int) -> bytes | None:
        """Return the object at ``path``, or None if there is none.

        :raises BadObject: "oversized" if it has more than ``most`` bytes.
        :raises StoreUnreachable: if no majority answers.
        """
        rounds = self._choose(path) if path.startswith(_LOG) else self._newest(path)
        value = self._conduct("reading", rounds)
        if value is not None and len(value) > WRITER_BYTES + most:
            raise BadObject("oversized")
        return None if value is None else value[WRITER_BYTES:]

    def write(self, path: str, data: bytes) -> bool:
        """Create the batch at ``path``; return False if another store has. A repeated call is without effect.

        :raises StoreUnreachable: if no majority answers; whether the batch was created is unknown.
        """
        number = int(path.removeprefix(_LOG))
        with self._guarded:
            reserved, self._reserved = number == self._reserved, 0
            if reserved:
                self._proposed = number  # a ballot has one value
        created = self._conduct("writing", self._create(path, self._own(data), reserved))
        with self._guarded:
            if created and number + 1 > self._proposed:
                self._reserved = number + 1
        return created

    def replace(self, path: str, data: bytes) -> None:
        """Write the object at ``path``, whether or not there is one.

        :raises StoreUnreachable: if no majority answers; whether it was written is unknown.
        """
        self._conduct("writing", self._put(path, self._own(data)))

    def creates_once(self, path: str) -> bool:
        return True

    def _own(self, data: bytes) -> bytes:
        """Return a value that no other store proposes."""
        return bytes.fromhex(self._writer) + data

    def _ballot(self, seen: int) -> Ballot:
        """Return a ballot of this store above ``seen``; none is used twice."""
        with self._guarded:
            self._counter = max(self._counter, seen) + 1
            return Ballot(self._counter, self._writer)

    # ---- objects that are created once

    def _create(self, name: str, value: bytes, reserved: bool) -> Rounds[bool]:
        if reserved:
            ballot = Ballot(_FIRST, self._writer)
            answers = yield Round(Vote(kind="accept", name=name, ballot=ballot, value=value), self._is_decided)
            if self._is_granted(answers):
                return True
        return (yield from self._decide(name, value)) == value

    def _choose(self, name: str) -> Rounds[bytes | None]:
        """Return the value that a majority accepted; complete a proposal that may have been. None: there is none."""
        for _ in range(_LOOKS):
            answers = yield Round(Vote(kind="read", name=name), lambda found: self._common(found) is not None)
            if (ballot := self._common(answers)) is not None:
                return _value(answers, ballot)
        return (yield from self._decide(name, None))

    def _decide(self, name: str, own: bytes | None) -> Rounds[bytes | None]:
        """Return the value that is chosen: one that a holder has accepted, else ``own``, if any."""
        seen = 0
        while True:
            ballot = self._ballot(seen)
            answers = yield Round(Vote(kind="promise", name=name, ballot=ballot), self._is_decided)
            if self._is_granted(answers):
                latest = max(answer.accepted for answer in answers.values() if answer.ok)
                value = own if latest == NONE else _value(answers, latest)
                if value is None:
                    return None
                answers = yield Round(Vote(kind="accept", name=name, ballot=ballot, value=value), self._is_decided)
                if self._is_granted(answers):
                    return value
            seen = max((answer.promised.counter for answer in answers.values()), default=seen)

    # ---- registers

    def _newest(self, name: str) -> Rounds[bytes | None]:
        """Return the value of the highest version, once a majority has it; None if there is none."""
        while True:
            answers = yield Round(Vote(kind="read", name=name), self._has_majority)
            if not self._has_majority(answers):
                continue
            latest = max(answer.accepted for answer in answers.values())
            value = _value(answers, latest)
            if value is None or self._common(answers) == latest:
                return value
            write = Vote(kind="accept", name=name, ballot=latest, value=value)
            if self._has_majority((yield Round(write, self._has_majority))):
                return value

    def _put(self, name: str, value: bytes) -> Rounds[None]:
        """Write a version above that of a majority; a holder that refuses it has a higher one already."""
        while True:
            answers = yield Round(Vote(kind="read", name=name), self._has_majority)
            if not self._has_majority(answers):
                continue
            ballot = self._ballot(max(answer.promised.counter for answer in answers.values()))
            write = Vote(kind="accept", name=name, ballot=ballot, value=value)
            if self._has_majority((yield Round(write, self._has_majority))):
                return

    # ---- answers

    def _has_majority(self, answers: Answers) -> bool:
        return len(answers) >= self._majority

    def _is_granted(self, answers: Answers) -> bool:
        return sum(answer.ok for answer in answers.values()) >= self._majority

    def _is_decided(self, answers: Answers) -> bool:
        """Return whether a majority granted a ballot, or none can."""
        refused = sum(not answer.ok for answer in answers.values())
        return self._is_granted(answers) or refused > self._holders - self._majority

    def _common(self, answers: Answers) -> Ballot | None:
        """Return the ballot that a majority accepted, NONE if a majority accepted nothing; None if neither is known."""
        ((ballot, count),) = Counter(answer.accepted for answer in answers.values()).most_common(1) or ((NONE, 0),)
        return ballot if count >= self._majority else None


def _value(answers: Answers, ballot: Ballot) -> bytes | None:
    """Return the value that a holder accepted at ``ballot``; None for NONE."""
    if ballot == NONE:
        return None
    return next(answer.value for answer in answers.values() if answer.ok and answer.accepted == ballot)
