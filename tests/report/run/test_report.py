from __future__ import annotations

from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Cleared, SlowPartFound
from planaria.control.facts.events import RunStarted
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.report import page
from planaria.report.run import diagnosis, report
from planaria.report.run.event_lines import SIGNS, timed_lines
from planaria.report.run.figures import bytes_figure, loss_figure, recovery_figure
from planaria.report.run.gantt import death_figure, idle_fraction, ordinary_step, step_figure
from planaria.report.run.recoveries import recoveries
from planaria.report.run.report import wall_time, write_report
from planaria.runtime.preparation.run_start import provenance
from support.report.synthetic_run import MICROBATCHES, STAGES, Synthesis


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Synthesis(tmp_path_factory.mktemp("runs") / "x", rollbacks={27: 20}).write()


@pytest.fixture(scope="module")
def record(folder: Path) -> RunRecord:
    return read_run(folder)


def test_a_page_shows_provenance_and_speed(record: RunRecord) -> None:
    made = provenance()
    _, first = record.history[0]
    assert isinstance(first, RunStarted)
    reported = first.model_copy(update={"provenance": made, "wall_time": 1_790_000_000.0})
    parts, drawn = page.build_parts(
        report.body(replace(record, history=((0.0, reported), *record.history[1:]), _known={}))
    )
    printed = f"Started 2026-09-21 14:13 UTC with {made.version} on {made.machine}: {escape(made.command)}"
    assert printed in "".join(parts)
    assert len(drawn.figures["speed"].data[0].y) > 1


def test_repeated_slowness_is_one_line(record: RunRecord) -> None:
    link: dict[str, Any] = {"replica": 0, "fault": "slow link", "nodes": [1, 2]}
    once = {**link, "workers": ["a", "b"], "seconds": 0.1, "initial_s": 0.01, "peer_median_s": 0.01}
    again = [fact for step in (3, 7, 9) for fact in (SlowPartFound(step=step, **once), Cleared(step=step + 1, **link))]
    facts = (*record.history, *((99.0, fact) for fact in again))
    (line,) = diagnosis.summary_lines(replace(record, history=facts, _known={}))
    assert line.startswith("slow          3 times from step 3 to 10: the link 1 → 2 is slow")
    assert SIGNS["slow"] != SIGNS["fault"], "no signal was sent to it"


@pytest.mark.parametrize("name", ["<b>&worm</b>", "</script><script>alert(1)</script>"])
def test_a_workers_name_is_escaped(name: str, tmp_path: Path) -> None:
    synthesis = Synthesis(tmp_path, steps=3, deaths={1: 2})
    synthesis.holders[2] = name
    text = write_report(synthesis.write()).read_text()
    assert name not in text and escape(name) in text


def test_a_run_that_just_began_has_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(RunConfig().model_dump_json())
    text = write_report(tmp_path).read_text()
    assert "still running or killed" in text and "none needed" in text


def test_an_unwritable_path_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the report .*nowhere/r\.html cannot be written"):
        write_report(folder, tmp_path / "nowhere" / "r.html")


def test_the_ordinary_step_is_whole_and_of_median_duration(record: RunRecord) -> None:
    works = ordinary_step(record)
    assert {work.stage for work in works} == set(range(STAGES + 1))
    assert len({(work.generation, work.step, work.dropped) for work in works}) == 1
    backwards = [span for work in works for span in work.spans if span.action == "backward"]
    assert len(backwards) == MICROBATCHES * (STAGES + 2)
    assert 0.2 < idle_fraction(works) < 0.6


def test_the_gantt_draws_each_span_where_it_was(record: RunRecord) -> None:
    works = ordinary_step(record)
    bars = {trace.name: trace for trace in step_figure(works).data}
    assert set(bars) == {"forward", "backward", "optimizer"}
    assert min(bars["forward"].base) == 0
    total = sum(span.end - span.start for work in works for span in work.spans)
    assert sum(sum(trace.x) for trace in bars.values()) == pytest.approx(1000 * total)


def test_a_death_shows_dropped_work_links_and_moments(record: RunRecord) -> None:
    first = recoveries(record)[0]
    fig = death_figure(record, first)
    names = {trace.name for trace in fig.data}
    assert {"dropped", "relink, transfer, rebuild", "forward", "backward"} <= names
    rows = fig.layout.yaxis.categoryarray[::-1]
    assert list(rows).index("w5 · stage 2") == list(rows).index("w2 · stage 2") + 1
    flags = " ".join(note.text for note in fig.layout.annotations)
    assert "fault <b>0 ms" in flags and "noticed <b>41 ms" in flags and "first microbatch" in flags


def test_undone_steps_are_a_separate_curve(record: RunRecord) -> None:
    curves = {trace.name: trace for trace in loss_figure(record.metrics, timed_lines(record)).data}
    assert list(curves["training"].x) == list(range(40))
    assert list(curves["undone"].x) == list(range(20, 27))
    assert list(curves["fault"].x) == [12, 27]
    assert "SIGKILL" in curves["fault"].text[0]


def test_bytes_are_the_senders_sums(record: RunRecord) -> None:
    fig = bytes_figure(record)
    assert fig is not None
    drawn = sum(sum(trace.x) for trace in fig.data)
    assert drawn == pytest.approx(sum(sum(work.sent_bytes.values()) for _, work in record.worked) / 1e6)
    assert len(fig.data[0].y) == 2 * (STAGES + 1)


def test_recovery_bars_are_milliseconds(record: RunRecord) -> None:
    bars = {trace.name: list(trace.x) for trace in recovery_figure(recoveries(record)).data}
    assert bars["notice"] == pytest.approx([41.0, 41.0]) and bars["transfer"] == pytest.approx([62.0, 62.0], abs=2e-3)


def test_wall_time_leaves_out_the_pause_before_a_resumption(record: RunRecord) -> None:
    begin, end = record.history[0][0], record.history[-1][0]
    assert wall_time(record) == pytest.approx(end - begin)
    later = [(t + 500, fact) for t, fact in record.history]
    resumed = RunRecord(record.folder, record.config, [*record.history, *later], [], [])
    assert wall_time(resumed) == pytest.approx(2 * (end - begin))
