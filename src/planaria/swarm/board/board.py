"""The board of a run: a place that all peers read and where each appends what it says, under its own id.

::

    {board}/rules.json                              what the run is, by whoever founded it
    {board}/peers/{peer id}/hello.json              a peer takes part
    {board}/peers/{peer id}/rounds/{round}.json     its completions of a round, six digits
    {board}/peers/{peer id}/closings/{round}.json   whom it heard in a round, with the digest of each message
    {board}/peers/{peer id}/receipts/{what}/...     what it found, as a member of the run's committee
    {board}/peers/{peer id}/goodbye.json            it left

Nothing is ever replaced. The board is only a place: who wrote what is known by signatures, and a message counts only
under the id, the run and the round that are in it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pydantic import JsonValue

from planaria.common.errors import UserError
from planaria.swarm.board.attendance import Census, Decision, Gathered, Roster, RoundStalled, Terms, decide, until_next
from planaria.swarm.board.envelope import Message, attest, seal, unseal
from planaria.swarm.board.identity import Identity
from planaria.swarm.board.limits import LIMITS, Limits
from planaria.swarm.board.message import (
    BadMessage,
    Closing,
    Goodbye,
    Hello,
    Receipt,
    Rollouts,
    Rules,
)
from planaria.swarm.board.store import Retry, Store
from planaria.swarm.board.word import Ledger, difference, of_round

PEER = re.compile("[0-9a-f]{32}")
_RETRY = Retry()
_SMALL = 2**16
"""bytes of rules and of a greeting"""
_NAMES = 2**20
"""bytes of a closing, which names a message, a closing and a proof for each peer of the largest board"""


class AlreadyThere(Exception):
    """Something else was published there before, perhaps by this very peer before it was restarted: read it."""


class Board:
    """A board as one peer sees it. It writes under its own id only; without an identity it only reads."""

    def __init__(
        self,
        store: Store,
        identity: Identity | None,
        limits: Limits,
        known: Iterable[str],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._store, self._limits = store, limits
        self._identity = identity
        self._small = replace(limits, message_bytes=_SMALL)
        self._rules: Rules | None = None
        self._ledger: Ledger | None = None
        self._names = replace(limits, message_bytes=_NAMES)
        self._clock, self._sleep = clock, sleep
        secret = identity.sign(b"planaria swarm order\0") if identity else secrets.token_bytes(64)
        self._roster = Roster({*known} | ({identity.peer} if identity else set()), limits.peers, secret)

    @classmethod
    def open(
        cls,
        url: str,
        identity: Identity | None = None,
        limits: Limits = LIMITS,
        *,
        known: Iterable[str] = (),
        retry: Retry = _RETRY,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Board:
        """The board at a URL or in a folder, which need not be there yet.

        ``known`` are ids of peers met before, such as before a restart: they are looked at first.

        :raises UserError: when the URL is of a kind that cannot be used here.
        """
        return cls(Store(url, retry, clock, sleep), identity, limits, known, clock, sleep)

    @property
    def rules(self) -> Rules:
        """What the run is.

        :raises UserError: when nobody has founded one here, or its rules cannot be read.
        """
        if self._rules is None:
            try:
                self._rules = self._message("rules.json", Rules, self._small)
            except BadMessage as error:
                raise UserError(f"{self._store.place}/rules.json: {error.reason}; found the run elsewhere") from None
        if self._rules is None:
            raise UserError(f"{self._store.place}: no run has been founded here; check the place, or found one")
        return self._rules

    @property
    def founding(self) -> bytes:
        """The rules as they lie here; raises as :attr:`rules` does."""
        self.rules  # noqa: B018 (says kindly what is wrong)
        return self._store.read("rules.json", _SMALL) or b""

    @property
    def ledger(self) -> Ledger:
        """What was read here, and who is proven to have said two things in one place."""
        if self._ledger is None:
            self._ledger = Ledger(self.rules.run)
        return self._ledger

    def found(self, rules: Mapping[str, JsonValue]) -> Rules:
        """Found a run with these rules, or take part in the one that was founded here with equal ones.

        :raises UserError: when it was founded with others: the message names the first key that differs.
        """
        me = self._me
        mine = Rules(peer=me.peer, nonce=secrets.token_hex(16), rules=dict(rules))
        self._store.write("rules.json", self._sealed(mine, Rules, self._small))
        if what := difference(mine.rules, self.rules.rules):
            raise UserError(
                f"{self._store.place}: this run was founded with other rules: {what}; take those, or found your own "
                f"run at another place"
            )
        return self.rules

    def join(self, hello: Hello) -> Hello:
        """Take part. The hello on the board, which is an earlier one if this peer had joined before.

        :raises UserError: when it had joined with another tokenizer, or has left.
        """
        mine, place = self._me.peer, self._store.place
        path = place_of(mine, "hello.json")
        raw = self._sealed(hello, Hello, self._small)
        try:
            left = self._message(place_of(mine, "goodbye.json"), Goodbye, self._small, mine)
            there = hello if self._store.write(path, raw) else self._message(path, Hello, self._small, mine)
        except BadMessage as error:
            raise UserError(
                f"{place}: what lies under this peer's id is {error.reason}; take another identity"
            ) from None
        if left or there is None or there.tokenizer != hello.tokenizer:
            why = "has left this run" if left else "joined with another tokenizer, or its hello is lost"
            raise UserError(f"{place}: peer {mine} {why}; take another identity")
        return there

    def publish(self, rollouts: Rollouts) -> None:
        """Append this peer's completions of a round; publishing the same again does nothing.

        :raises UserError: when other peers would refuse it.
        :raises AlreadyThere: when something else is there.
        """
        path = place_of(self._me.peer, rollouts.place)
        self._append(path, rollouts, Rollouts, self._limits)

    def conclude(self, message: Closing | Receipt) -> None:
        """Append what this peer says of a round. What it said before it was restarted stays as it was, and where
        something else lies or nothing can, it says nothing: a round does not depend on one peer's word.
        """
        path = place_of(self._me.peer, message.place)
        try:
            if isinstance(message, Closing):
                self._append(path, message, Closing, self._names)
            else:
                self._append(path, message, Receipt, self._limits)
        except (AlreadyThere, UserError):
            return

    def closings(self, round: int, peers: Iterable[str]) -> dict[str, Closing]:
        """Whom each of these peers says that it heard in a round, those that do, in words that can be read."""
        return self._read_each(peers, of_round("closings", round), Closing, self._names)[0]

    def receipt(self, peer: str, about: str, round: int) -> tuple[Receipt, bytes] | None:
        """What a peer says that it found, with its envelope; None if it says nothing that can be read."""
        path = place_of(peer, of_round(f"receipts/{about}", round))
        try:
            raw = self._store.read(path, self._limits.message_bytes)
            return None if raw is None else (self._unsealed(raw, path, Receipt, self._limits, peer), raw)
        except BadMessage:
            return None

    def leave(self, goodbye: Goodbye) -> None:
        """Say goodbye; raises as ``publish`` does."""
        path = place_of(self._me.peer, "goodbye.json")
        self._append(path, goodbye, Goodbye, self._small)

    def peers(self) -> Census:
        """Everybody who takes part, by verified messages.

        Once read, a hello or goodbye stands, whatever becomes of its file. Whom a look is for, at most
        ``Limits.peers``, is up to :mod:`planaria.swarm.board.attendance`.
        """
        roster, small = self._roster, self._small
        names = set(self._store.folders("peers", PEER)) - roster.hellos.keys()
        drawn = roster.newcomers(names)
        hellos, refused = self._read_each(drawn, "hello.json", Hello, small)
        roster.hellos |= hellos
        goodbyes, wrong = self._read_each(roster.leavers(), "goodbye.json", Goodbye, small)
        roster.goodbyes |= goodbyes
        left_out = len(names) - len(drawn)
        return Census(dict(sorted(roster.hellos.items())), dict(roster.goodbyes), refused | wrong, left_out)

    def read(self, peer: str, round: int) -> Rollouts | None:
        """A peer's completions of a round, None if they are not there yet.

        :raises BadMessage: when something else is there; "not JSON" may be a part of what will be there.
        """
        return self._message(place_of(peer, of_round("rounds", round)), Rollouts, self._limits, peer)

    def gather(self, round: int, peers: Iterable[str]) -> Gathered:
        """One look at what ``peers`` sent for a round."""
        asked = sorted(set(peers))
        found, refused = self._read_each(asked, of_round("rounds", round), Rollouts, self._limits)
        missing = [peer for peer in asked if peer not in found and peer not in refused]
        self._roster.heard(found)
        return Gathered(found, tuple(missing), refused)

    def wait(self, round: int, peers: Iterable[str], terms: Terms, poll_s: float = 1.0) -> Gathered:
        """What ``peers`` sent for a round, once it closes (:func:`planaria.swarm.board.attendance.decide`).

        What was found once is not read again.

        :raises RoundStalled: when less than the quorum came in time.
        """
        began, everyone = self._clock(), frozenset(peers)
        seen = Gathered({}, tuple(everyone), {})
        while True:
            seen = seen.updated(self.gather(round, seen.open))
            elapsed = self._clock() - began
            seen = seen.timed(elapsed)
            match decide(everyone, seen.found.keys(), seen.settled.keys(), elapsed, terms):
                case Decision.CLOSE:
                    return seen
                case Decision.STALLED:
                    why = dict.fromkeys(seen.missing, "sent nothing") | seen.refused
                    raise RoundStalled(self.rules.run, round, seen.found, why, terms.quorum)
            self._sleep(min(poll_s, until_next(elapsed, terms)))

    def pause(self, seconds: float) -> None:
        """Let time go by, on this board's clock."""
        self._sleep(seconds)

    @property
    def _me(self) -> Identity:
        """Who writes here; ValueError when nobody does."""
        if self._identity is None:
            raise ValueError(f"{self._store.place} was opened to read only")
        return self._identity

    def _message(self, path: str, kind: type[Message], limits: Limits, peer: str | None = None) -> Message | None:
        """The message in a place, None if nothing is there; BadMessage when something else is."""
        raw = self._store.read(path, limits.message_bytes)
        return None if raw is None else self._unsealed(raw, path, kind, limits, peer)

    def _read_each(
        self, peers: Iterable[str], name: str, kind: type[Message], limits: Limits
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """By peer, the messages of one name, and why others are none; neither where nothing is there."""
        found: dict[str, Message] = {}
        refused: dict[str, str] = {}
        asked = sorted(set(peers))
        places = [place_of(peer, name) for peer in asked]
        answers = self._store.read_each(places, limits.message_bytes)
        for peer, path, raw in zip(asked, places, answers, strict=True):
            try:
                if isinstance(raw, BadMessage):
                    raise raw
                if raw is not None:
                    found[peer] = self._unsealed(raw, path, kind, limits, peer)
            except BadMessage as error:
                refused[peer] = error.reason
        return found, refused

    def _unsealed(self, raw: bytes, path: str, kind: type[Message], limits: Limits, peer: str | None) -> Message:
        """The message of an envelope; that its peer said it here is noted."""
        if kind is Rules:
            return unseal(raw, limits, kind, peer=peer)
        place = path.removeprefix(f"peers/{peer}/")
        message, said = attest(raw, limits, kind, peer=peer, run=self.rules.run, place=place)
        self.ledger.hear(said, checked=True)
        return message

    def _sealed(self, message: Message, kind: type[Message], limits: Limits) -> bytes:
        """The envelope, read as others will read it; UserError when they would refuse it."""
        raw = seal(self._me, message)
        run = None if kind is Rules else self.rules.run
        try:
            unseal(raw, limits, kind, peer=self._me.peer, run=run)
        except BadMessage as error:
            why = f"other peers would refuse these {message.kind}: {error.reason}"
            raise UserError(f"{self._store.place}: {why}; their limits are {limits}") from None
        return raw

    def _append(self, path: str, message: Message, kind: type[Message], limits: Limits) -> None:
        """Put a message in its place; nothing happens where it lies there already.

        :raises UserError: when other peers would refuse it.
        :raises AlreadyThere: when something else is there.
        """
        raw = self._sealed(message, kind, limits)
        if self._store.write(path, raw):
            return
        try:
            there = self._store.read(path, len(raw))
        except BadMessage:
            there = None
        if there != raw:
            raise AlreadyThere(f"{self._store.place}/{path}: something else is there, and nothing is ever replaced")


def place_of(peer: str, name: str) -> str:
    """Where a message of ``peer`` lies; ValueError when that is no peer's id."""
    if not PEER.fullmatch(peer):
        raise ValueError(f"{peer!r} is no peer id")
    return f"peers/{peer}/{name}"
