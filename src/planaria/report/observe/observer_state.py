"""State that a run's observer folds from its events."""

from __future__ import annotations

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import Metric
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.report_sampling import ReportSampling
from planaria.report.observe.tally import RunTally
from planaria.report.run.metrics import StepMetrics
from planaria.report.run.naming import Naming


class ObserverState:
    """Numbers of the display, tallies, metrics and names of a run.

    A standby maintains this state while it waits.
    """

    def __init__(self, tokens_per_step: int, progress: NoProgress) -> None:
        self.progress = progress
        self.tally, self.metrics = RunTally(), StepMetrics(tokens_per_step)
        self.naming, self.sampling = Naming(), ReportSampling()

    def recall(self, t: float, fact: e.Event | d.Decision) -> Metric | None:
        """Apply an event or decision of another controller; return the metrics that it completes."""
        if isinstance(fact, e.RunStarted):
            self.naming = Naming(fact)
        self.progress.recall(t, fact)
        self.tally.apply(t, fact)
        if isinstance(fact, d.Form):
            self.sampling.restart(fact.replica, fact.step)
        return self.metrics.apply(t, fact)
