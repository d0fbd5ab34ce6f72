"""A trace of faults, and the weights after it in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planaria.config.schema import RunConfig
from planaria.faults.trace import Fault
from support.live.harness import digests, in_one_process

STEPS = 12

FAULTS = [
    Fault(step=3, stage=2, moment="forward", offset=0.4),
    Fault(step=5, stage=3, moment="commit"),
    Fault(step=8, stage=2, moment="backward", offset=0.7),
]

STRATEGIES: dict[str, dict[str, Any]] = {
    "checkfree": {},
    "checkfree_plus": {"routing": {"kind": "swapped"}},
    "echo": {"recovery": {"options": {"bits": 8, "every": 2}}},
    "redundant": {},
    "snapshot": {},
    "checkpoint": {"checkpoint": {"every": 4}},
    "copy": {},
}


def digests_inline(config: RunConfig, faults: Sequence[Fault] = FAULTS, name: str = "inline") -> list[str]:
    """Train the same on the inline engine; return the digests of its last checkpoint."""
    return digests(in_one_process(config, faults, name).folder, STEPS)
