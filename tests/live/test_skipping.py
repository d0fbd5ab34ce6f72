"""Training skips a lost stage while it has no worker, until the stage is restored; routes that skip stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.control.facts import decisions as d
from planaria.faults.trace import Fault
from support.live.harness import apart, ending, facts, inline, losses, outcomes, tiny, train

TOLERANCE = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (2, {}),
        (1, {"routing": {"kind": "swapped"}, "recovery": {"strategy": "checkfree_plus"}}),
        (4, {"recovery": {"strategy": "echo", "options": {"every": 2}}}),
        (3, {"recovery": {"strategy": "redundant"}}),
    ],
)
def test_steps_are_committed_while_a_stage_has_no_worker(tmp_path: Path, stage: int, settings: dict[str, Any]) -> None:
    recovery = settings.get("recovery", {}) | {"meanwhile": "skip"}
    config = tiny(tmp_path, steps=120, fleet={"spares": 0}, **(settings | {"recovery": recovery}))
    record = train(config, [Fault(step=6, stage=stage, moment="forward", offset=0.5)])
    assert outcomes(record) == ["started", "skipping", "recovered"] and ending(record).outcome == "finished"
    _, skipping, whole = facts(record, d.Form)
    assert {m.stage for m in skipping.members} == set(range(5)) - {stage}
    assert skipping.step == 6 and whole.step > 6, "nothing was trained without the stage"
    assert list(losses(record)) == list(range(120))
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


def test_stage_0_cannot_be_skipped(tmp_path: Path) -> None:
    settings = {"routing": {"kind": "swapped"}, "recovery": {"strategy": "checkfree_plus", "meanwhile": "skip"}}
    record = train(tiny(tmp_path, steps=12, fleet={"spares": 0}, **settings), [Fault(step=6, stage=0)])
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"


@pytest.mark.slow
def test_a_run_does_not_end_with_a_stage_missing(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=8, fleet={"spares": 0}, recovery={"meanwhile": "skip"})
    record = train(config, [Fault(step=6, stage=2, moment="forward")])
    assert outcomes(record) == ["started", "skipping", "recovered"] and ending(record).outcome == "finished"
    assert facts(record, d.Seal)[-1].stages == list(range(5))


@pytest.mark.parametrize(
    "routing",
    [
        {"kind": "skipping", "skip": 0.5, "swaps": 1},
        {"kind": "given", "routes": [[0, 1, 3, 0], [0, 2, 4, 0], [0, 2, 1, 0], [0, 3, 4, 0]]},
    ],
    ids=["drawn again in every step", "given"],
)
def test_routes_that_skip_stages_train_as_inline(tmp_path: Path, routing: dict[str, Any]) -> None:
    """With a death meanwhile. Each stage takes the mean over the microbatches that it saw."""
    record = train(tiny(tmp_path, steps=12, routing=routing), [Fault(step=6, stage=2, moment="forward")])
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered"]
    assert list(losses(record)) == list(range(12))
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE
