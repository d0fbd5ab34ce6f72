"""What peers tell each other: typed words of bounded size, each in an envelope that its sender signed.

An envelope is one JSON object: the sender's public key, a signature, and the body, which is itself JSON text. What is
signed are the bytes of that text as they stand, so nothing depends on how JSON is laid out. Peers do not trust each
other: whatever bytes arrive, :func:`unseal` gives a message within its limits, or says in a word why not.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import from_json

from planaria.swarm.board.difference import canonical
from planaria.swarm.board.identity import Identity, peer_id, verify
from planaria.swarm.board.limits import LAST_ROUND, Limits

VERSION: Final = 1
NOT_JSON, NOT_READABLE = "not JSON", "not readable"
_SIGNED = b"planaria swarm 1\0"
_MANY_ERRORS = 100


class BadMessage(Exception):
    """What lies where a message should lie is none, or not the one expected.

    ``reason`` is a short phrase of ours; the only thing in it that comes from the sender is which field is wrong.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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


_Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Hex64 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Round = Annotated[int, Field(ge=0, le=LAST_ROUND)]
_Name = Annotated[str, Field(min_length=1, max_length=40), AfterValidator(_printable)]
_Line = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_LogP = Annotated[float, Field(ge=-1e4, le=1e-4)]


class Word(BaseModel):
    """Base of all: immutable, nothing unknown in it, no number that is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Rules(Word):
    """What a run is: what all of its peers agreed on when the first of them, ``peer``, founded it."""

    kind: Literal["rules"] = "rules"
    version: Literal[1] = VERSION
    peer: _Hex32
    nonce: _Hex32
    """random: a run founded again with the same rules is another run"""
    rules: Annotated[dict[str, JsonValue], AfterValidator(_sayable)]

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the rules alone."""
        return hashlib.sha256(canonical(self.rules).encode()).hexdigest()[:16]

    @property
    def run(self) -> str:
        """32 hex digits that every message of the run carries; other rules, founder or nonce give others."""
        words = (self.peer, self.nonce, canonical(self.rules))
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


class Hello(Word):
    """A peer takes part in a run."""

    kind: Literal["hello"] = "hello"
    version: Literal[1] = VERSION
    run: _Hex32
    peer: _Hex32
    key: _Hex64
    """raw public key, hexadecimal"""
    name: _Name
    """by its owner, for display; any number of peers may have the same"""
    tokenizer: _Fingerprint
    model: _Line
    """in its owner's words"""
    joined: _Round
    """the first round that it sends completions for"""

    @model_validator(mode="after")
    def _own_id(self) -> Hello:
        if peer_id(bytes.fromhex(self.key)) != self.peer:
            raise ValueError("the id is that of another key")
        return self


class Completion(Word):
    """One text, and, if its generator says so, its token ids and their log-probabilities (nats), all of it claims."""

    text: Annotated[str, AfterValidator(_unicode)]
    ended: bool
    ids: Annotated[tuple[_TokenId, ...], Field(strict=False, fail_fast=True)] | None = None
    logps: Annotated[tuple[_LogP, ...], Field(strict=False, fail_fast=True), AfterValidator(_below_one)] | None = None

    @model_validator(mode="after")
    def _aligned(self) -> Completion:
        if self.logps is not None and (self.ids is None or len(self.ids) != len(self.logps)):
            raise ValueError("one log-probability for each id")
        return self


class Group(Word):
    """Completions of one problem."""

    problem: Annotated[int, Field(ge=0, lt=2**63)]
    completions: Annotated[tuple[Completion, ...], Field(strict=False, fail_fast=True, min_length=1)]


class Rollouts(Word):
    """What a peer generated for a round; empty ``groups`` say that there is nothing to wait for."""

    kind: Literal["rollouts"] = "rollouts"
    version: Literal[1] = VERSION
    run: _Hex32
    peer: _Hex32
    round: _Round
    tokenizer: _Fingerprint
    """of the tokenizer that gave ``ids``"""
    weights: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]
    """fingerprint of the weights that drew the completions; empty if it does not say"""
    groups: Annotated[tuple[Group, ...], Field(strict=False, fail_fast=True)]

    @model_validator(mode="after")
    def _each_once(self) -> Rollouts:
        if len({group.problem for group in self.groups}) < len(self.groups):
            raise ValueError("a problem has one group")
        return self


class Goodbye(Word):
    """A peer leaves; round ``after`` was the last that it sent completions for."""

    kind: Literal["goodbye"] = "goodbye"
    version: Literal[1] = VERSION
    run: _Hex32
    peer: _Hex32
    after: Annotated[int, Field(ge=-1, le=LAST_ROUND)]
    """-1: none"""


