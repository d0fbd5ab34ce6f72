from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Commit
from planaria.control.facts.events import GraceExpired, RunStarted, Span, WorkerJoined, WorkReport
from planaria.control.log import reader
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import ROUTINE, StepMetric, StreamedSequence, ValidationMetric, without_kinds
from planaria.control.log.writer import RunLog
from planaria.report.run.report import write_report
from planaria.report.run.summary import summary
from support.report.synthetic_run import Synthesis


def empty_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(RunConfig(name="x").model_dump_json())
    return folder


STARTED = RunStarted(name="x", seed=1, stages=1, steps=9, first_step=0, samples_per_step=1, wall_time=0.0)


def begun(folder: Path) -> RunLog:
    """The log of a run that has just been started."""
    log = RunLog(empty_run(folder))
    log.event(0.5, STARTED)
    return log


def test_a_log_is_read_back(tmp_path: Path) -> None:
    folder = empty_run(tmp_path / "x")
    joined, commit = WorkerJoined(worker="w1", incarnation=2, pid=7), Commit(generation=1, step=3, progress=3)
    work = WorkReport(
        worker="w1", node=1, stage=1, generation=1, step=3, sent_bytes={2: 512},
        spans=[Span(action="forward", microbatch=0, hop=1, start=1.5, end=1.75)],
    )  # fmt: skip
    log = begun(folder)
    log.event(1.0, joined)
    log.decision(2.0, commit)
    log.worked(2.5, work)
    trained = StepMetric(t=3.0, step=3, loss=2.5, tokens_per_s=100.0, grad_norm={0: 0.5}, losses={0: 2.0, 1: 3.0})
    validated = ValidationMetric(t=3.5, step=4, val_loss=2.25)
    log.metric(trained)
    log.metric(validated)
    log.close()
    record = read_run(folder)
    assert record.config == RunConfig(name="x")
    assert record.history == [(0.5, STARTED), (1.0, joined), (2.0, commit)]
    assert record.worked == [(2.5, work)]
    assert record.metrics == [trained, validated]
    assert (list(record.trained), list(record.validated)) == ([trained], [validated])


def test_metrics_of_an_older_planaria_are_read(tmp_path: Path) -> None:
    """Their lines have no kind."""
    folder = empty_run(tmp_path)
    begun(folder).close()
    trained = {"t": 3.0, "step": 3, "loss": 2.5, "grad_norm": {"0": 0.5}, "tokens_per_s": 100.0}
    validated = {"t": 3.5, "step": 4, "val_loss": 2.25, "val_losses": {"0": 2.0, "1": 2.5}}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (trained, validated)))
    assert read_run(folder).metrics == [
        StepMetric(t=3.0, step=3, loss=2.5, grad_norm={0: 0.5}, tokens_per_s=100.0),
        ValidationMetric(t=3.5, step=4, val_loss=2.25, val_losses={0: 2.0, 1: 2.5}),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"kind": "guess", "t": 1.0, "step": 3}', "guess"),
        ('{"kind": "step", "t": 1.0, "step": 3, "val_loss": 2.0}', "step.loss: missing"),
        ('{"kind": "validation", "t": 1.0, "step": 3, "loss": 2.0}', "validation.val_loss: missing"),
        ("[3]", "discriminator"),
        ("3", "discriminator"),
    ],
)
def test_a_line_that_measures_nothing_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    folder = empty_run(tmp_path)
    begun(folder).close()
    (folder / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=rf"metrics\.jsonl:1: broken line \(.*{complaint}.*\); fix or remove it"):
        read_run(folder)


def test_lines_are_on_disk_before_close_and_have_the_documented_shape(tmp_path: Path) -> None:
    log = RunLog(empty_run(tmp_path))
    log.event(1.25, GraceExpired(generation=4))
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {
        "t": 1.25,
        "event": {"kind": "grace_expired", "replica": 0, "generation": 4},
    }
    log.close()


