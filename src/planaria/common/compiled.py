"""Compile functions that are called millions of times, if numba is installed (``planaria[planner]``).

Without numba the same results come from plain Python or torch, much slower.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from planaria.common.cache import cache_folder
from planaria.common.errors import UserError

F = TypeVar("F", bound=Callable[..., object])
COMPILED = find_spec("numba") is not None


def compile_function(function: F) -> F:
    """Return ``function`` as machine code; it takes and returns numbers, arrays and tuples of them only.

    Rounding and order of additions are as written. Machine code is cached on disk, below ``NUMBA_CACHE_DIR`` if set;
    without a writable folder every process compiles again. numba takes a second to import and is imported on the first
    call.
    """
    return cast(F, _Compiled(function)) if COMPILED else function


class _Compiled:
    """A function that is compiled when it, or a compiled caller, is first called."""

    def __init__(self, function: Callable[..., object]) -> None:
        update_wrapper(self, function)
        self.function = function

    @cached_property
    def machine(self) -> Any:
        """numba's dispatcher."""
        import numba

        dispatcher: Any = numba.njit(nogil=True)(self.function)
        folder = _folder(Path(self.function.__code__.co_filename).parent)
        if folder is not None:
            dispatcher._cache = _cache(self.function, folder)
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """The type that numba requests where a compiled function calls this one."""
        return self.machine._numba_type_

    def __call__(self, *arguments: object, **named: object) -> object:
        return self.machine(*arguments, **named)

    def __reduce__(self) -> str:
        return self.function.__qualname__


def _cache(function: Callable[..., object], folder: Path) -> Any:
    """Return a cache of machine code in ``folder``. An unreadable or unwritable file only causes a recompilation."""
    import numba

    caching: Any = import_module("numba.core.caching")

    class Cache(caching.FunctionCache):  # type: ignore[misc]
        def load_overload(self, *arguments: object) -> object:
            with suppress(OSError):
                return super().load_overload(*arguments)
            return None

        def save_overload(self, *arguments: object) -> None:
            with suppress(OSError):
                super().save_overload(*arguments)

    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(folder)
    try:
        return Cache(function)
    finally:
        settings.CACHE_DIR = before


@lru_cache
def _folder(sources: Path) -> Path | None:
    """Return a writable folder for machine code of functions in ``sources``, which call only each other, or None if
    there is none.

    numba checks whether a function's own file has changed, but not the files of functions that it calls and inlines. So
    the folder's name depends on all of them.
    """
    hashed = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(sources.glob("*.py"))))
    configured = os.environ.get("NUMBA_CACHE_DIR")
    try:
        root = Path(configured) if configured else cache_folder() / "compiled"
        folder = root / hashed.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, UserError):
        return None
    return folder
