"""Registration of features' sections and summary lines in a run's report; each feature owns a package."""

from __future__ import annotations

from collections.abc import Iterator

from planaria.control.log.run_record import RunRecord
from planaria.exchange.compress import compression_report
from planaria.exchange.robust import robust_report


def sections(record: RunRecord) -> Iterator[str]:
    """Yield the features' sections as HTML."""
    if record.config.exchange.coded:
        from planaria.exchange.coded import coded_report  # imports torch

        yield from coded_report.section(record)
    yield from robust_report.section(record)
    yield from compression_report.section(record)


def lines(record: RunRecord) -> Iterator[str]:
    """Yield the features' lines of text."""
    if record.config.exchange.coded:
        from planaria.exchange.coded import coded_report  # imports torch

        yield from coded_report.summary_lines(record)
    yield from compression_report.summary_lines(record)
