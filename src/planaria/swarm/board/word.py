"""Fields of all messages, what a signature covers, and proofs of equivocation.

A peer publishes one message in one place. It signs a run, a place in its own folder, and the digest of the message, so
the signature alone proves what it published there. Two signatures for one place with two digests prove equivocation.

A store can show two readers two contents of one file, and a peer that helps it can sign both. No reader alone notices.
But each closing lists, by digest and signature, what its author has read, and two such entries for one place are proof.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from planaria.swarm.board.identity import Identity, peer_id, verify
from planaria.swarm.board.limits import LAST_ROUND

_WIDEST = 60


def canonical(value: JsonValue) -> str:
    """The one JSON text of a value: 1, 1.0 and true are three values.

    :raises ValueError: for NaN, infinities, text that is no valid Unicode, and what is nested too deeply.
    """
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text


def difference(mine: JsonValue, theirs: JsonValue, key: str = "") -> str | None:
    """The first key, in alphabetical order, that differs, with both values; None if nothing does.

    1, 1.0 and true differ. ``theirs`` comes from a stranger: what is said of it is ASCII, and short.
    """
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in sorted(mine.keys() | theirs.keys()):
            path = f"{key}.{_shown(name)}" if key else _shown(name)
            if (name in mine) != (name in theirs):
                return f"{path} is only {'here' if name in mine else 'there'}"
            if found := difference(mine[name], theirs[name], path):
                return found
        return None
    if canonical(mine) == canonical(theirs):
        return None
    return f"{key} is {_shown(theirs)} there and {_shown(mine)} here"


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


class Proof(Word):
    """Two things that one peer said in one place. Whether both signatures stand is for :meth:`stands` to say."""

    one: Said
    other: Said

    @model_validator(mode="after")
    def _two_things(self) -> Proof:
        one, other = self.one, self.other
        if (one.key, one.place) != (other.key, other.place) or one.digest == other.digest:
            raise ValueError("two digests of one peer's for one place")
        return self

    @property
    def peer(self) -> str:
        return self.one.peer

    def stands(self, run: str) -> bool:
        return self.one.stands(run) and self.other.stands(run)


class Ledger:
    """What is known to have been said in a run, and who is proven to have said two things."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._said: dict[tuple[str, str], Said] = {}
        self._proofs: dict[str, Proof] = {}

    @property
    def proofs(self) -> Mapping[str, Proof]:
        """By the peer that is proven to have said two things."""
        return self._proofs

    def said(self, peer: str, place: str) -> Said | None:
        """What was heard last of what a peer said in a place."""
        return self._said.get((peer, place))

    def hear(self, said: Said, checked: bool = False) -> None:
        """Take note. What is not ``checked`` is looked at when it differs from what is known: a lie about what another
        said proves nothing, and does not take the place of the truth."""
        known = self._said.get((said.peer, said.place))
        if known is not None and known.digest != said.digest:
            self.convict([Proof(one=known, other=said)])
            if not checked and (known.stands(self._run) or not said.stands(self._run)):
                return
        self._said[said.peer, said.place] = said

    def convict(self, proofs: Iterable[Proof]) -> None:
        """Take over proofs, those of them that stand."""
        for proof in proofs:
            if proof.peer not in self._proofs and proof.stands(self._run):
                self._proofs[proof.peer] = proof

    def forget(self, before: int) -> None:
        """What was said of rounds ``before`` a number; proofs stay."""
        self._said = {key: said for key, said in self._said.items() if not _older(key[1], before)}


def _older(place: str, before: int) -> bool:
    number = place.rpartition("/")[2].removesuffix(".json")
    return number.isdigit() and int(number) < before
