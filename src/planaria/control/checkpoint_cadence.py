"""Choice of the interval between checkpoints from the first steps of a run and its first save."""

from __future__ import annotations

import math
import statistics

from planaria.control.facts import decisions as d
from planaria.control.facts.events import IntervalChosen
from planaria.recovery.checkpoint import best_steps

PROBE = 10
"""number of steps before the checkpoint whose cost is measured"""


class CheckpointCadence:
    """Proposes a checkpoint interval after observing steps and one complete save.

    A background save costs the pause of training, but the next cannot start before it is written.
    """

    def __init__(self, hourly: float, stages: int) -> None:
        """:param hourly: probability that one of the ``stages`` workers with a stage fails within an hour."""
        self._hourly, self._stages = hourly, stages
        self._began: tuple[str, float] | None = None
        self._steps: list[float] = []
        self._background: tuple[float, float] | None = None
        """start of a background save, and the pause of training for it"""
        self._chosen = False

    def on_decision(self, t: float, decision: d.Decision) -> IntervalChosen | None:
        """Return the interval to use from now on, at the end of the first save; None otherwise."""
        if self._chosen:
            return None
        match decision:
            case d.RunStep(mode="train") | d.Save():
                if self._began and self._began[0] == "train":
                    self._steps.append(t - self._began[1])
                if self._began and self._began[0] == "background":
                    self._background = self._began[1], t - self._began[1]
                phase = "background" if isinstance(decision, d.Save) and decision.background else "save"
                self._began = ("train" if isinstance(decision, d.RunStep) else phase, t)
            case d.Seal(partial=False) if self._steps:
                return self._choice(t)
            case d.Form() | d.RunStep():
                self._began = None
        return None

    def _choice(self, t: float) -> IntervalChosen | None:
        """Return the interval after a save that ends now, if its start was observed."""
        step_s = statistics.median(self._steps)
        if self._began and self._began[0] in ("save", "background"):  # no step started before it was written
            save_s, write_s = t - self._began[1], 0.0
        elif self._background:
            save_s, write_s = self._background[1], t - self._background[0]
        else:
            return None
        self._chosen = True
        steps = max(best_steps(self._hourly, self._stages, step_s, save_s), math.ceil(write_s / step_s))
        return IntervalChosen(steps=steps, step_s=step_s, save_s=save_s, write_s=write_s)
