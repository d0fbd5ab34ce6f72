"""Registrations of the other parts of planaria, such as ``lab``, with the core."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from planaria.config.shipped import PACKAGE


def registered_kinds(module: str) -> tuple[Any, ...]:
    """Return the ``KINDS`` of every ``PART/module.py``, in the order of the parts' names."""
    parts = sorted(file.parent.name for file in PACKAGE.glob(f"*/{module}.py"))
    return tuple(kind for part in parts for kind in import_module(f"planaria.{part}.{module}").KINDS)
