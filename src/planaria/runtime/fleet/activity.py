"""What a process of this machine is doing, as the kernel tells: evidence about one that has not been heard of late."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Activity = Literal["stopped", "busy", "asleep", "unknown"]
"""stopped: none of its threads may run (SIGSTOP, a debugger); busy: at least one runs, waits for a processor, or for a
disk; asleep: all wait for something else; unknown: it is over, or elsewhere, or this system does not tell"""


def activity(pid: int | None) -> Activity:
    """What the threads of a process are doing at this moment."""
    states = set() if pid is None else {_state(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")}
    states -= {""}
    if not states or states & set("ZXx"):
        return "unknown"
    if states <= set("Tt"):
        return "stopped"
    return "busy" if states & set("RD") else "asleep"


def _state(stat: Path) -> str:
    """A thread's state, one letter; empty when it has ended meanwhile."""
    try:
        return stat.read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