def test_a_younger_clock_after_a_reboot_keeps_the_files_order(tmp_path: Path) -> None:
    log = begun(tmp_path)
    for t, generation in ((900.0, 1), (901.0, 2), (5.0, 3)):
        log.event(t, GraceExpired(generation=generation))
    log.close()
    assert [fact.generation for _, fact in read_run(tmp_path).history if isinstance(fact, GraceExpired)] == [1, 2, 3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Synthesis(tmp_path_factory.mktemp("whole"), steps=3, deaths={1: 2}, faults_known=False).write()


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_log_cut_anywhere_reads_as_a_beginning_of_the_run(whole: Path, data: st.DataObject, tmp_path: Path) -> None:
    text = (whole / "events.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(text)))
    folder = empty_run(tmp_path)
    (folder / "events.jsonl").write_bytes(text[:cut])
    history = read_run(folder).history
    assert history == read_run(whole).history[: text[:cut].count(b"\n")]


def test_resuming_after_a_torn_line_does_not_glue_lines_together(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.event(1.0, GraceExpired(generation=1))
    log.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"t": 2.0, "ev')
    log = RunLog(tmp_path)
    log.event(3.0, GraceExpired(generation=2))
    log.close()
    assert [t for t, _ in read_run(tmp_path).history] == [0.5, 1.0, 3.0]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "", '{"t": 1.0}', '{"t": 1.0, "event": {"kind": "unheard_of"}}', '{"event": {"kind": "leave"}}'],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    empty_run(tmp_path)
    good = '{"t": 1.0, "event": {"kind": "grace_expired", "generation": 1}}'
    (tmp_path / "events.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError, match=r"events\.jsonl:2: ") as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: not a run \(no such folder\)"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"not a run \(no config\.json\)"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"colour": 3}')
    with pytest.raises(UserError, match=r"config\.json: colour: "):
        read_run(tmp_path)


def test_a_loss_that_is_not_a_number_is_kept(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.metric(StepMetric(t=1.0, step=0, loss=math.nan, tokens_per_s=0.0, grad_norm={0: math.inf}))
    log.close()
    (metric,) = read_run(tmp_path).trained
    assert math.isnan(metric.loss) and metric.grad_norm == {0: math.inf}


@pytest.mark.slow
def test_a_long_run_reads_as_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In segments and read again each time: the same facts, report and summary."""
    Synthesis(tmp_path / "one", deaths={12: 2, 27: 3}, rollbacks={27: 20}, name="run").write()
    Synthesis(tmp_path / "many", deaths={12: 2, 27: 3}, rollbacks={27: 20}, name="run", full=20_000).write()
    assert len(list((tmp_path / "many" / "segments").glob("events-*.jsonl.gz"))) == 4
    one = read_run(tmp_path / "one")
    monkeypatch.setattr(reader, "IN_MEMORY", -1)
    many = read_run(tmp_path / "many")
    assert isinstance(one.history, list) and isinstance(many.history, StreamedSequence)
    assert list(many.history) == one.history and len(many.history) == len(one.history)
    assert many.history[0] == one.history[0] and many.history[-1] == one.history[-1]
    assert list(many.turns) == list(one.turns) and many.landmarks == one.landmarks
    assert (list(many.worked), list(many.metrics)) == (one.worked, one.metrics)
    assert list(summary(many)) == list(summary(one))
    texts = [write_report(tmp_path / name).read_text().replace(f"from {name}", "") for name in ("one", "many")]
    assert texts[0] == texts[1]


def test_routine_facts_are_left_out_except_the_last_of_each_part(tmp_path: Path) -> None:
    """The last fact of each part of a run is kept, because its time is the part's end."""
    record = read_run(Synthesis(tmp_path, steps=3, deaths={}).write())
    start = record.history[0]
    commits = [reported for reported in record.history if isinstance(reported[1], Commit)]
    twice = [start, *record.history[1:-1], *commits, start, *commits]
    kept = list(without_kinds(twice, lambda reported: reported[1].kind, ROUTINE))
    assert kept[-1] == commits[-1] and kept[-2] == start and kept[-3] == commits[-1]
    assert not any(reported[1].kind in ROUTINE for reported in kept[:-3])
