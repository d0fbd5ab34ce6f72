"""What the strategy cannot rebuild ends the run with all it still has saved, or rolls it back: never silently."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import ending, facts, inline, losses, outcomes, reason, resume, tiny, train

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.faults.trace import Fault
from planaria.runtime.checkpoint.store import CheckpointStore

DONOR_DIES = [Fault(step=5, stage=2, moment="forward"), Fault(step=5, stage=3, moment="transfer")]


@pytest.mark.slow_after(1)
@pytest.mark.usefixtures("ground")
@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ([2, 3], "stages 2 and 3 are adjacent"),
        ([0], "the ends worker (stage 0)"),
        ([1], "stage 1 is the first block stage"),
        ([4], "stage 4 is the last block stage"),
    ],
)
def test_survivors_are_saved_and_the_lost_stages_go_on_from_the_seed(
    tmp_path: Path, lost: list[int], says: str
) -> None:
    record = train(tiny(tmp_path, fleet={"spares": 2}), [Fault(step=5, stage=stage) for stage in lost])
    assert ending(record).outcome == "cannot" and says in reason(record)
    assert facts(record, d.Cannot)[0].lost == lost
    (saved,) = CheckpointStore(record.folder / "checkpoints").list()
    assert saved.folder.name == "step-00000005.partial"
    assert saved.manifest.stages == [stage for stage in range(5) if stage not in lost]

    record = resume(record.folder)
    assert facts(record, e.RunStarted)[1].load == dict.fromkeys(saved.manifest.stages, saved.folder.name)
    assert ending(record).outcome == "finished" and list(losses(record)) == list(range(16))
    assert losses(record) == inline(record)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_lost_stages_go_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    config = tiny(tmp_path, checkpoint={"every": 3, "keep": 9})
    record = resume(train(config, [Fault(step=7, stage=2), Fault(step=7, stage=3)]).folder)
    whole, partial = "step-00000006", "step-00000007.partial"
    assert facts(record, e.RunStarted)[1].load == {0: partial, 1: partial, 2: whole, 3: whole, 4: partial}
    assert ending(record).outcome == "finished" and losses(record) == inline(record)[0]


@pytest.mark.usefixtures("ground")
def test_a_donor_that_dies_during_the_transfer_leaves_two_adjacent_stages_lost(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, fleet={"spares": 2}), DONOR_DIES)
    assert [f.moment for f in facts(record, e.FaultInjected)] == ["forward", "transfer"]
    assert outcomes(record) == ["started", "recovered"]
    assert ending(record).outcome == "cannot" and "stages 2 and 3 are adjacent" in reason(record)


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_with_rollback_the_whole_model_returns_to_its_checkpoint_and_trains_on(tmp_path: Path) -> None:
    settings = {"fleet": {"spares": 2}, "recovery": {"strategy": "checkfree, checkpoint"}, "checkpoint": {"every": 3}}
    record = train(tiny(tmp_path, **settings), DONOR_DIES)
    assert outcomes(record) == ["started", "recovered", "rolled back"]
    assert [form.step for form in facts(record, d.Form)] == [0, 5, 3] and ending(record).outcome == "finished"
    assert losses(record) == losses(train(tiny(tmp_path / "unharmed", **settings))), "a rollback leaves no trace"


@pytest.mark.slow
def test_a_rollback_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, recovery={"strategy": "checkfree, checkpoint"}), [Fault(step=5, stage=0)])
    assert outcomes(record) == ["started", "rolled back"] and facts(record, d.Form)[1].step == 0
    assert ending(record).outcome == "finished"
