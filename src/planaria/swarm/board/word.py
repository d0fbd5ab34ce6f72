"""What all messages consist of: bounded fields, and what a signature is made over.

A peer says one thing in one place. What it signs are a run, a place in its own folder, and the digest of what it says
there, so its signature alone, without the message, proves that it said just that there: two signatures for one place
and two digests prove that it said two things.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from planaria.swarm.board.difference import canonical
from planaria.swarm.board.identity import Identity, peer_id, verify
from planaria.swarm.board.limits import LAST_ROUND

_SIGNED = b"planaria swarm 2\0"


def _printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("one line of printable characters")
    return text


def _unicode(text: str) -> str:
    text.encode()  # a lone surrogate raises ValueError
    return text


def _below_one(logps: tuple[float, ...]) -> tuple[float, ...]:
    """Probabilities that rounding took above 1 are 1."""
    return tuple(min(logp, 0.0) for logp in logps)


def _sayable(rules: dict[str, JsonValue]) -> dict[str, JsonValue]:
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
Content = Annotated[dict[str, JsonValue], AfterValidator(_sayable)]
Place = Annotated[str, Field(pattern=r"^[a-z]{1,16}(/[a-z]{1,16})?(/[0-9]{6})?\.json$")]
"""of a message, in its peer's folder"""


def of_round(folder: str, number: int) -> str:
    """The place of a message of a round; ValueError when there is no such round."""
    if not 0 <= number <= LAST_ROUND:
        raise ValueError(f"no round {number}")
    return f"{folder}/{number:06d}.json"


class Word(BaseModel):
    """Base of all: immutable, nothing unknown in it, no number that is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Said(Word):
    """That the holder of ``key`` said something in a place: the digest of what, and its signature."""

    key: Hex64
    """raw public key, hexadecimal"""
    place: Place
    digest: Hex64
    """SHA-256 of the message's body"""
    signature: Hex128

    @property
    def peer(self) -> str:
        return peer_id(bytes.fromhex(self.key))

    def stands(self, run: str) -> bool:
        """Whether the signature was made, in this run, by whom the key belongs to."""
        data = _signed(run, self.place, self.digest)
        return verify(bytes.fromhex(self.key), bytes.fromhex(self.signature), data)


def say(identity: Identity, run: str, place: str, body: str) -> Said:
    """What a peer signs when it says ``body`` in a place."""
    digest = digest_of(body)
    signature = identity.sign(_signed(run, place, digest))
    return Said(key=identity.public.hex(), place=place, digest=digest, signature=signature.hex())


def digest_of(text: str) -> str:
    """SHA-256 (hex) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _signed(run: str, place: str, digest: str) -> bytes:
    return _SIGNED + "\0".join((run, place, digest)).encode()
