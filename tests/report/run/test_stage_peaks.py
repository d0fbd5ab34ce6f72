"""Peak memory of stages, from work reports."""

from __future__ import annotations

from pathlib import Path

from planaria.config.schema import RunConfig
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.report.run.report import body
from planaria.report.run.stage_peaks import StagePeak, section, stage_peaks, summary_lines
from support.report import synthetic_replicas as r
from support.report.synthetic_run import Synthesis

MB = 1_000_000


def work(node: int, worker: str, peak: int, device: int = 0) -> e.WorkReport:
    return e.WorkReport(
        worker=worker, node=node, stage=node, generation=1, step=0, spans=[], sent_bytes={}, peak_bytes=peak * MB,
        device_peak_bytes=device * MB,
    )  # fmt: skip


def record(*works: e.WorkReport) -> RunRecord:
    return RunRecord(Path("x"), RunConfig(), [], [(0.0, one) for one in works], [])


def test_the_highest_report_of_a_stage_counts() -> None:
    later = work(1, "a", 500), work(1, "b", 400), work(1, "a", 450), work(2, "c", 7)
    run = record(work(1, "a", 300), work(0, "ends", 900), *later)
    assert stage_peaks(run) == [
        StagePeak("stage 0 (ends)", 1, "ends", 900 * MB, 0),
        StagePeak("stage 1", 2, "a", 500 * MB, 0),
        StagePeak("stage 2", 1, "c", 7 * MB, 0),
    ]
    assert list(summary_lines(run)) == ["memory        at most 900 MB, at stage 0 (ends)"]


def test_device_memory_is_reported_if_there_is_a_device() -> None:
    run = record(work(1, "a", 300, 20_000), work(1, "a", 310, 10_000), work(2, "b", 900, 4))
    assert [one.device_bytes // MB for one in stage_peaks(run)] == [20_000, 4]
    assert list(summary_lines(run)) == ["memory        at most 310 MB, 20,000 MB on its device, at stage 1"]
    (html,) = section(run)
    assert html.count("<tr>") == 3 and ">20,000</td>" in html and ">4</td>" in html


def test_the_prediction_is_shown_with_the_peak() -> None:
    started = r.started(replicas=1).model_copy(
        update={"nodes_by_replica": [], "predicted_bytes": [n * MB for n in (7, 800, 9)]}
    )
    run = r.record(r.timed([started]), works=[work(1, "a", 640)])
    assert [(one.where, one.bytes // MB, one.predicted // MB) for one in stage_peaks(run)] == [("stage 1", 640, 800)]
    (html,) = section(run)
    assert "predicted, MB" in html and ">800</td>" in html


def test_one_process_is_one_line() -> None:
    assert [(one.where, one.bytes) for one in stage_peaks(record(work(-1, "inline", 640)))] == [
        ("all stages", 640 * MB)
    ]


def test_stages_of_replicas_are_distinguished() -> None:
    run = r.record(r.timed([r.started()]), works=[work(node, "abcdef"[node], 10 + node) for node in (0, 3)])
    assert [one.where for one in stage_peaks(run)] == ["replica 0 · stage 0", "replica 1 · stage 1"]


def test_a_log_of_an_older_planaria_has_no_such_section(tmp_path: Path) -> None:
    run = read_run(Synthesis(tmp_path / "x", steps=3, deaths={}).write())
    assert run.worked and not stage_peaks(run) and not [*section(run), *summary_lines(run)]
    assert "<h2>Memory</h2>" not in "".join(body(run))
