"""Permission to import a module that a recipe, a run's folder or another machine names as ``module:Class``.

Importing a module runs its code. A process does so only with its user's permission: ``--allow-code`` on the command
line, ``allow_code=True`` in Python, or because the program has imported the module itself. Child processes on the same
machine inherit the permission. It is not stored: nothing in a run's folder, and no other machine, can grant it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from planaria.common.errors import UserError

FLAG = "--allow-code"


class Consent(NamedTuple):
    """The permission that a process hands to its children."""

    any_module: bool = False
    modules: frozenset[str] = frozenset()
    """modules that were imported with permission"""


NO_CONSENT = Consent()
_guard = threading.Lock()
_open = 0
"""contexts of :func:`permit_code` that are active"""
_modules: set[str] = set()


@contextmanager
def permit_code(code: bool = True) -> Iterator[None]:
    """Permit imports of any module in this process while the context is active; do nothing if ``code`` is false."""
    global _open
    with _guard:
        _open += code
    try:
        yield
    finally:
        with _guard:
            _open -= code


def require(module: str, setting: str) -> None:
    """Check that ``module``, which ``setting`` names, may be imported.

    :raises UserError: if it may not.
    """
    if not (_open or module in _modules or module in sys.modules):
        raise UserError(
            f"{setting}: neither planaria nor an installed package provides this class; if you trust the module "
            f"{module!r}, pass {FLAG} (in Python: allow_code=True)"
        )
    _modules.add(module)


def current_consent() -> Consent:
    """Return the permission of this process."""
    return Consent(_open > 0, frozenset(_modules))


def inherit(consent: Consent) -> None:
    """Add the permission of a parent process to that of this one, permanently."""
    global _open
    with _guard:
        _open += consent.any_module
        _modules.update(consent.modules)


def flags() -> list[str]:
    """Return the flags that hand this process's permission to a command that it starts."""
    return [FLAG] if any(current_consent()) else []
