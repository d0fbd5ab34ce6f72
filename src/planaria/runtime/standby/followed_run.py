"""A run that a standby follows: the state from which it would continue, kept up to date while it waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Seal
from planaria.control.facts.events import ControllerEnd
from planaria.control.failover import MAX_FAILED_CONTROLLERS, FailoverFold, FailoverState
from planaria.control.log.reader import METRICS, LogFollower
from planaria.control.log.segments import RotatingLog
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.run_observer import ObserverState


class FollowedRun:
    """A run's log as far as it was read. A failover then reads its last lines only, however long the run is."""

    def __init__(self, folder: Path, config: RunConfig, display: NoProgress, measure: bool = False) -> None:
        """:param display: shows the run once it is led
        :param measure: write the measurements of its steps, which the folder lacks
        """
        self._log, self._fold = LogFollower(folder), FailoverFold()
        self._metrics = RotatingLog(folder / METRICS) if measure else None
        self.account = ObserverState(config.samples * config.model.context, display)
        self.saved = 0
        """number of checkpoints that were sealed"""

    @property
    def last_t(self) -> float:
        """Time of the last line."""
        return self._fold.last_t

    @property
    def begun(self) -> bool:
        """Whether the run has started."""
        return self._fold.begun

    def advance(self) -> None:
        """Read what is new.

        :raises UserError: naming file and line of a damaged line.
        """
        for t, fact in self._log.history():
            self._fold.take(t, fact)
            self.saved += isinstance(fact, Seal)
            metric = self.account.recall(t, fact)
            if metric is not None and self._metrics is not None:
                self._metrics.write(metric.model_dump_json())

    def lost(self, cause: ControllerEnd, noticed: float) -> FailoverState:
        """Read the last lines of a lost controller; return the state from which to continue.

        :param noticed: when the loss was noticed, monotonic seconds; 0: it happened before, at the last line of the log
        :raises UserError: if the run has not started, or too many controllers were lost within one step.
        """
        self.advance()
        if self._metrics is not None:
            self._metrics.close()
        folder = self._log.folder
        if not self.begun:
            raise UserError(f"{folder}: its controller was lost before the run started; start it again")
        failover = replace(self._fold.state(self._log.notice), cause=cause, noticed=noticed or self._fold.last_t)
        if failover.finish is None and failover.failed_controllers >= MAX_FAILED_CONTROLLERS:
            raise UserError(
                f"{folder}: {failover.failed_controllers} controllers in a row were lost within one step; "
                f"see its log, then `planaria train --resume {folder}`"
            )
        return failover
