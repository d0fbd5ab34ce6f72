"""When all stages of a replica remember their state, and of which step they do. Pure.

A snapshot is of the beginning of a step. It is under way (pending) while its parities are sent, over so many steps, and
retained once the last of these is committed; only then the one before may go. Every side finds that out by itself, from
the steps that were begun and committed, so no message says it.
"""

from __future__ import annotations

from typing import NamedTuple


class Retention(NamedTuple):
    """How often a snapshot is begun, and over how many steps it is sent."""

    every: int
    """steps; 0: what is remembered is renewed with every commit, and nobody goes back"""
    slices: int = 1
    outlive: bool = False
    """is it also written to files in the machine's memory, which outlive the worker?"""

    @property
    def in_step(self) -> bool:
        return self.every == 0

    def steps_lost(self) -> float:
        """Steps that one failure costs on average, the half that is dropped included."""
        return 0.5 if self.in_step else self.slices + (self.every - 1) / 2 + 0.5


class Versions(NamedTuple):
    """Of which steps there are snapshots; -1 for none."""

    retained: int = -1
    pending: int = -1
    anew: bool = True
    """does one begin with the next step, whatever the interval? Some of those that took part in the last are new"""

    def begin(self, step: int, rule: Retention) -> Versions:
        """``step`` begins."""
        if rule.in_step or self.pending >= 0 or not (self.anew or step - self.retained >= rule.every):
            return self
        return Versions(self.retained, step, False)

    def completed(self, step: int, rule: Retention) -> bool:
        """Is a snapshot retained with the commit of ``step``? Perhaps of the same step again as the last one."""
        return rule.in_step or (self.pending >= 0 and step + 1 - self.pending >= rule.slices)

    def commit(self, step: int, rule: Retention) -> Versions:
        """``step``, which had begun, is committed."""
        if not self.completed(step, rule):
            return self
        return Versions(step + 1 if rule.in_step else self.pending, -1, False)

    def restart(self) -> Versions:
        """Some of those that take part are new: what was under way is not whole, what is retained stays."""
        return Versions(self.retained, -1, True)

    def slice(self, step: int) -> int:
        """Which slice of the pending snapshot is sent in ``step``, from 0; -1 for none."""
        return step - self.pending if self.pending >= 0 else -1
