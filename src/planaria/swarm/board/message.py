"""Messages between peers; :mod:`planaria.swarm.board.envelope` signs them."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from planaria.common.object_store import BadObject
from planaria.swarm.board.claims import (
    Claim,
    Content,
    Fingerprint,
    Hex32,
    Hex64,
    Line,
    LogPs,
    Name,
    Proof,
    Round,
    StrictModel,
    Text,
    TokenId,
    canonical_json,
    digest_of,
    round_path,
)
from planaria.swarm.board.identity import peer_id
from planaria.swarm.board.message_limits import LAST_ROUND

VERSION: Final = 2
NOT_JSON = "not JSON"
_SMALL_BYTES = 2**16
_MAX_CLAIMS = 3 * 256
"""maximum number of claims in a closing: a message, a closing and a receipt of each peer"""


BadMessage = BadObject
"""a message that is missing, invalid or not the expected one"""


class RunRules(StrictModel):
    """Rules of a run, agreed by all peers; ``peer`` founded it."""

    max_bytes: ClassVar[int] = _SMALL_BYTES
    place: ClassVar[str] = "rules.json"
    kind: Literal["rules"] = "rules"
    version: Literal[2] = VERSION
    peer: Hex32
    nonce: Hex32
    """random; distinguishes runs with equal rules"""
    rules: Content

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the digest of the rules alone."""
        return hashlib.sha256(canonical_json(self.rules).encode()).hexdigest()[:16]

    @property
    def run(self) -> str:
        """Run id: 32 hex digits that depend on rules, founder and nonce."""
        words = (self.peer, self.nonce, canonical_json(self.rules))
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


class RunMessage(StrictModel):
    """Common leading fields of a run's messages."""

    max_bytes: ClassVar[int] = 2**22
    """maximum bytes of the envelope"""
    kind: str
    version: Literal[2] = VERSION
    run: Hex32
    peer: Hex32


class Hello(RunMessage):
    """A peer joins a run."""

    max_bytes: ClassVar[int] = _SMALL_BYTES
    place: ClassVar[str] = "hello.json"
    kind: Literal["hello"] = "hello"
    key: Hex64
    """raw public key, hexadecimal"""
    name: Name
    """display name, not unique"""
    tokenizer: Fingerprint
    model: Line
    """description in free form"""
    joined: Round
    """first round with completions of this peer"""

    @model_validator(mode="after")
    def _check_key(self) -> Hello:
        if peer_id(bytes.fromhex(self.key)) != self.peer:
            raise ValueError("the id is that of another key")
        return self


class Completion(StrictModel):
    """One text with its claimed token ids and log-probabilities (nats), if its generator reports them."""

    text: Text
    ended: bool
    ids: Annotated[tuple[TokenId, ...], Field(strict=False, fail_fast=True)] | None = None
    logps: LogPs | None = None

    @model_validator(mode="after")
    def _check_logps(self) -> Completion:
        if self.logps is not None and (self.ids is None or len(self.ids) != len(self.logps)):
            raise ValueError("one log-probability for each id")
        return self


class ProblemCompletions(StrictModel):
    """Completions of one problem."""

    problem: Annotated[int, Field(ge=0, lt=2**63)]
    completions: Annotated[tuple[Completion, ...], Field(strict=False, fail_fast=True, min_length=1)]


class Rollouts(RunMessage):
    """A peer's completions of a round; empty ``groups`` if it sends none."""

    kind: Literal["rollouts"] = "rollouts"
    round: Round
    tokenizer: Fingerprint
    """fingerprint of the tokenizer of ``ids``"""
    weights: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]
    """fingerprint of the weights that generated the completions, or empty"""
    groups: Annotated[tuple[ProblemCompletions, ...], Field(strict=False, fail_fast=True)]
    weights_round: Round | None = None
    """round of these weights, which may be earlier with ``rounds.ahead``; None is not published: the message's round"""

    @property
    def place(self) -> str:
        return round_path("rounds", self.round)

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        result: dict[str, Any] = handler(self)
        if self.weights_round is None:
            del result["weights_round"]
        return result

    @property
    def version_drawn(self) -> int:
        """Round of the weights that generated the completions."""
        return self.round if self.weights_round is None else self.weights_round

    @model_validator(mode="after")
    def _check_unique(self) -> Rollouts:
        if self.version_drawn > self.round:
            raise ValueError("the weights are of a later round")
        if len({group.problem for group in self.groups}) < len(self.groups):
            raise ValueError("a problem has one group")
        return self


class Goodbye(RunMessage):
    """A peer leaves; ``after`` is its last round with completions."""

    max_bytes: ClassVar[int] = _SMALL_BYTES
    place: ClassVar[str] = "goodbye.json"
    kind: Literal["goodbye"] = "goodbye"
    after: Annotated[int, Field(ge=-1, le=LAST_ROUND)]
    """-1: no round"""


class Closing(RunMessage):
    """Messages that ``peer`` received in a round, and closings and receipts it read since its last closing."""

    max_bytes: ClassVar[int] = 2**20
    """enough for a message, a closing and a proof of each peer of the largest board"""
    kind: Literal["closing"] = "closing"
    round: Round
    words: Annotated[tuple[Claim, ...], Field(strict=False, fail_fast=True, max_length=_MAX_CLAIMS)]
    """claims of the round's received messages, of closings of the round before, and of receipts"""
    proofs: Annotated[tuple[Proof, ...], Field(strict=False, fail_fast=True, max_length=256)] = ()
    """proofs against all peers known to have equivocated"""

    @property
    def place(self) -> str:
        return round_path("closings", self.round)

    @property
    def received(self) -> dict[str, str]:
        """Peer → digest of its message of the round."""
        return {claim.peer: claim.digest for claim in self.words if claim.place == round_path("rounds", self.round)}

    @model_validator(mode="after")
    def _check_unique(self) -> Closing:
        if len({(claim.key, claim.place) for claim in self.words}) < len(self.words):
            raise ValueError("one message is named once")
        return self


class Receipt(RunMessage):
    """Signed digest of a result: the messages of a round, its rewards, or the weights after it."""

    kind: Literal["receipt"] = "receipt"
    round: Round
    """number of rounds that the weights include"""
    about: Literal["round", "rewards", "weights"]
    digest: Hex64
    text: Text = ""
    """preimage of the digest; empty for weights"""

    @property
    def place(self) -> str:
        return round_path(f"receipts/{self.about}", self.round)

    @model_validator(mode="after")
    def _check_digest(self) -> Receipt:
        if self.text and digest_of(self.text) != self.digest:
            raise ValueError("the digest is of another text")
        return self
