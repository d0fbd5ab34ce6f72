"""Compiles what is asked a million times, where numba is installed (``planaria[planner]``).

Without it the same results come from plain Python, or from torch, much slower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from planaria.config import DataConfig
from planaria.data.cache import cache_folder

F = TypeVar("F", bound=Callable[..., object])
COMPILED = find_spec("numba") is not None


def compiled(function: F) -> F:
    """``function``, which takes and returns numbers, arrays and tuples of them only, as machine code (kept on disk).

    Nothing is rounded in another way, or added up in another order, than written.
    """
    if not COMPILED:
        return function
    import numba

    # numba looks at the file of a function to see whether its code is still good, not at those of the functions it
    # calls, whose code it holds too: so the folder's name depends on all of them.
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(_folder(Path(function.__code__.co_filename).parent))
    try:
        made: Any = numba.njit(cache=True, nogil=True)(function)
    finally:
        settings.CACHE_DIR = before
    return made  # type: ignore[no-any-return]


@lru_cache
def _folder(sources: Path) -> Path:
    """Of the code of functions in these ``sources``, which call only one another."""
    hashed = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(sources.glob("*.py"))))
    return cache_folder(DataConfig()) / "compiled" / hashed.hexdigest()[:16]
