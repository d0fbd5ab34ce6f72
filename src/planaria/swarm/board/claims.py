"""Field types of messages, signed claims, and proofs of equivocation.

A peer publishes one message per place. It signs the run, a place in its own folder, and the digest of the message. Two
valid signatures for one place with two digests prove equivocation.

A store can show two readers two contents of one file, and a colluding peer can sign both. Each closing lists, by digest
and signature, the messages its author read; two such entries for one place are a proof.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from planaria.swarm.board.identity import PeerIdentity, peer_id, verify
from planaria.swarm.board.limits import LAST_ROUND

_WIDEST = 60


def canonical(value: JsonValue) -> str:
    """Return the canonical JSON text of a value; 1, 1.0 and true stay distinct.

    :raises ValueError: for NaN, infinities, invalid Unicode, or nesting that is too deep.
    """
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text


def difference(own: JsonValue, theirs: JsonValue, key: str = "") -> str | None:
    """Describe the first key, in alphabetical order, whose values differ; None if all are equal.

    1, 1.0 and true differ. ``theirs`` is untrusted: its text is shown as short ASCII.
    """
    if isinstance(own, dict) and isinstance(theirs, dict):
        for name in sorted(own.keys() | theirs.keys()):
            path = f"{key}.{_shown(name)}" if key else _shown(name)
            if (name in own) != (name in theirs):
                return f"{path} is only {'here' if name in own else 'there'}"
            if result := difference(own[name], theirs[name], path):
                return result
        return None
    if canonical(own) == canonical(theirs):
        return None
    return f"{key} is {_shown(theirs)} there and {_shown(own)} here"


def _shown(value: JsonValue) -> str:
    text = json.dumps(value)
    if isinstance(value, str) and value.isidentifier() and value.isascii():
        text = value
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


_SIGNED = b"planaria swarm 2\0"


def _printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("one line of printable characters")
    return text


def _unicode(text: str) -> str:
    text.encode()  # a lone surrogate raises ValueError
    return text


def _below_one(logps: tuple[float, ...]) -> tuple[float, ...]:
    """Clip log-probabilities that rounding raised above 0."""
    return tuple(min(logp, 0.0) for logp in logps)


def _canonicalizable(rules: dict[str, JsonValue]) -> dict[str, JsonValue]:
    canonical(rules)
    return rules


Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Hex64 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Hex128 = Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Round = Annotated[int, Field(ge=0, le=LAST_ROUND)]
Name = Annotated[str, Field(min_length=1, max_length=40), AfterValidator(_printable)]
Line = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
Text = Annotated[str, AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogPs = Annotated[
    tuple[Annotated[float, Field(ge=-1e4, le=1e-4)], ...],
    Field(strict=False, fail_fast=True),
    AfterValidator(_below_one),
]
Content = Annotated[dict[str, JsonValue], AfterValidator(_canonicalizable)]
Place = Annotated[str, Field(pattern=r"^[a-z]{1,16}(/[a-z]{1,16})?(/[0-9]{6})?\.json$")]
"""path of a message in its peer's folder"""


def of_round(folder: str, number: int) -> str:
    """Return the place of a round's message.

    :raises ValueError: if the round is out of range.
    """
    if not 0 <= number <= LAST_ROUND:
        raise ValueError(f"no round {number}")
    return f"{folder}/{number:06d}.json"


class StrictModel(BaseModel):
    """Base of all messages: immutable, strict, without unknown fields or non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Claim(StrictModel):
    """A signed statement that the holder of ``key`` published the message with ``digest`` at ``place``."""

    key: Hex64
    """raw public key, hexadecimal"""
    place: Place
    digest: Hex64
    """SHA-256 of the message's body"""
    signature: Hex128

    @property
    def peer(self) -> str:
        return peer_id(bytes.fromhex(self.key))

    def is_valid(self, run: str) -> bool:
        """Whether the signature is valid for this run."""
        data = _signed(run, self.place, self.digest)
        return verify(bytes.fromhex(self.key), bytes.fromhex(self.signature), data)


def sign_claim(identity: PeerIdentity, run: str, location: str, body: str) -> Claim:
    """Sign the claim that ``body`` is published at ``location``."""
    digest = digest_of(body)
    signature = identity.sign(_signed(run, location, digest))
    return Claim(key=identity.public.hex(), place=location, digest=digest, signature=signature.hex())


def digest_of(text: str) -> str:
    """SHA-256 (hex) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _signed(run: str, location: str, digest: str) -> bytes:
    return _SIGNED + "\0".join((run, location, digest)).encode()


class Proof(StrictModel):
    """Two claims of one peer for one place; :meth:`is_valid` checks both signatures."""

    one: Claim
    other: Claim

    @model_validator(mode="after")
    def _check_digests(self) -> Proof:
        claim, other = self.one, self.other
        if (claim.key, claim.place) != (other.key, other.place) or claim.digest == other.digest:
            raise ValueError("two digests of one peer's for one place")
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
        """Proofs by equivocating peer."""
        return self._proofs

    def claim(self, peer: str, location: str) -> Claim | None:
        """Return the last claim read of a peer and place."""
        return self._claims.get((peer, location))

    def record(self, claim: Claim, checked: bool = False) -> None:
        """Record a claim. Verify an unchecked claim if it differs from the known one; an invalid one proves nothing
        and replaces nothing."""
        previous = self._claims.get((claim.peer, claim.place))
        if previous is not None and previous.digest != claim.digest:
            self.add_proofs([Proof(one=previous, other=claim)])
            if not checked and (previous.is_valid(self._run) or not claim.is_valid(self._run)):
                return
        self._claims[claim.peer, claim.place] = claim

    def add_proofs(self, proofs: Iterable[Proof]) -> None:
        """Add the valid proofs."""
        for proof in proofs:
            if proof.peer not in self._proofs and proof.is_valid(self._run):
                self._proofs[proof.peer] = proof

    def forget(self, before: int) -> None:
        """Drop claims of rounds ``before`` a number; keep proofs."""
        self._claims = {key: claim for key, claim in self._claims.items() if not _older(key[1], before)}


def _older(location: str, before: int) -> bool:
    number = location.rpartition("/")[2].removesuffix(".json")
    return number.isdigit() and int(number) < before
