from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ObserveConfig
from planaria.report.observe.trackers import trackers
from planaria.report.observe.trackers.tensorboard import TensorBoard


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    tracker = TensorBoard()
    tracker.identify("0" * 32, {"train.steps": 3})
    tracker.open(tmp_path)
    for step in range(3):
        tracker.scalars(step, {"loss": 3.0 - step, "gradient/stage 1": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    # Depending on its version, TensorBoard migrates scalars to tensors while reading.
    assert {*events.Tags()["scalars"], *events.Tags()["tensors"]} == {
        "loss", "gradient/stage 1", "configuration",
    }  # fmt: skip
    (told,) = events.Tensors("configuration")
    assert b"| train.steps | 3 |" in told.tensor_proto.string_val[0]
    points = [(e.step, e.value) for e in events.Scalars("loss")]
    assert points == [(0, 3.0), (1, 2.0), (2, 1.0)]


def test_what_is_chosen_is_known_and_named_once() -> None:
    assert trackers(ObserveConfig()) == {"tensorboard": TensorBoard()} and not trackers(ObserveConfig(trackers=""))
    for config, line in (
        (ObserveConfig(trackers="tensorbord"), r"^observe\.trackers = 'tensorbord': no such choice; did you mean"),
        (ObserveConfig(trackers="tensorboard, tensorboard"), r"'tensorboard' is listed twice; remove one"),
        (ObserveConfig(options=Options({"flush_s": 1})), r"^observe\.options\.flush_s: no option of 'tensorboard'"),
    ):
        with pytest.raises(UserError, match=line):
            trackers(config)


@pytest.mark.slow
def test_reports_and_trackers_import_no_torch() -> None:
    run = "event_lines, recovery_timeline, ledger, stage_holders, report, perfetto"
    code = (
        "import sys; from planaria.control import logs; "
        "from planaria.report.observe import trackers, progress, prometheus; "
        f"from planaria.report.run import {run}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
