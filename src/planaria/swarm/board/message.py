"""What peers tell each other: typed words of bounded size; :mod:`planaria.swarm.board.envelope` signs them."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from planaria.swarm.board.identity import peer_id
from planaria.swarm.board.limits import LAST_ROUND
from planaria.swarm.board.word import (
    Content,
    Fingerprint,
    Hex32,
    Hex64,
    Line,
    LogPs,
    Name,
    Proof,
    Round,
    Said,
    Text,
    TokenId,
    Word,
    canonical,
    digest_of,
    of_round,
)

VERSION: Final = 2
NOT_JSON, NOT_READABLE = "not JSON", "not readable"
_READ = 3 * 256
"""what one closing may name: a message, a closing and a receipt of each peer"""


class BadMessage(Exception):
    """What lies where a message should lie is none, or not the one expected.

    ``reason`` is a short phrase of ours; the only thing in it that comes from the sender is which field is wrong.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Rules(Word):
    """What a run is: what all of its peers agreed on when the first of them, ``peer``, founded it."""

    kind: Literal["rules"] = "rules"
    version: Literal[2] = VERSION
    peer: Hex32
    nonce: Hex32
    """random: a run founded again with the same rules is another run"""
    rules: Content

    @property
    def place(self) -> str:
        return "rules.json"

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the rules alone."""
        return hashlib.sha256(canonical(self.rules).encode()).hexdigest()[:16]

    @property
    def run(self) -> str:
        """32 hex digits that every message of the run carries; other rules, founder or nonce give others."""
        words = (self.peer, self.nonce, canonical(self.rules))
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


class Sent(Word):
    """Base of the messages of a run: the first fields of each, in this order."""

    kind: str
    version: Literal[2] = VERSION
    run: Hex32
    peer: Hex32


class Hello(Sent):
    """A peer takes part in a run."""

    kind: Literal["hello"] = "hello"
    key: Hex64
    """raw public key, hexadecimal"""
    name: Name
    """by its owner, for display; any number of peers may have the same"""
    tokenizer: Fingerprint
    model: Line
    """in its owner's words"""
    joined: Round
    """the first round that it sends completions for"""

    @property
    def place(self) -> str:
        return "hello.json"

    @model_validator(mode="after")
    def _own_id(self) -> Hello:
        if peer_id(bytes.fromhex(self.key)) != self.peer:
            raise ValueError("the id is that of another key")
        return self


class Completion(Word):
    """One text, and, if its generator says so, its token ids and their log-probabilities (nats), all of it claims."""

    text: Text
    ended: bool
    ids: Annotated[tuple[TokenId, ...], Field(strict=False, fail_fast=True)] | None = None
    logps: LogPs | None = None

    @model_validator(mode="after")
    def _aligned(self) -> Completion:
        if self.logps is not None and (self.ids is None or len(self.ids) != len(self.logps)):
            raise ValueError("one log-probability for each id")
        return self


class Group(Word):
    """Completions of one problem."""

    problem: Annotated[int, Field(ge=0, lt=2**63)]
    completions: Annotated[tuple[Completion, ...], Field(strict=False, fail_fast=True, min_length=1)]


class Rollouts(Sent):
    """What a peer generated for a round; empty ``groups`` say that there is nothing to wait for."""

    kind: Literal["rollouts"] = "rollouts"
    round: Round
    tokenizer: Fingerprint
    """of the tokenizer that gave ``ids``"""
    weights: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]
    """fingerprint of the weights that drew the completions; empty if it does not say"""
    groups: Annotated[tuple[Group, ...], Field(strict=False, fail_fast=True)]

    @property
    def place(self) -> str:
        return of_round("rounds", self.round)

    @model_validator(mode="after")
    def _each_once(self) -> Rollouts:
        if len({group.problem for group in self.groups}) < len(self.groups):
            raise ValueError("a problem has one group")
        return self


class Goodbye(Sent):
    """A peer leaves; round ``after`` was the last that it sent completions for."""

    kind: Literal["goodbye"] = "goodbye"
    after: Annotated[int, Field(ge=-1, le=LAST_ROUND)]
    """-1: none"""

    @property
    def place(self) -> str:
        return "goodbye.json"


class Closing(Sent):
    """A round is over for ``peer``: which messages it heard in it, and whatever else it has read since the last one."""

    kind: Literal["closing"] = "closing"
    round: Round
    words: Annotated[tuple[Said, ...], Field(strict=False, fail_fast=True, max_length=_READ)]
    """the round's messages that it heard, by digest; closings of the round before"""
    proofs: Annotated[tuple[Proof, ...], Field(strict=False, fail_fast=True, max_length=256)] = ()
    """of everybody whom it knows to have said two things"""

    @property
    def place(self) -> str:
        return of_round("closings", self.round)

    @property
    def heard(self) -> dict[str, str]:
        """Peer → digest of its message of the round."""
        return {said.peer: said.digest for said in self.words if said.place == of_round("rounds", self.round)}

    @model_validator(mode="after")
    def _each_once(self) -> Closing:
        if len({(said.key, said.place) for said in self.words}) < len(self.words):
            raise ValueError("one message is named once")
        return self


class Receipt(Sent):
    """A peer has found something, named by a digest: whom a round heard, its rewards, or its own weights after it."""

    kind: Literal["receipt"] = "receipt"
    round: Round
    """of weights: how many rounds they have learned from"""
    about: Literal["round", "rewards", "weights"]
    digest: Hex64
    text: Text = ""
    """what the digest is of, where others may want it; empty for weights"""

    @property
    def place(self) -> str:
        return of_round(f"receipts/{self.about}", self.round)

    @model_validator(mode="after")
    def _of_the_text(self) -> Receipt:
        if self.text and digest_of(self.text) != self.digest:
            raise ValueError("the digest is of another text")
        return self
