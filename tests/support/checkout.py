"""The files of a checkout, without those that tools create."""

from __future__ import annotations

import os
from pathlib import Path

_TOOLS = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", "build"}


def checkout_files(root: Path) -> dict[str, tuple[int, int]]:
    """Return the size in bytes and modification time in ns of each file below ``root``, by relative path."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _TOOLS and not name.endswith(".egg-info")]
        for name in files:
            path = Path(folder, name)
            status = path.lstat()
            found[str(path.relative_to(root))] = status.st_size, status.st_mtime_ns
    return found
