"""State of one worker of the simulated fleet."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from planaria.config.schema import RecoveryConfig
from planaria.control.facts import decisions as d
from planaria.recovery.echo import Echo
from support.control.simulation import Worker

Gift = tuple[int, int, int]
"""generation, lost node, donor node or ``PREDECESSOR`` for the previous holder"""


def is_whole(config: RecoveryConfig, by: str, lost: int, steps: set[int]) -> bool:
    """Return whether a copy of stage ``lost`` is complete at its host, which has kept it through ``steps``."""
    if by == "echo":
        every = config.options.get("every", Echo().every)
        return {step % every for step in steps} == set(range(every))
    if by == "redundant" or (by == "checkfree_plus" and lost == 0):
        return bool(steps)
    return True  # the donor sends its own state


@dataclass
class FleetWorker(Worker):
    """A worker that knows its own state and the copies it keeps.

    ``updates`` counts the updates in its stage's state; None while it has none. ``kept`` maps other stages to the
    steps committed with them since this worker got its own state.
    """

    dedupes: bool = False
    """write no file for the last save, but report the digest of the weights"""
    updates: int | None = None
    kept: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    retains: int = -1
    """step of the last snapshot of which it has its part: its own state and others' parities"""
    pending: int = -1
    """step of the snapshot in progress"""
    anew: bool = True
    """start a snapshot with the next step"""
    others: set[int] = field(default_factory=set)
    wants: set[Gift] = field(default_factory=set)
    owes: list[d.Member] = field(default_factory=list)
    """nodes that rebuild their stage from this worker's state, once it has that"""
    writing: d.Save | None = None
    """save whose file its thread is writing"""
    copied: int = -1
    """stage in that file"""

    def begin(self, step: int, every: int) -> None:
        """Take part in a step, whether or not it is committed."""
        if every and self.pending < 0 and (self.anew or step - self.retains >= every):
            self.pending, self.anew = step, False

    def commit(self, step: int, every: int, slices: int) -> None:
        if not every:
            self.retains = step + 1
        elif self.pending >= 0 and step - self.pending == slices - 1:
            self.retains, self.pending = self.pending, -1
