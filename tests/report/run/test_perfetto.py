"""A run's trace keeps the format's rules, and its times are the log's."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from planaria.cli.entry import run as command
from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord, StepMetric
from planaria.control.log.writer import RunLog
from planaria.report.run.perfetto import trace_events, write_trace
from support.report.synthetic_run import Synthesis
from support.trace_rules import agrees_with_log, checked, named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Synthesis(tmp_path_factory.mktemp("run")).write()


def test_the_trace_keeps_the_rules_and_the_times(folder: Path) -> None:
    record = read_run(folder)
    events = list(trace_events(record))
    checked(events)
    agrees_with_log(record, events)
    assert set(named(events, "process_name").values()) == {"synthetic", "the run's own machines"}


def test_the_command_writes_it_plain_or_compressed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["report", str(folder), "--perfetto"]) == 0
    packed = folder / "perfetto.json.gz"
    assert capsys.readouterr().out.strip() == str(packed)
    plain = tmp_path / "trace.json"
    assert command(["report", str(folder), "--perfetto", "--to", str(plain)]) == 0
    reported = json.loads(plain.read_text())
    assert reported == json.loads(gzip.decompress(packed.read_bytes()))
    assert reported["traceEvents"] == list(trace_events(read_run(folder)))
    with pytest.raises(UserError, match="requires a report"):
        command(["report", str(folder), "--perfetto", "--csv", "x"])
    with pytest.raises(UserError, match=r"nowhere/trace\.json"):
        write_trace(folder, tmp_path / "nowhere" / "trace.json")
    assert not list(tmp_path.glob(".*"))


def test_concurrent_work_has_a_separate_row(folder: Path) -> None:
    """A file written during training is reported after later steps."""
    record = read_run(folder)
    (t, work), *_ = [(t, w) for t, w in record.worked if w.step == 3 and w.stage == 1]
    span = e.Span(action="write", start=work.spans[0].start - 0.01, end=work.spans[-1].end + 0.05)
    beside = work.model_copy(update={"spans": [span], "sent_bytes": {}})
    worked = sorted([*record.worked, (t + 1.0, beside)], key=lambda item: item[0])
    events = list(trace_events(RunRecord(folder, record.config, record.history, worked, record.metrics)))
    checked(events)
    (row,) = (named(events, "thread_name")[x["pid"], x["tid"]] for x in events if x["name"] == "write")
    assert row == f"{work.worker} in parallel 1"


def test_machines_are_processes_and_a_later_part_comes_later(tmp_path: Path) -> None:
    """The machine was restarted in between, which resets its clock."""
    (tmp_path / "config.json").write_text("{}")
    log = RunLog(tmp_path)
    started = e.RunStarted(name="x", seed=1, stages=1, steps=4, first_step=0, samples_per_step=8, wall_time=5000.0)
    again = started.model_copy(update={"first_step": 1, "first_generation": 1, "wall_time": 6000.0})
    for t0, begin, generation, step in ((900.0, started, 1, 0), (3.0, again, 2, 1)):
        log.event(t0, begin)
        for worker, host in (("w0", ""), ("w1", "far")):
            log.decision(t0 + 0.1, d.Spawn(worker=worker, incarnation=0, host=host))
        form = d.Form(generation=generation, step=step, outcome="started", members=[], links=[])
        log.decision(t0 + 0.2, form)
        for worker, stage in (("w0", 0), ("w1", 1)):
            span = e.Span(action="forward", start=t0 + 1, end=t0 + 2)
            work = e.WorkReport(worker=worker, node=stage, stage=stage, generation=generation, step=step, spans=[span],
                            sent_bytes={})  # fmt: skip
            log.worked(t0 + 2, work)
        log.decision(t0 + 3, d.Finish(outcome="stopped"))
    log.close()
    events = list(trace_events(read_run(tmp_path)))
    checked(events)
    starts = sorted((x["pid"], x["ts"]) for x in events if x["ph"] == "X")
    assert starts == [(2, 1e6), (2, 1001e6), (3, 1e6), (3, 1001e6)]
    assert named(events, "process_name") == {(1, 0): "run", (2, 0): "the run's own machines", (3, 0): "far"}


class Many(Sequence[Any]):
    """A lazy sequence."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count, self._make = count, make

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._count))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        return self._make(place)


def held_at_most(folder: Path, steps: int) -> int:
    """Return the peak bytes held while the trace of ``steps`` steps is written."""
    record = read_run(folder)
    span = e.Span(action="forward", microbatch=0, hop=1, start=2000.0, end=2000.5)

    def work(step: int) -> tuple[float, e.WorkReport]:
        own = span.model_copy(update={"start": 2000.0 + step, "end": 2000.5 + step})
        reported = {"worker": "w1", "node": 1, "stage": 1, "generation": 3, "dropped": False, "sent_bytes": {}}
        return 2001.0 + step, e.WorkReport.model_construct(**reported, step=step, spans=[own])

    def metric(step: int) -> StepMetric:
        return StepMetric.model_construct(t=2001.0 + step, step=step, loss=1.0, tokens_per_s=9.0, grad_norm={})

    long = RunRecord(folder, record.config, record.history, Many(steps, work), Many(steps, metric))
    tracemalloc.start()
    try:
        assert sum(event["ph"] in "XC" for event in trace_events(long)) == 3 * steps
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_run_needs_no_more_memory_than_a_short_one(folder: Path) -> None:
    assert held_at_most(folder, 2000) < 1.5 * held_at_most(folder, 200)
