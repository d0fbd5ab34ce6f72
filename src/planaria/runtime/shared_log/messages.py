"""Messages between a quorum's holders and their clients, on connections whose ends have proved the run's key.

A client's greeting names the run and its holders; the holder answers it, and then each request. A message is a header
(JSON of bounded size) and a value, after the lengths of both.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import struct
import time
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from planaria.common.documents import first_error
from planaria.control.log.quorum import MAX_VALUE_BYTES, Answer, Enrolment, QuorumLocation, Request, Vote
from planaria.runtime.transport.secure import read_exactly

TRANSFER_S = 30.0
"""seconds for a message whose first bytes have arrived, and for an answer"""
_MAX_HEADER_BYTES = 1 << 13
_LENGTHS = struct.Struct("!II")
_Record = TypeVar("_Record", bound=BaseModel)
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Enrolment | Vote, Field(discriminator="kind")])
_ANSWER = TypeAdapter(Answer)


def greeting_of(location: QuorumLocation) -> bytes:
    """Return the greeting of a client, which the holder compares with its own."""
    holders = hashlib.sha256("\n".join(sorted(location.holders)).encode()).hexdigest()
    return json.dumps({"run": location.run, "holders": holders}).encode()


def send(tls: ssl.SSLSocket, message: Request | Answer, until: float) -> None:
    """Send a message.

    :raises OSError: if the connection breaks, or the other end does not read it by ``until`` (monotonic seconds).
    """
    header, value = message.model_dump_json().encode(), getattr(message, "value", b"")
    tls.settimeout(max(0.001, until - time.monotonic()))
    tls.sendall(_LENGTHS.pack(len(header), len(value)) + header)
    tls.sendall(value)


def receive_request(tls: ssl.SSLSocket, idle_s: float) -> Request:
    """Return the next request, for which the client may take ``idle_s``; errors as :func:`receive_answer`."""
    return _receive(tls, _REQUEST, time.monotonic() + idle_s, TRANSFER_S)


def receive_answer(tls: ssl.SSLSocket, until: float) -> Answer:
    """Return the answer to a request.

    :raises OSError: if the connection breaks, or the answer is incomplete at ``until`` (monotonic seconds).
    :raises ValueError: if the message is malformed or too long.
    """
    return _receive(tls, _ANSWER, until, None)


def _receive(tls: ssl.SSLSocket, kind: TypeAdapter[_Record], until: float, transfer_s: float | None) -> _Record:
    header, value = _LENGTHS.unpack(read_exactly(tls, _LENGTHS.size, until))
    if header > _MAX_HEADER_BYTES or value > MAX_VALUE_BYTES:
        raise ValueError(f"a message of {header} and {value} bytes")
    if transfer_s is not None:
        until = time.monotonic() + transfer_s
    try:
        record = kind.validate_json(read_exactly(tls, header, until))
    except ValidationError as error:
        raise ValueError(first_error(error)) from None
    return record.model_copy(update={"value": read_exactly(tls, value, until)} if value else {})
