"""How often to save, from what steps and saves turn out to take: measured once, after the run's first checkpoint."""

from __future__ import annotations

import statistics

from planaria.record import decisions as d
from planaria.record.events import IntervalChosen
from planaria.recovery.checkpoint import best_steps

PROBE = 10
"""steps before the checkpoint that is made to measure what one costs"""


class Cadence:
    """Watches decisions go by; proposes an interval once it has seen steps and a whole save."""

    def __init__(self, hourly: float, stages: int) -> None:
        """``hourly`` is the probability that one of the ``stages`` workers with a stage fails within an hour."""
        self._hourly, self._stages = hourly, stages
        self._began: tuple[str, float] | None = None
        self._steps: list[float] = []
        self._chosen = False

    def on_decision(self, t: float, decision: d.Decision) -> IntervalChosen | None:
        """The interval to keep from now on, at the end of the first save; nothing before and after."""
        if self._chosen:
            return None
        match decision:
            case d.RunStep(mode="train") | d.Save():
                if self._began and self._began[0] == "train":
                    self._steps.append(t - self._began[1])
                self._began = ("train" if isinstance(decision, d.RunStep) else "save", t)
            case d.Seal(partial=False) if self._began and self._began[0] == "save" and self._steps:
                self._chosen = True
                step_s, save_s = statistics.median(self._steps), t - self._began[1]
                steps = best_steps(self._hourly, self._stages, step_s, save_s)
                return IntervalChosen(steps=steps, step_s=step_s, save_s=save_s)
            case d.Form() | d.RunStep():
                self._began = None
        return None
