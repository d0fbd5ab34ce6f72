"""Which states of a run are on its surviving history, according to its log. Pure.

A run's history is what its log says was committed and not undone. Every generation continues from the step of its
``Form``, and every part of a run from its ``RunStarted``; either undoes all later steps. A snapshot in memory is
labelled with the generation whose commit completed it. So the log alone decides whether that snapshot may still be
used: it does not matter when its file was written, or whether its writer knew of the rollback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from planaria.record.decisions import Commit, Form
from planaria.record.started import RunStarted, SnapshotLabel

Turn = RunStarted | Form | Commit
"""the facts that begin, continue or undo steps"""


@dataclass
class Surviving:
    """The steps of each generation that no later rollback or resumption has undone."""

    _reached: dict[tuple[str, int], int] = field(default_factory=dict)
    """(part of the run, generation) → its last surviving step"""
    _now: tuple[str, int] = ("", -1)

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> Surviving:
        """Fold a run's log, oldest fact first; of several commits in a row, the last is enough."""
        found = cls()
        for turn in turns:
            found.take(turn)
        return found

    def take(self, turn: Turn) -> None:
        """Fold in the next fact."""
        match turn:
            case RunStarted():
                self._now = turn.part, turn.first_generation
                snapshot = turn.recalled_from
                self._reached = {} if snapshot is None else {(snapshot.part, snapshot.generation): snapshot.step}
            case Form():
                self._reached = {who: min(step, turn.step) for who, step in self._reached.items()}
                self._now = self._now[0], turn.generation
                self._reached[self._now] = turn.step
            case Commit():
                self._reached[self._now] = turn.step + 1

    def has(self, label: SnapshotLabel) -> bool:
        """Is the snapshot with this label of a state on the surviving history?"""
        return label.step <= self._reached.get((label.part, label.generation), -1)
