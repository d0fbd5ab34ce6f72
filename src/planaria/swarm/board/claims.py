"""Field types of messages, signed claims, and proofs of equivocation.

A peer publishes one message per place, which is a path in its own folder. It signs the run, the place and the digest of
the message. Two valid signatures for one place with two digests prove equivocation.

A store can show different contents of one file to two readers, and a colluding peer can sign both. Each closing lists
the messages that its author read, by digest and signature. Two such entries for one place are a proof.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from planaria.swarm.board.identity import PeerIdentity, peer_id, verify
from planaria.swarm.board.message_limits import LAST_ROUND

_MAX_SHOWN = 60


def canonical_json(value: JsonValue) -> str:
    """Return the canonical JSON text of a value; 1, 1.0 and true stay distinct.

    :raises ValueError: for NaN, infinities, invalid Unicode, or nesting that is too deep.
    """
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text


def first_difference(own: JsonValue, theirs: JsonValue, key: str = "") -> str | None:
    """Describe the first key, in alphabetical order, whose values differ; return None if all are equal.

    1, 1.0 and true differ. ``theirs`` is untrusted: its text is shown as short ASCII.
    """
    if isinstance(own, dict) and isinstance(theirs, dict):
        for name in sorted(own.keys() | theirs.keys()):
            path = f"{key}.{_abbreviate(name)}" if key else _abbreviate(name)
            if (name in own) != (name in theirs):
                return f"{path} is only {'here' if name in own else 'there'}"
            if result := first_difference(own[name], theirs[name], path):
                return result
        return None
    if canonical_json(own) == canonical_json(theirs):
        return None
    return f"{key} is {_abbreviate(theirs)} there and {_abbreviate(own)} here"


def _abbreviate(value: JsonValue) -> str:
    text = json.dumps(value)
    if isinstance(value, str) and value.isidentifier() and value.isascii():
        text = value
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


_SIGNED_PREFIX = b"planaria swarm 2\0"


def _require_printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("one line of printable characters")
    return text


def _require_unicode(text: str) -> str:
    text.encode()  # a lone surrogate raises ValueError
    return text


def _clip_at_zero(logps: tuple[float, ...]) -> tuple[float, ...]:
    """Clip log-probabilities that rounding raised above 0."""
    return tuple(min(logp, 0.0) for logp in logps)


def _require_canonical(rules: dict[str, JsonValue]) -> dict[str, JsonValue]:
    canonical_json(rules)
    return rules


Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Hex64 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Hex128 = Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Round = Annotated[int, Field(ge=0, le=LAST_ROUND)]
Name = Annotated[str, Field(min_length=1, max_length=40), AfterValidator(_require_printable)]
Line = Annotated[str, Field(max_length=200), AfterValidator(_require_printable)]
Text = Annotated[str, AfterValidator(_require_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogPs = Annotated[
    tuple[Annotated[float, Field(ge=-1e4, le=1e-4)], ...],
    Field(strict=False, fail_fast=True),
    AfterValidator(_clip_at_zero),
]
Content = Annotated[dict[str, JsonValue], AfterValidator(_require_canonical)]
MessagePath = Annotated[str, Field(pattern=r"^[a-z]{1,16}(/[a-z]{1,16})?(/[0-9]{6})?\.json$")]
"""path of a message in its peer's folder"""


def round_path(folder: str, number: int) -> str:
    """Return the place of a round's message.

    :raises ValueError: if the round is out of range.
    """
    if not 0 <= number <= LAST_ROUND:
        raise ValueError(f"round {number} is out of range")
    return f"{folder}/{number:06d}.json"


class StrictModel(BaseModel):
    """Base of all messages: immutable, strict, without unknown fields or non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Claim(StrictModel):
    """A signed statement that the holder of ``key`` published the message with ``digest`` at ``place``."""

    key: Hex64
    """raw public key, hexadecimal"""
    place: MessagePath
    digest: Hex64
    """SHA-256 of the message's body"""
    signature: Hex128

    @property
    def peer(self) -> str:
        return peer_id(bytes.fromhex(self.key))

    def is_valid(self, run: str) -> bool:
        """Return whether the signature is valid for this run."""
        data = _bytes_to_sign(run, self.place, self.digest)
        return verify(bytes.fromhex(self.key), bytes.fromhex(self.signature), data)


def sign_claim(identity: PeerIdentity, run: str, place: str, body: str) -> Claim:
    """Sign the claim that ``body`` is published at ``place``."""
    digest = digest_of(body)
    signature = identity.sign(_bytes_to_sign(run, place, digest))
    return Claim(key=identity.public.hex(), place=place, digest=digest, signature=signature.hex())


def digest_of(text: str) -> str:
    """Return the SHA-256 (hex) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _bytes_to_sign(run: str, place: str, digest: str) -> bytes:
    return _SIGNED_PREFIX + "\0".join((run, place, digest)).encode()


class Proof(StrictModel):
    """Two claims of one peer for one place; :meth:`is_valid` checks both signatures."""

    one: Claim
    other: Claim

    @model_validator(mode="after")
    def _check_digests(self) -> Proof:
        claim, other = self.one, self.other
        if (claim.key, claim.place) != (other.key, other.place) or claim.digest == other.digest:
            raise ValueError("not two digests of one peer for one place")
        return self

    @property
    def peer(self) -> str:
        return self.one.peer

    def is_valid(self, run: str) -> bool:
        return self.one.is_valid(run) and self.other.is_valid(run)


class ClaimLedger:
    """Claims read in a run, and proofs of equivocation."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._claims: dict[tuple[str, str], Claim] = {}
        self._proofs: dict[str, Proof] = {}

    @property
    def proofs(self) -> Mapping[str, Proof]:
        return self._proofs

    def claim(self, peer: str, place: str) -> Claim | None:
        return self._claims.get((peer, place))

    def record(self, claim: Claim, checked: bool = False) -> None:
        """Record a claim. An unchecked one is verified if it differs from the known claim, and dropped if invalid."""
        previous = self._claims.get((claim.peer, claim.place))
        if previous is not None and previous.digest != claim.digest:
            self.add_proofs([Proof(one=previous, other=claim)])
            if not checked and (previous.is_valid(self._run) or not claim.is_valid(self._run)):
                return
        self._claims[claim.peer, claim.place] = claim

    def add_proofs(self, proofs: Iterable[Proof]) -> None:
        """Add those of the proofs that are valid."""
        for proof in proofs:
            if proof.peer not in self._proofs and proof.is_valid(self._run):
                self._proofs[proof.peer] = proof

    def forget(self, before: int) -> None:
        """Drop claims of rounds before ``before``; keep proofs."""

        def is_old(place: str) -> bool:
            number = place.rpartition("/")[2].removesuffix(".json")
            return number.isdigit() and int(number) < before

        self._claims = {key: claim for key, claim in self._claims.items() if not is_old(key[1])}
