"""Signed envelopes of the messages on a board.

An envelope is one JSON object: the sender's public key, run, place, signature, and the body as JSON text. The signature
covers run, place and the digest of the body text, so it does not depend on JSON formatting. :func:`unseal` validates
arbitrary bytes.
"""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from planaria.swarm.board.claims import (
    Claim,
    Hex32,
    Hex64,
    Hex128,
    MessagePath,
    Proof,
    StrictModel,
    digest_of,
    sign_claim,
)
from planaria.swarm.board.identity import PeerIdentity, peer_id
from planaria.swarm.board.message import (
    NOT_JSON,
    BadMessage,
    Closing,
    Completion,
    Goodbye,
    Hello,
    ProblemCompletions,
    Receipt,
    Rollouts,
    RunRules,
)
from planaria.swarm.board.message_limits import LIMITS

_MANY_ERRORS = 100


class Envelope(StrictModel):
    """A signed message as stored on the board."""

    key: Hex64
    run: Hex32
    place: MessagePath
    signature: Hex128
    body: str

    @property
    def claim(self) -> Claim:
        return Claim(key=self.key, place=self.place, digest=digest_of(self.body), signature=self.signature)


_MESSAGES = (
    Envelope,
    RunRules,
    Hello,
    Rollouts,
    ProblemCompletions,
    Completion,
    Goodbye,
    Closing,
    Receipt,
    Proof,
    Claim,
)
_KNOWN_FIELDS = {name for message in _MESSAGES for name in message.model_fields}
Message = TypeVar("Message", RunRules, Hello, Rollouts, Goodbye, Closing, Receipt)
_Parsed = TypeVar("_Parsed", bound=BaseModel)


def seal(identity: PeerIdentity, message: RunRules | Hello | Rollouts | Goodbye | Closing | Receipt) -> bytes:
    """Return the signed envelope of a message; deterministic.

    :raises ValueError: if the message belongs to another peer.
    """
    if message.peer != identity.peer:
        raise ValueError(f"{identity.peer} cannot sign a message of {message.peer}")
    body = message.model_dump_json()
    claim = sign_claim(identity, message.run, message.place, body)
    envelope = Envelope(key=claim.key, run=message.run, place=claim.place, signature=claim.signature, body=body)
    return envelope.model_dump_json().encode()


def unseal(raw: bytes, kind: type[Message], **expected: str | None) -> Message:
    """Return the message of an envelope; arguments and errors as for :func:`unseal_with_claim`."""
    return unseal_with_claim(raw, kind, **expected)[0]


def unseal_with_claim(
    raw: bytes, kind: type[Message], *, peer: str | None = None, run: str | None = None, place: str | None = None
) -> tuple[Message, Claim]:
    """Return the message of an envelope and its signed claim. ``peer``, ``run`` and ``place`` are expected values.

    :raises BadMessage: "oversized"; "not JSON"; "a key twice"; "forged": the signature is invalid or of another peer;
        "another version"; "another run"; "replayed": from another place; "too many …"; "malformed: " and the field.
    """
    if len(raw) > kind.max_bytes:
        raise BadMessage("oversized")
    envelope = _parse(Envelope, raw)
    sender, claim = peer_id(bytes.fromhex(envelope.key)), envelope.claim
    if peer not in (None, sender) or not claim.is_valid(envelope.run):
        raise BadMessage("forged")
    message = _parse(kind, envelope.body.encode())
    if message.peer != sender:
        raise BadMessage("forged")
    if run not in (None, message.run) or envelope.run != message.run:
        raise BadMessage("another run")
    if place not in (None, message.place) or envelope.place != message.place:
        raise BadMessage("replayed")
    if isinstance(message, Rollouts):
        _check_limits(message)
    return message, claim


def _parse(kind: type[_Parsed], text: bytes) -> _Parsed:
    """Validate via plain Python objects: 4 MiB of JSON take at most 0.2 GB, against 1.3 GB straight into a model."""
    try:
        content = from_json(text, allow_inf_nan=False)
    except ValueError:
        raise BadMessage(NOT_JSON) from None
    _KEYS.decode(text.decode())
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise BadMessage(_describe_error(error)) from None


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> None:
    """Reject duplicate keys: JSON readers differ in which value they take."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise BadMessage("a key twice")


_KEYS = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys, parse_int=len, parse_float=len)
"""checks valid JSON for duplicate keys without keeping its values"""


def _describe_error(error: ValidationError) -> str:
    """Describe the first error without repeating names chosen by the sender."""
    if error.error_count() > _MANY_ERRORS:  # describing half a million errors takes a second
        return "malformed: many fields"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = first["loc"]
    if location == ("version",):
        return "another version"
    unknown = ["unknown field"] if first["type"] == "extra_forbidden" else []
    known = [str(part) for part in location if isinstance(part, int) or part in _KNOWN_FIELDS] + unknown
    return f"malformed: {'.'.join(known) or 'contents'}"


def _check_limits(message: Rollouts) -> None:
    if len(message.groups) > LIMITS.groups:
        raise BadMessage("too many groups")
    for group in message.groups:
        if len(group.completions) > LIMITS.completions:
            raise BadMessage("too many completions")
        for completion in group.completions:
            if len(completion.text) > LIMITS.characters:
                raise BadMessage("too many characters")
            if len(completion.ids or ()) > LIMITS.tokens:
                raise BadMessage("too many tokens")
