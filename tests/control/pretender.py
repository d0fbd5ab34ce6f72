"""What one worker of the pretended fleet knows."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from planaria.config.schema import RecoveryConfig
from planaria.control import decisions as d
from planaria.recovery.echo import Echo

Gift = tuple[int, int, int]
"""generation, lost node, donor node or who stood there before"""


def is_whole(config: RecoveryConfig, by: str, lost: int, steps: set[int]) -> bool:
    """Can the host of a strategy's copy of the stage ``lost`` give it, having kept it through these ``steps``?"""
    if by == "echo":
        every = config.options.get("every", Echo().every)
        return {step % every for step in steps} == set(range(every))
    if by == "redundant" or (by == "checkfree_plus" and lost == 0):
        return bool(steps)
    return True  # it gives of its own


@dataclass
class Pretender:
    """One incarnation of a worker. ``updates`` counts the updates in its stage's state; None while it has none.

    ``kept`` has the committed steps that other stages took part in since it got its own: what it can know of them.
    """

    incarnation: int
    host: str = ""
    """a machine that has joined; empty for the run's own"""
    joined: bool = False
    node: int = -1
    stage: int = -1
    tells: bool = False
    """of the last save: does it write nothing, and tell the digest of its weights?"""
    generation: int = 0
    updates: int | None = None
    kept: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    retains: int = -1
    """the step of the last snapshot of which it has its part: its own state and others' parities"""
    pending: int = -1
    """that of the snapshot under way"""
    anew: bool = True
    """does one begin with the next step?"""
    others: set[int] = field(default_factory=set)
    wants: set[Gift] = field(default_factory=set)
    owes: list[d.Member] = field(default_factory=list)
    """nodes that rebuild their stage from what it has, once it has its own"""
    orders: deque[d.Order] = field(default_factory=deque)
    writing: d.Save | None = None
    """what it writes a copy for while it does other things"""
    copied: int = -1
    """the stage that the copy is of"""

    def begin(self, step: int, every: int) -> None:
        """It takes part in a step, whether that comes to anything or not."""
        if every and self.pending < 0 and (self.anew or step - self.retains >= every):
            self.pending, self.anew = step, False

    def commit(self, step: int, every: int, slices: int) -> None:
        if not every:
            self.retains = step + 1
        elif self.pending >= 0 and step - self.pending == slices - 1:
            self.retains, self.pending = self.pending, -1


DISK = "/disk"
"""after the name of a worker: the thread of it that writes"""
