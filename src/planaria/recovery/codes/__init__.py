"""Erasure codes: a registry of families behind one protocol (``base.Code``), and the layout of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planaria.config.registry import Registry
from planaria.recovery.codes.base import MAX_BYTES, MAX_SHARDS, Code, Family, LossError, refuse_sizes
from planaria.recovery.codes.layout import Layout
from planaria.recovery.codes.local import Local
from planaria.recovery.codes.reed_solomon import ReedSolomon, Xor
from planaria.recovery.codes.sparse import Sparse

__all__ = ["CODES", "MAX_BYTES", "MAX_SHARDS", "Code", "Family", "Layout", "LossError", "Sparse", "code"]

CODES: Registry[Family] = Registry(
    "code",
    "recovery.options.code",
    Family,  # type: ignore[type-abstract]
    {"xor": Xor, "reed_solomon": ReedSolomon, "local": Local},
)


def code(name: str, members: int, tolerate: int, options: Mapping[str, Any] | None = None) -> Code:
    """Return the code of a group by its name in a recipe: a family, a code file (.json), or ``auto``.

    ``auto`` is XOR for ``tolerate = 1`` and Reed–Solomon otherwise. ``options`` are the family's own (``group`` of
    ``local``).

    :raises UserError: for an unknown name or option, or a group that the code does not support.
    """
    refuse_sizes(members, tolerate)
    if name == "auto":
        name = "xor" if tolerate == 1 else "reed_solomon"
    if name.endswith(".json"):
        return Sparse(file=name).code(members, tolerate)
    return CODES.make(name, options or {}).code(members, tolerate)
