"""``planaria report``: the report of a folder as a page, and its numbers as CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from planaria.common import documents
from planaria.report import page
from planaria.runtime.engine import run_folders

PAGE, FIX = "report.html", "restore the file that planaria wrote"


class ReportPage(NamedTuple):
    """A report of any kind of folder."""

    file: Path
    """default path of its page"""
    write: Callable[[Path], Path]
    body: Callable[[], Iterator[str]]
    check: Callable[[], None] = lambda: None
    """raises LedgerError if samples of a run were lost or used twice"""


def report(run: Path, to: Path | None, csv: Path | None) -> Iterator[Path]:
    """Write the page of a run, swarm, comparison, drill, experts run or schedule, and its numbers into ``csv``.

    Yields the path of each written file.
    :raises UserError: if there is no such report, it is damaged, or a file cannot be written.
    :raises LedgerError: after writing, if samples of a run were lost or used twice.
    """
    reported_page = reported(run)
    yield reported_page.write(to or reported_page.file)
    if csv is not None:
        yield from page.write_sheets(csv, reported_page.body())
    reported_page.check()


def reported(run: Path) -> ReportPage:
    """Return the report of ``run``; UserError if there is none."""
    if run.is_file():
        return _schedule(run)
    if (run / "peers").is_dir():
        return _swarm(run)
    for name, kind in (("comparison.json", _comparison), ("drill.json", _drill), ("results.json", _experts)):
        if (run / name).is_file():
            return kind(run / name)
    return _run(run)


# Each kind imports its own modules: a run's report does not need torch.


def _run(run: Path) -> ReportPage:
    from planaria.control.log.logs import read_run
    from planaria.report.run.ledger import require_exactly_once
    from planaria.report.run.report import body, write_page

    if (run / run_folders.CONFIG).is_file():
        run_folders.verify_digests(run, run_folders.CONFIG)
    record = read_run(run)
    return ReportPage(
        run / PAGE,
        lambda to: write_page(record, to),
        lambda: body(record),
        lambda: require_exactly_once(record),
    )


def _schedule(file: Path) -> ReportPage:
    from planaria.planner.schedule import read
    from planaria.report.run.schedule_figures import step_of
    from planaria.report.run.schedule_page import body, write_page

    plan = read(file)
    return ReportPage(file.with_suffix(".html"), lambda to: write_page(plan, to), lambda: body(plan, step_of(plan)))


def _swarm(run: Path) -> ReportPage:
    from planaria.swarm.commands.swarm import recorded_outcome
    from planaria.swarm.report.swarm_report import body, write_swarm_report

    config, outcome = recorded_outcome(run)
    return ReportPage(
        run / PAGE,
        lambda to: write_swarm_report(run, config, outcome, to),
        lambda: body(run, config, outcome),
    )


def _comparison(file: Path) -> ReportPage:
    from planaria.lab.compare.race_results import ComparisonResults
    from planaria.lab.report.comparison import body, write_comparison

    results = documents.model(file, ComparisonResults, fix=FIX)
    return ReportPage(file.with_name(PAGE), lambda to: write_comparison(results, to), lambda: body(results))


def _drill(file: Path) -> ReportPage:
    from planaria.swarm.drill import Drill
    from planaria.swarm.report.drill_report import body, write_drill_report

    drill = documents.model(file, Drill, fix=FIX)
    return ReportPage(file.with_name(PAGE), lambda to: write_drill_report(drill, to), lambda: body(drill))


def _experts(file: Path) -> ReportPage:
    from planaria.lab.experts.experts_results import Results
    from planaria.lab.report.experts_report import body, write_experts_report

    results = documents.model(file, Results, fix=FIX)
    return ReportPage(file.with_name(PAGE), lambda to: write_experts_report(results, to), lambda: body(results))
