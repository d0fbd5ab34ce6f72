"""The board of a run: a shared store where each peer appends messages under its own id.

::

    {board}/rules.json                              rules of the run, by its founder
    {board}/peers/{peer id}/hello.json              a peer joins
    {board}/peers/{peer id}/rounds/{round}.json     its completions of a round, six digits
    {board}/peers/{peer id}/closings/{round}.json   digests of the messages it received in a round
    {board}/peers/{peer id}/receipts/{about}/...    its results, as a member of the run's committee
    {board}/peers/{peer id}/goodbye.json            it left

Files are never replaced. The store is not trusted: signatures prove authorship, and a message counts only under the id,
run and round that it contains.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from pydantic import JsonValue

from planaria.common.errors import UserError
from planaria.common.object_store import Retry, Store
from planaria.swarm.board.attendance import Census, PolledPeers, RoundMessages, RoundStalled, RoundTerms
from planaria.swarm.board.claims import ClaimLedger, first_difference, round_path
from planaria.swarm.board.envelope import Message, seal, unseal, unseal_with_claim
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import BadMessage, Closing, Goodbye, Hello, Receipt, Rollouts, RunRules
from planaria.swarm.board.message_limits import LIMITS

PEER = re.compile("[0-9a-f]{32}")
_RETRY = Retry()


class AlreadyPublished(Exception):
    """Another message has this path, possibly this peer's own from before a restart."""


