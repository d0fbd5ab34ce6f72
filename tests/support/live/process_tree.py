"""Parents and descendants of this machine's processes."""

from __future__ import annotations

from pathlib import Path


def descendants(ancestor: int) -> set[int]:
    children, found = parents(), {ancestor}
    while more := {pid for pid, parent in children.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


def parents() -> dict[int, int]:
    """Process → its parent."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
    return found
