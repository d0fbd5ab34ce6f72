"""Messages as they lie on a board: each in an envelope that its sender signed.

An envelope is one JSON object: the sender's public key, the run and the place that the message is for, a signature, and
the body, which is itself JSON text. What is signed are run, place and the digest of that text as it stands, so nothing
depends on how JSON is laid out. Peers do not trust each other: whatever bytes arrive, :func:`unseal` gives a message
within its limits, or says in a word why not.
"""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from planaria.swarm.board.identity import Identity, peer_id
from planaria.swarm.board.limits import Limits
from planaria.swarm.board.message import (
    NOT_JSON,
    BadMessage,
    Closing,
    Completion,
    Goodbye,
    Group,
    Hello,
    Receipt,
    Rollouts,
    Rules,
)
from planaria.swarm.board.word import Hex32, Hex64, Hex128, Place, Proof, Said, Word, digest_of, say

_MANY_ERRORS = 100


class Envelope(Word):
    """A message as it lies on the board."""

    key: Hex64
    run: Hex32
    place: Place
    signature: Hex128
    body: str

    @property
    def said(self) -> Said:
        return Said(key=self.key, place=self.place, digest=digest_of(self.body), signature=self.signature)


_WORDS = (Envelope, Rules, Hello, Rollouts, Group, Completion, Goodbye, Closing, Receipt, Proof, Said)
_OURS = {name for word in _WORDS for name in word.model_fields}
Message = TypeVar("Message", Rules, Hello, Rollouts, Goodbye, Closing, Receipt)
_Parsed = TypeVar("_Parsed", bound=BaseModel)


def seal(identity: Identity, message: Rules | Hello | Rollouts | Goodbye | Closing | Receipt) -> bytes:
    """The envelope of a message; equal for equal messages.

    :raises ValueError: when the message is another peer's.
    """
    if message.peer != identity.peer:
        raise ValueError(f"{identity.peer} cannot speak for {message.peer}")
    body = message.model_dump_json()
    said = say(identity, message.run, message.place, body)
    envelope = Envelope(key=said.key, run=message.run, place=said.place, signature=said.signature, body=body)
    return envelope.model_dump_json().encode()


def unseal(raw: bytes, limits: Limits, kind: type[Message], **expected: str | None) -> Message:
    """The message of an envelope, whatever bytes it is; arguments and errors as of :func:`attest`."""
    return attest(raw, limits, kind, **expected)[0]


def attest(
    raw: bytes,
    limits: Limits,
    kind: type[Message],
    *,
    peer: str | None = None,
    run: str | None = None,
    place: str | None = None,
) -> tuple[Message, Said]:
    """The message of an envelope, and what proves that its sender said it. ``peer``, ``run`` and ``place``: what must
    be in it, if given.

    :raises BadMessage: "oversized"; "not JSON"; "a key twice"; "forged": not signed by ``peer``, or not by whom it
        names; "another version"; "another run"; "replayed": of another place; "too many …"; "malformed: " and the
        field.
    """
    if len(raw) > limits.message_bytes:
        raise BadMessage("oversized")
    envelope = _parse(Envelope, raw)
    sender, said = peer_id(bytes.fromhex(envelope.key)), envelope.said
    if peer not in (None, sender) or not said.stands(envelope.run):
        raise BadMessage("forged")
    message = _parse(kind, envelope.body.encode())
    if message.peer != sender:
        raise BadMessage("forged")
    if run not in (None, message.run) or envelope.run != message.run:
        raise BadMessage("another run")
    if place not in (None, message.place) or envelope.place != message.place:
        raise BadMessage("replayed")
    if isinstance(message, Rollouts):
        _keep_within(message, limits)
    return message, said


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
