"""Totals of a complete record."""

from __future__ import annotations

from planaria.control.log.run_record import RunRecord
from planaria.report.observe.tally import RunTally
from planaria.report.run.naming import naming_of


def tally_of(record: RunRecord) -> RunTally:
    """Return the totals of a complete record."""
    tally = RunTally(naming_of(record))
    for _, work in record.worked:
        tally.apply_work_report(work)
    for t, fact in record.history:
        tally.apply(t, fact)
    for metric in record.metrics:
        tally.apply_metric(metric)
    return tally
