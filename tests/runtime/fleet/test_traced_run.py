"""A run of real processes of which one is killed: its trace, and what a tracker and /metrics are told of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from harness import assert_no_orphans, checked, folder_of, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import planaria
from planaria.report.live.tally import tally_of
from planaria.report.run.perfetto import write_trace
from planaria.report.run.recovery_timeline import recoveries
from trace_rules import checked as rules_kept
from trace_rules import told_as_logged


def test_a_kill_is_told_alike_by_the_log_the_trace_and_a_tracker(tmp_path: Path) -> None:
    trace = tmp_path / "kill.json"
    trace.write_text('{"version": 1, "faults": [{"step": 5, "stage": 2, "moment": "forward", "offset": 0.5}]}')
    config = tiny(tmp_path, steps=10, chaos={"trace": str(trace)}, checkpoint={"every": 4})
    planaria.train(config, progress=False)
    folder = folder_of(config)
    assert_no_orphans(folder)
    record = checked(folder)
    (timing,) = recoveries(record)
    assert timing.outcome == "recovered" and timing.fault_t is not None and timing.total is not None

    events = json.loads(gzip.decompress(write_trace(folder).read_bytes()))["traceEvents"]
    rules_kept(events)
    told_as_logged(record, events)
    kinds = {x["name"] for x in events if x["ph"] == "X"}
    assert {"forward", "backward", "optimizer", "save"} <= kinds

    tally = tally_of(record)
    curves = EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    (point,) = curves.Scalars("recovery_s")
    assert abs(point.value - timing.total) < 1e-5 * timing.total, "TensorBoard keeps 32 bits"
    last = {name: curves.Scalars(name)[-1].value for name in ("steps", "recoveries", "workers_lost", "generation")}
    assert last == {"steps": 10, "recoveries": 1, "workers_lost": 1, "generation": tally.generations[0]}
    assert (tally.recoveries, tally.lost.total(), tally.steps) == ({"recovered": 1}, 1, 10)
    assert 0 < curves.Scalars("sent_bytes")[-1].value <= tally.sent.total()
