"""Free memory of this machine, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""limit and usage, in version 2 and 1"""


def free_memory(meminfo: Path = Path("/proc/meminfo"), groups: Path = _GROUPS) -> int:
    """Return the bytes that new processes can use here, swap space included; 0 if the system does not report them."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        free = sum(int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError, IndexError):
        return 0
    return min([free, *_within_groups(groups)])


def _within_groups(groups: Path) -> Iterator[int]:
    """Yield what the limits of this process's control groups leave."""
    for limit, usage in _LIMITS:
        with suppress(OSError, ValueError):  # none, or "max"
            yield max(0, int((groups / limit).read_text()) - int((groups / usage).read_text()))
