"""Compiles what is asked a million times, where numba is installed (``planaria[planner]``).

Without it the same functions run as plain Python: the same results from the same moves, much slower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from planaria.config import DataConfig
from planaria.data.cache import cache_folder

F = TypeVar("F", bound=Callable[..., object])
COMPILED = find_spec("numba") is not None
SOURCES = ("tables.py", "evaluate.py", "anneal.py")
"""files of compiled functions, which call one another, and of what they take"""


def compiled(function: F) -> F:
    """``function``, which takes and returns numbers, arrays and tuples of them only, as machine code (kept on disk)."""
    if not COMPILED:
        return function
    import numba

    # numba looks at the file of a function to see whether its code is still good, not at those of the functions it
    # calls, whose code it holds too: so the folder's name depends on all of them.
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(_folder())
    try:
        made: Any = numba.njit(cache=True, nogil=True)(function)
    finally:
        settings.CACHE_DIR = before
    return made  # type: ignore[no-any-return]


def _folder() -> Path:
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    return cache_folder(DataConfig()) / "compiled" / hashlib.sha256(sources).hexdigest()[:16]
