"""The greeting with which every connection to the controller or to a relay begins, once it is authenticated."""

from __future__ import annotations

import json
import os
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from planaria.common.documents import first

VISITOR, CALLED_FOR, FILES = 0, -1, -2
"""in place of an incarnation: a machine that wants to join; an end of an edge that is to be connected to the other; a
machine that asks for files"""


class Caller(NamedTuple):
    """A worker, or another caller as its incarnation says."""

    worker: Annotated[str, Field(max_length=1000)]
    incarnation: Annotated[int, Field(ge=FILES, lt=1 << 31)]
    pid: Annotated[int, Field(ge=0, lt=1 << 31)]


_CALLER: TypeAdapter[Caller] = TypeAdapter(Caller)


def greeting(worker: str, incarnation: int) -> bytes:
    """Return this process's greeting."""
    return json.dumps(Caller(worker, incarnation, os.getpid())).encode()


def greeted(raw: bytes) -> Caller:
    """Return the caller that a greeting names.

    :raises ValueError: when it is malformed.
    """
    try:
        return _CALLER.validate_json(raw, strict=True)
    except ValidationError as error:
        raise ValueError(first(error)) from None