class Board:
    """A board as seen by one peer, which writes under its own id; read-only without an identity."""

    def __init__(
        self,
        url: str,
        identity: PeerIdentity | None = None,
        *,
        known: Iterable[str] = (),
        retry: Retry = _RETRY,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the board at a URL or in a folder, which need not exist.

        :param known: ids of known peers, which are read first
        :raises UserError: if the URL is not supported.
        """
        self._store = Store(url, "board", retry, clock, sleep)
        self._identity = identity
        self._clock, self._sleep = clock, sleep
        secret = identity.sign(b"planaria swarm order\0") if identity else secrets.token_bytes(64)
        self._polled = PolledPeers({*known} | ({identity.peer} if identity else set()), LIMITS.peers, secret)

    @cached_property
    def rules(self) -> RunRules:
        """Rules of the run.

        :raises UserError: if the board has no run or its rules are invalid.
        """
        location = self._store.location
        try:
            rules = self._read_message("rules.json", RunRules)
        except BadMessage as error:
            raise UserError(f"{location}/rules.json: {error.reason}; create the swarm on another board") from None
        if rules is None:
            fix = f"check the address, or create a run with `planaria swarm join RECIPE --board {location}`"
            raise UserError(f"{location}: this board has no run; {fix}")
        return rules

    @property
    def founding_envelope(self) -> bytes:
        """The rules' envelope; raises as :attr:`rules` does."""
        self.rules  # noqa: B018 (raises a clear error)
        return self._store.read("rules.json", RunRules.max_bytes) or b""

    @cached_property
    def ledger(self) -> ClaimLedger:
        """Claims read from this board, and proofs of equivocation."""
        return ClaimLedger(self.rules.run)

    def create_run(self, rules: Mapping[str, JsonValue]) -> RunRules:
        """Create a run with these rules, or open the existing run if its rules are equal.

        :raises UserError: if its rules differ; the message names the first such key.
        """
        own = RunRules(peer=self._me.peer, nonce=secrets.token_hex(16), rules=dict(rules))
        self._store.write("rules.json", self._seal(own))
        if difference := first_difference(own.rules, self.rules.rules):
            raise UserError(
                f"{self._store.location}: the run has other rules: {difference}; use its rules, or "
                "create a run on another board"
            )
        return self.rules

    def join(self, hello: Hello) -> Hello:
        """Publish this peer's hello; return the hello on the board, which is older if this peer has joined before.

        :raises UserError: if the peer joined with another tokenizer, or has left.
        """
        own, location = self._me.peer, self._store.location
        path = message_path(own, hello.place)
        raw = self._seal(hello)
        try:
            left = self._read_message(message_path(own, "goodbye.json"), Goodbye, own)
            published = hello if self._store.write(path, raw) else self._read_message(path, Hello, own)
        except BadMessage as error:
            raise UserError(
                f"{location}: the message under this peer's id is {error.reason}; use another identity"
            ) from None
        if left or published is None or published.tokenizer != hello.tokenizer:
            why = "has left this run" if left else "joined with another tokenizer, or its hello is lost"
            raise UserError(f"{location}: peer {own} {why}; use another identity")
        return published

    def publish(self, message: Message) -> None:
        """Append a message of this peer; do nothing if it exists.

        :raises UserError: if other peers would reject it.
        :raises AlreadyPublished: if another message has this path.
        """
        path, raw = message_path(self._me.peer, message.place), self._seal(message)
        if self._store.write(path, raw):
            return
        try:
            stored = self._store.read(path, len(raw))
        except BadMessage:
            stored = None
        if stored != raw:
            raise AlreadyPublished(
                f"{self._store.location}/{path}: another message exists, and messages are never replaced"
            )

    def closings(self, round_number: int, peers: Iterable[str]) -> dict[str, Closing]:
        return self._read_each(peers, round_path("closings", round_number), Closing)[0]

    def read_receipt(self, peer: str, about: str, round_number: int) -> tuple[Receipt, bytes] | None:
        """Return a peer's receipt and its envelope, or None if there is no valid one."""
        path = message_path(peer, round_path(f"receipts/{about}", round_number))
        try:
            raw = self._store.read(path, Receipt.max_bytes)
            return None if raw is None else (self._unseal(raw, path, Receipt, peer), raw)
        except BadMessage:
            return None

    def peers(self) -> Census:
        """Read the participants of the run, by verified messages.

        A hello or goodbye that has been read stays valid even if its file changes. One call reads at most
        ``LIMITS.peers`` peers, selected by :class:`planaria.swarm.board.attendance.PolledPeers`.
        """
        polled = self._polled
        names = set(self._store.folders("peers", PEER)) - polled.hellos.keys()
        hellos, rejected = self._read_each(polled.select_unjoined(names), "hello.json", Hello)
        polled.hellos |= hellos
        goodbyes, wrong = self._read_each(polled.select_unleft(), "goodbye.json", Goodbye)
        polled.goodbyes |= goodbyes
        return Census(dict(sorted(polled.hellos.items())), dict(polled.goodbyes), rejected | wrong)

    def gather(self, round_number: int, peers: Iterable[str]) -> RoundMessages:
        """Read the messages of ``peers`` for a round once."""
        requested = sorted(set(peers))
        result, rejected = self._read_each(requested, round_path("rounds", round_number), Rollouts)
        missing = [peer for peer in requested if peer not in result and peer not in rejected]
        self._polled.mark_active(result)
        return RoundMessages(result, tuple(missing), rejected)

    def wait(self, round_number: int, peers: Iterable[str], terms: RoundTerms, poll_s: float = 1.0) -> RoundMessages:
        """Poll for the messages of ``peers`` until the round may close (:meth:`RoundTerms.allow_closing`).

        :raises RoundStalled: if the round stays below its quorum.
        """
        began, everyone = self._clock(), frozenset(peers)
        seen = RoundMessages({}, tuple(everyone), {})
        while True:
            read = self.gather(round_number, seen.open)
            elapsed = self._clock() - began
            seen = seen.merge(read, elapsed)
            if terms.allow_closing(everyone, seen.found.keys(), seen.rejected_permanently.keys(), elapsed):
                return seen
            if elapsed >= terms.patience_s:
                why = dict.fromkeys(seen.missing, "sent nothing") | seen.rejected
                raise RoundStalled(self.rules.run, round_number, seen.found, why, terms.quorum)
            self._sleep(min(poll_s, terms.seconds_to_change(elapsed)))

    def pause(self, seconds: float) -> None:
        self._sleep(seconds)

    @property
    def _me(self) -> PeerIdentity:
        """This peer's identity; ValueError if the board is read-only."""
        if self._identity is None:
            raise ValueError(f"{self._store.location} was opened read-only")
        return self._identity

    def _read_message(self, path: str, kind: type[Message], peer: str | None = None) -> Message | None:
        """Return the message at a path, or None if there is no file; BadMessage if it is invalid."""
        raw = self._store.read(path, kind.max_bytes)
        return None if raw is None else self._unseal(raw, path, kind, peer)

    def _read_each(
        self, peers: Iterable[str], name: str, kind: type[Message]
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """Return the valid messages and the reasons of the invalid ones, by peer."""
        result: dict[str, Message] = {}
        rejected: dict[str, str] = {}
        requested = sorted(set(peers))
        places = [message_path(peer, name) for peer in requested]
        answers = self._store.read_each(places, kind.max_bytes)
        for peer, path, raw in zip(requested, places, answers, strict=True):
            try:
                if isinstance(raw, BadMessage):
                    raise raw
                if raw is not None:
                    result[peer] = self._unseal(raw, path, kind, peer)
            except BadMessage as error:
                rejected[peer] = error.reason
        return result, rejected

    def _unseal(self, raw: bytes, path: str, kind: type[Message], peer: str | None) -> Message:
        """Return the message of an envelope and record its claim."""
        if kind is RunRules:
            return unseal(raw, kind, peer=peer)
        place = path.removeprefix(f"peers/{peer}/")
        message, claim = unseal_with_claim(raw, kind, peer=peer, run=self.rules.run, place=place)
        self.ledger.record(claim, checked=True)
        return message

    def _seal(self, message: Message) -> bytes:
        """Return the envelope of a message; UserError if other peers would reject it."""
        raw = seal(self._me, message)
        run = None if isinstance(message, RunRules) else self.rules.run
        try:
            unseal(raw, type(message), peer=self._me.peer, run=run)
        except BadMessage as error:
            why = f"other peers would reject this {message.kind} message: {error.reason}"
            limits = f"{message.max_bytes} bytes and {LIMITS}"
            raise UserError(f"{self._store.location}: {why}; their limits are {limits}") from None
        return raw


def message_path(peer: str, name: str) -> str:
    """Return the path of a peer's message; ValueError if the peer id is invalid."""
    if not PEER.fullmatch(peer):
        raise ValueError(f"{peer!r} is not a peer id")
    return f"peers/{peer}/{name}"
