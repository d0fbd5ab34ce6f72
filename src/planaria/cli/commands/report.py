"""``planaria report``: a page, a trace, or the waiting times of a run, a comparison, a drill or a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from planaria.cli.flags import Run, command, flag, reject_flags, switch
from planaria.common.errors import UserError
from planaria.config import folders
from planaria.config.folders import PAGE, ReportPage

if TYPE_CHECKING:
    from planaria.report.run.diagnosis import Diagnosis
    from planaria.report.run.naming import Naming


@command("report")
def _report(
    run: Run,
    *,
    to: Annotated[Path | None, flag("FILE", "file to write (default: in the run's folder)")] = None,
    csv: Annotated[Path | None, flag("FOLDER", "also write every figure and table as a CSV file")] = None,
    perfetto: Annotated[
        bool, switch("--perfetto", "write a trace for ui.perfetto.dev instead (default RUN/perfetto.json.gz)")
    ] = False,
    waits: Annotated[
        bool, switch("--waits", "print the waiting times of a run's workers instead, and what is slow")
    ] = False,
) -> int:
    """Write a report of a run, comparison, drill or schedule; or a trace."""
    if perfetto or waits:
        reject_flags({"csv": csv}, f"requires a report; remove {'--perfetto' if perfetto else '--waits'}")
    if waits:
        reject_flags({"to": to, "perfetto": perfetto or None}, "cannot be combined with --waits, which only prints")
        print(diagnose(run))
    elif perfetto:
        from planaria.report.run.perfetto import write_trace

        print(write_trace(run, to))
    else:
        from planaria.report.page import write_sheets

        page = _report_page(run)
        print(page.write(to or page.file))
        for written in () if csv is None else write_sheets(csv, page.body()):
            print(written)
        page.check()
    return 0


def _report_page(run: Path) -> ReportPage:
    if run.is_file():
        return _schedule_report(run)
    kind = folders.kind_of(run)
    return _run_report(run) if kind is None else kind.report(run)


def _run_report(run: Path) -> ReportPage:
    from planaria.control.log.reader import read_run
    from planaria.report.run.report import body, write_page
    from planaria.report.run.sample_ledger import require_exactly_once
    from planaria.runtime.preparation import run_folders

    if (run / run_folders.CONFIG).is_file():
        run_folders.verify_digests(run, run_folders.CONFIG)
    record = read_run(run)
    return ReportPage(
        run / PAGE,
        lambda to: write_page(record, to),
        lambda: body(record),
        lambda: require_exactly_once(record),
    )


def _schedule_report(file: Path) -> ReportPage:
    from planaria.planner.schedule import read
    from planaria.report.run.schedule_figures import step_of
    from planaria.report.run.schedule_page import body, write_page

    plan = read(file)
    return ReportPage(file.with_suffix(".html"), lambda to: write_page(plan, to), lambda: body(plan, step_of(plan)))


def diagnose(folder: Path) -> str:
    """Return the diagnosis of a run as text; UserError if the folder is not a run, or has no measurements."""
    from planaria.control.facts import decisions as d
    from planaria.control.log.reader import read_run
    from planaria.report.run.diagnosis import diagnosis_of
    from planaria.report.run.naming import naming_of
    from planaria.report.run.slowness_lines import slow_part_sentence, slowness_line
    from planaria.runtime.preparation import run_folders

    record = read_run(folder)
    if record.config.engine == "inline":
        raise UserError(
            f"{folder}: its workers shared one process, so there are no timings of individual workers to diagnose"
        )
    diagnosed, naming = diagnosis_of(record), naming_of(record)
    if not diagnosed.now:
        if record.config.fleet.diagnose == "off":
            raise UserError(
                f"{folder}: no step has been measured (fleet.diagnose = 'off'); train with 'report' or 'act'"
            )
        raise UserError(
            f"{folder}: no step has been measured; workers report every second step (runs of older versions: never)"
        )
    live = "live" if run_folders.is_held(folder) else "not live"
    last = max(gauge.last.step for gauge in diagnosed.now.values())
    lines = [f"{folder}, step {last} ({live})", "", *_workers(diagnosed, naming), "", *_transits(diagnosed, naming), ""]
    responses = []
    for _, fact in record.landmarks:
        if isinstance(fact, d.SlowPartFound | d.HandOverSlowStage | d.Reroute | d.Cleared):
            responses.append(f"step {fact.step}  {slowness_line(fact, naming)}")
    slow = [slow_part_sentence(blamed, naming) for blamed in diagnosed.current]
    lines += ["Slow at present:", *(f"  {text}" for text in slow)] if slow else ["Nothing is slow at present."]
    return "\n".join(lines + (["", "Detected and done:", *(f"  {text}" for text in responses)] if responses else []))


def _workers(diagnosis: Diagnosis, naming: Naming) -> list[str]:
    """Return each worker's computing and waiting time, and the peer it waits for most."""
    lines = [f"{'':24}{'worker':8}{'passes':>12}{'at first':>12}{'computing':>12}{'waiting':>10}  mostly for"]
    for node, gauge in sorted(diagnosis.now.items()):
        last = gauge.last
        waits = max(last.waited, key=lambda peer: last.waited[peer], default=None)
        mostly = "" if waits is None else naming.name([waits])
        busy, waited = last.busy_s * last.steps / last.seconds, sum(last.waited.values()) / last.seconds
        lines.append(
            f"{naming.row(node):24}{gauge.worker:8}{1e3 * gauge.pass_s:9.1f} ms{1e3 * gauge.past_s:9.1f} ms"
            f"{busy:12.0%}{waited:10.0%}  {mostly}"
        )
    return lines


def _transits(diagnosis: Diagnosis, naming: Naming) -> list[str]:
    pairs = sorted((peer, node) for node, gauge in diagnosis.now.items() for peer in gauge.last.flows)
    lines = ["Activations, 25th and 95th percentile of their transit time:"]
    for source, target in pairs:
        flow = diagnosis.now[target].last.flows[source]
        low, high = 1e3 * flow.low_s, 1e3 * flow.high_s
        lines.append(f"  {naming.transit(source, target):24}{low:9.2f} ms{high:9.2f} ms  ({flow.frames} frames)")
    return lines
