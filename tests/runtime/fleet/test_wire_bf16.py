"""``pipeline.wire = "bf16"`` halves the bytes sent; processes and inline have equal losses, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import apart, ending, facts, inline, losses, outcomes, tiny, train, validation_losses
from planaria.control import decisions as d
from planaria.control.logs import RunRecord
from planaria.faults.trace import Fault
from planaria.pipeline.network.costs import message_bytes
from schedules import on_schedule, shape

BF16 = {"wire": "bf16"}
RECIPES: dict[str, dict[str, Any]] = {
    "redundant": {"recovery": {"strategy": "redundant"}},
    "swapped": {"routing": {"kind": "swapped"}, "recovery": {"strategy": "checkfree_plus"}},
    "skipping": {"routing": {"kind": "skipping", "skip": 0.5, "swaps": 1}},
}


def carried(record: RunRecord) -> int:
    return sum(sum(work.sent_bytes.values()) for _, work in record.worked)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", RECIPES)
def test_processes_train_as_inline_through_a_recovery(tmp_path: Path, name: str) -> None:
    config = tiny(tmp_path, steps=8, pipeline=BF16, train={"eval_every": 4}, **RECIPES[name])
    record = train(config, [Fault(step=3, stage=2, moment="backward", offset=0.5)])
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered"]
    assert (losses(record), validation_losses(record)) == inline(record), "not equal to the last bit"


@pytest.mark.slow
def test_replicas_and_schedules_train_as_inline(tmp_path: Path) -> None:
    settings, folder = shape(0.5), tmp_path / "schedule"
    settings["pipeline"] = {**settings.get("pipeline", {}), **BF16}
    replicas = tiny(tmp_path / "replicas", stages=1, steps=4, pipeline=BF16, exchange={"replicas": 2})
    for config in (replicas, on_schedule(tiny(folder, stages=4, steps=4, **settings), folder, True)):
        record = train(config)
        assert ending(record).outcome == "finished" and losses(record) == inline(record)[0]


def test_half_the_bytes_are_sent_as_the_planner_counts_them(tmp_path: Path) -> None:
    """The losses are near those of fp32, but not equal: both engines round."""
    whole, half = (
        train(tiny(tmp_path / wire, stages=2, steps=4, pipeline={"wire": wire})) for wire in ("fp32", "bf16")
    )
    assert carried(whole) == 2 * carried(half) > 0
    # Each of 4 microbatches crosses 3 edges forward and backward, in 4 steps.
    assert carried(half) == 4 * 4 * 6 * message_bytes(half.config.model, half.config.pipeline)
    assert len(facts(half, d.Commit)) == 4
    assert 0 < apart(losses(half), losses(whole)) < 1e-2
    assert losses(whole) == inline(whole)[0]
