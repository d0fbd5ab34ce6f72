"""Erasure codes: a registry of families behind one protocol (``base.ErasureCode``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planaria.config.registry import Registry
from planaria.recovery.codes.base import CodeFamily, ErasureCode, require_valid_sizes
from planaria.recovery.codes.local import LocalCodes
from planaria.recovery.codes.reed_solomon import ReedSolomon, XorParity
from planaria.recovery.codes.sparse import SparseCode, parse_code, read_code

CODES: Registry[CodeFamily] = Registry(
    "code",
    "recovery.options.code",
    CodeFamily,  # type: ignore[type-abstract]
    {"xor": XorParity, "reed_solomon": ReedSolomon, "local": LocalCodes},
)


def make_code(name: str, members: int, tolerate: int, options: Mapping[str, Any] | None = None) -> ErasureCode:
    """Return the code that a recipe selects for a group: a family, ``auto``, a code file (.json) or its contents.

    ``auto`` is XOR for ``tolerate = 1`` and Reed–Solomon otherwise. ``options`` are the family's own (``group`` of
    ``local``).

    :raises UserError: for an unknown name or option, or a group that the code does not support.
    """
    require_valid_sizes(members, tolerate)
    if name == "auto":
        name = "xor" if tolerate == 1 else "reed_solomon"
    if name.startswith("{"):
        return SparseCode(file=parse_code(name)).code(members, tolerate)
    if name.endswith(".json"):
        return SparseCode(file=read_code(Path(name)), location=name).code(members, tolerate)
    return CODES.make(name, options or {}).code(members, tolerate)
