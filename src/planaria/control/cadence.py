"""How often to save, from what steps and saves turn out to take: measured once, after the run's first checkpoint."""

from __future__ import annotations

import math
import statistics

from planaria.record import decisions as d
from planaria.record.events import IntervalChosen
from planaria.recovery.checkpoint import best_steps

PROBE = 10
"""steps before the checkpoint that is made to measure what one costs"""


class Cadence:
    """Watches decisions go by; proposes an interval once it has seen steps and a whole save.

    A save in the background costs what training stands still for it. But the next cannot begin before it is written.
    """

    def __init__(self, hourly: float, stages: int) -> None:
        """``hourly`` is the probability that one of the ``stages`` workers with a stage fails within an hour."""
        self._hourly, self._stages = hourly, stages
        self._began: tuple[str, float] | None = None
        self._steps: list[float] = []
        self._beside: tuple[float, float] | None = None
        """when a save in the background began, and for how long training stood still then"""
        self._chosen = False

    def on_decision(self, t: float, decision: d.Decision) -> IntervalChosen | None:
        """The interval to keep from now on, at the end of the first save; nothing before and after."""
        if self._chosen:
            return None
        match decision:
            case d.RunStep(mode="train") | d.Save():
                if self._began and self._began[0] == "train":
                    self._steps.append(t - self._began[1])
                if self._began and self._began[0] == "beside":
                    self._beside = self._began[1], t - self._began[1]
                saves = "beside" if isinstance(decision, d.Save) and decision.background else "save"
                self._began = ("train" if isinstance(decision, d.RunStep) else saves, t)
            case d.Seal(partial=False) if self._steps:
                return self._choice(t)
            case d.Form() | d.RunStep():
                self._began = None
        return None

    def _choice(self, t: float) -> IntervalChosen | None:
        """What follows from a save that ends now, if it was seen from its beginning."""
        step_s = statistics.median(self._steps)
        if self._began and self._began[0] in ("save", "beside"):  # no step was begun before it was written
            save_s, write_s = t - self._began[1], 0.0
        elif self._beside:
            save_s, write_s = self._beside[1], t - self._beside[0]
        else:
            return None
        self._chosen = True
        steps = max(best_steps(self._hourly, self._stages, step_s, save_s), math.ceil(write_s / step_s))
        return IntervalChosen(steps=steps, step_s=step_s, save_s=save_s, write_s=write_s)
