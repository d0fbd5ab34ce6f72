"""When each action of a plan ran, and what crossed the links: the result of simulating it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planaria.pipeline.plan.actions import Action, Key


class Timed(NamedTuple):
    """An action and the seconds, from the step's beginning, between which it ran."""

    key: Key
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """One simulated step."""

    step_s: float
    """seconds from the first action's start to the last one's end"""
    ran: dict[int, list[Action]]
    """what each stage did, in order of time"""
    starts: dict[int, list[float]]
    """when each of these actions began, in seconds from the step's beginning"""
    ends: dict[int, list[float]]
    """when each of these actions was done"""
    sent_bytes: dict[tuple[int, int], int]
    """bytes that crossed each link, by (sending stage, receiving stage)"""

    @property
    def spans(self) -> dict[int, list[Timed]]:
        """What each stage did and when, in order of time."""
        return {
            stage: [
                Timed(action.key, start, end)
                for action, start, end in zip(ran, self.starts[stage], self.ends[stage], strict=True)
            ]
            for stage, ran in self.ran.items()
        }

    @property
    def busy(self) -> dict[int, float]:
        """The fraction of the step that each stage computed."""
        whole = self.step_s or 1.0
        return {stage: (sum(self.ends[stage]) - sum(starts)) / whole for stage, starts in self.starts.items()}

    @property
    def idle(self) -> dict[int, float]:
        """The fraction of the step that each stage waited."""
        return {stage: 1.0 - fraction for stage, fraction in self.busy.items()}

    @property
    def bubble(self) -> float:
        """The mean idle fraction of the block stages; stage 0 stays out, as it may have nothing to compute."""
        blocks = [fraction for stage, fraction in self.idle.items() if stage]
        return sum(blocks) / len(blocks)
