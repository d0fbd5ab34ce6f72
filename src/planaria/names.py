"""Names that a user gives, of runs, peers, experts and sources of text: each becomes a file or a folder."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from planaria.errors import UserError

RULE = "use 1 to 100 letters (a-z), digits, '-', '_' and '.', and begin with none of '-' and '.'"
KEY_RULE = "use 1 to 64 letters (a-z), digits, '-' and '_', and do not begin with '-'"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


def is_key(name: str) -> bool:
    """Return whether ``name`` can be a part of a dotted setting, such as a source in ``data.mixture``."""
    return _KEY.fullmatch(name) is not None


def require_name(name: str, setting: str) -> None:
    """:raises UserError: if ``name``, which ``setting`` gives, cannot be a name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{setting} {name!r}: not a valid name; {RULE}")


def from_file(stem: str) -> str:
    """Return the name of a recipe that is called ``stem`` and does not state one: other characters become '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-")[:100] or "run"


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "not a valid name; {rule}", {"rule": RULE})
    return name


def _key(name: str) -> str:
    if not is_key(name):
        raise PydanticCustomError("name", "not a valid name; {rule}", {"rule": KEY_RULE})
    return name


Name = Annotated[str, AfterValidator(_name)]
Key = Annotated[str, AfterValidator(_key)]
"""a name without dots, a part of a dotted setting"""
