"""Messages in their places on a board: sealed when they are written, checked when they are read, never replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from planaria.common.errors import UserError
from planaria.swarm.board.envelope import Message, attest, seal, unseal
from planaria.swarm.board.equivocation import Ledger
from planaria.swarm.board.identity import Identity
from planaria.swarm.board.limits import Limits
from planaria.swarm.board.message import BadMessage, Rules
from planaria.swarm.board.store import Store

PEER = re.compile("[0-9a-f]{32}")
_SMALL = 2**16
"""bytes of a greeting"""


class AlreadyThere(Exception):
    """Something else was published there before, perhaps by this very peer before it was restarted: read it."""


class Pages:
    """A board's store as one peer reads and writes it."""

    def __init__(self, store: Store, identity: Identity | None, limits: Limits) -> None:
        self._store, self._identity = store, identity
        self.small = replace(limits, message_bytes=_SMALL)
        """of rules and greetings"""
        self._rules: Rules | None = None
        self._ledger: Ledger | None = None

    @property
    def rules(self) -> Rules:
        """What the run is.

        :raises UserError: when nobody has founded one here, or its rules cannot be read.
        """
        if self._rules is None:
            try:
                self._rules = self.read("rules.json", Rules, self.small)
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

    @property
    def me(self) -> Identity:
        """Who writes here; ValueError when nobody does."""
        if self._identity is None:
            raise ValueError(f"{self._store.place} was opened to read only")
        return self._identity

    def read(self, path: str, kind: type[Message], limits: Limits, peer: str | None = None) -> Message | None:
        """The message in a place, None if nothing is there; BadMessage when something else is."""
        raw = self._store.read(path, limits.message_bytes)
        return None if raw is None else self.unsealed(raw, path, kind, limits, peer)

    def read_each(
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
                    found[peer] = self.unsealed(raw, path, kind, limits, peer)
            except BadMessage as error:
                refused[peer] = error.reason
        return found, refused

    def unsealed(self, raw: bytes, path: str, kind: type[Message], limits: Limits, peer: str | None) -> Message:
        """The message of an envelope; that its peer said it here is noted."""
        if kind is Rules:
            return unseal(raw, limits, kind, peer=peer)
        place = path.removeprefix(f"peers/{peer}/")
        message, said = attest(raw, limits, kind, peer=peer, run=self.rules.run, place=place)
        self.ledger.hear(said, checked=True)
        return message

    def sealed(self, message: Message, kind: type[Message], limits: Limits) -> bytes:
        """The envelope, read as others will read it; UserError when they would refuse it."""
        raw = seal(self.me, message)
        run = None if kind is Rules else self.rules.run
        try:
            unseal(raw, limits, kind, peer=self.me.peer, run=run)
        except BadMessage as error:
            why = f"other peers would refuse these {message.kind}: {error.reason}"
            raise UserError(f"{self._store.place}: {why}; their limits are {limits}") from None
        return raw

    def append(self, path: str, message: Message, kind: type[Message], limits: Limits) -> None:
        """Put a message in its place; nothing happens where it lies there already.

        :raises UserError: when other peers would refuse it.
        :raises AlreadyThere: when something else is there.
        """
        raw = self.sealed(message, kind, limits)
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