class Closing(Word):
    """A round is over for ``peer``, the first to say so: it learned from what those it ``heard`` had sent."""

    kind: Literal["closing"] = "closing"
    version: Literal[1] = VERSION
    run: _Hex32
    peer: _Hex32
    round: _Round
    heard: Annotated[tuple[_Hex32, ...], Field(strict=False, fail_fast=True)]


class _Envelope(Word):
    key: _Hex64
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
    body: str


_WORDS = (_Envelope, Rules, Hello, Rollouts, Group, Completion, Goodbye, Closing)
_OURS = {name for word in _WORDS for name in word.model_fields}
Message = TypeVar("Message", Rules, Hello, Rollouts, Goodbye, Closing)
_Parsed = TypeVar("_Parsed", bound=BaseModel)


def seal(identity: Identity, message: Rules | Hello | Rollouts | Goodbye | Closing) -> bytes:
    """The envelope of a message; equal for equal messages.

    :raises ValueError: when the message is another peer's.
    """
    if message.peer != identity.peer:
        raise ValueError(f"{identity.peer} cannot speak for {message.peer}")
    body = message.model_dump_json()
    signature = identity.sign(_SIGNED + body.encode())
    return _Envelope(key=identity.public.hex(), signature=signature.hex(), body=body).model_dump_json().encode()


def unseal(
    raw: bytes,
    limits: Limits,
    kind: type[Message],
    *,
    peer: str | None = None,
    run: str | None = None,
    round: int | None = None,
) -> Message:
    """The message of an envelope, whatever bytes it is. ``peer``, ``run`` and ``round``: what must be in it, if given.

    :raises BadMessage: "oversized"; "not JSON"; "a key twice"; "forged": not signed by ``peer``, or not by whom it
        names; "another version"; "another run"; "replayed": of another round; "too many …"; "malformed: " and the
        field.
    """
    if len(raw) > limits.message_bytes:
        raise BadMessage("oversized")
    envelope = _parse(_Envelope, raw)
    public, body = bytes.fromhex(envelope.key), envelope.body.encode()
    sender = peer_id(public)
    if peer not in (None, sender) or not verify(public, bytes.fromhex(envelope.signature), _SIGNED + body):
        raise BadMessage("forged")
    message = _parse(kind, body)
    if message.peer != sender:
        raise BadMessage("forged")
    if run not in (None, message.run):
        raise BadMessage("another run")
    if isinstance(message, Rollouts | Closing) and round not in (None, message.round):
        raise BadMessage("replayed")
    if isinstance(message, Rollouts):
        _keep_within(message, limits)
    return message


def _parse(kind: type[_Parsed], text: bytes) -> _Parsed:
    """By way of plain Python, where 4 MiB of JSON take 0.2 GB at worst: straight into a model they may take 1.3 GB."""
    try:
        content = from_json(text, allow_inf_nan=False)
    except ValueError:
        raise BadMessage(NOT_JSON) from None
    _KEYS.decode(text.decode())
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise BadMessage(_complaint(error)) from None


def _each_key_once(pairs: list[tuple[str, object]]) -> None:
    """Readers differ in which of two they take, so one signed text would be two messages."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise BadMessage("a key twice")


_KEYS = json.JSONDecoder(object_pairs_hook=_each_key_once, parse_int=len, parse_float=len)
"""of what is JSON: it keeps nothing, and raises where an object has a key twice"""


def _complaint(error: ValidationError) -> str:
    """What is wrong first. Names that the sender made up are not repeated: they may be of any length and script."""
    if error.error_count() > _MANY_ERRORS:  # listing them takes a second for every half million
        return "malformed: many fields"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    if place == ("version",):
        return "another version"
    unknown = ["unknown field"] if first["type"] == "extra_forbidden" else []
    ours = [str(part) for part in place if isinstance(part, int) or part in _OURS] + unknown
    return f"malformed: {'.'.join(ours) or 'contents'}"


def _keep_within(message: Rollouts, limits: Limits) -> None:
    if len(message.groups) > limits.groups:
        raise BadMessage("too many groups")
    for group in message.groups:
        if len(group.completions) > limits.completions:
            raise BadMessage("too many completions")
        for completion in group.completions:
            if len(completion.text) > limits.characters:
                raise BadMessage("too many characters")
            if len(completion.ids or ()) > limits.tokens:
                raise BadMessage("too many tokens")
