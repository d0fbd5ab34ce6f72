"""Losses that the strategy cannot rebuild, and other failures, end a run with its state saved and one clear line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.faults.trace import Fault
from planaria.runtime.checkpoint.store import CheckpointStore
from support.live.harness import ending, facts, folder_of, inline, losses, outcomes, reason, resume, tiny, train

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
def test_survivors_are_saved_and_lost_stages_resume_from_the_seed(tmp_path: Path, lost: list[int], says: str) -> None:
    record = train(tiny(tmp_path, fleet={"spares": 2}), [Fault(step=5, stage=stage) for stage in lost])
    assert ending(record).outcome == "cannot" and says in reason(record)
    assert facts(record, d.Unrecoverable)[0].lost == lost
    (saved,) = CheckpointStore(record.folder / "checkpoints").list()
    assert saved.folder.name == "step-00000005.partial"
    assert saved.manifest.stages == [stage for stage in range(5) if stage not in lost]

    record = resume(record.folder)
    assert facts(record, e.RunStarted)[1].checkpoint_of_stage == dict.fromkeys(saved.manifest.stages, saved.folder.name)
    assert ending(record).outcome == "finished" and list(losses(record)) == list(range(16))
    assert losses(record) == inline(record)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_lost_stages_resume_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    config = tiny(tmp_path, checkpoint={"every": 3, "keep": 9})
    record = resume(train(config, [Fault(step=7, stage=2), Fault(step=7, stage=3)]).folder)
    whole, partial = "step-00000006", "step-00000007.partial"
    assert facts(record, e.RunStarted)[1].checkpoint_of_stage == {
        0: partial,
        1: partial,
        2: whole,
        3: whole,
        4: partial,
    }
    assert ending(record).outcome == "finished" and losses(record) == inline(record)[0]


@pytest.mark.usefixtures("ground")
def test_a_donor_that_dies_during_its_transfer_leaves_two_adjacent_stages_lost(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, fleet={"spares": 2}), DONOR_DIES)
    assert [f.moment for f in facts(record, e.FaultInjected)] == ["forward", "transfer"]
    assert outcomes(record) == ["started", "recovered"]
    assert ending(record).outcome == "cannot" and "stages 2 and 3 are adjacent" in reason(record)


@pytest.mark.slow
@pytest.mark.usefixtures("ground")
def test_a_rollback_returns_the_whole_model_to_its_checkpoint(tmp_path: Path) -> None:
    settings = {"fleet": {"spares": 2}, "recovery": {"strategy": "checkfree, checkpoint"}, "checkpoint": {"every": 3}}
    record = train(tiny(tmp_path, **settings), DONOR_DIES)
    assert outcomes(record) == ["started", "recovered", "rolled back"]
    assert [form.step for form in facts(record, d.Form)] == [0, 5, 3] and ending(record).outcome == "finished"
    assert losses(record) == losses(train(tiny(tmp_path / "unharmed", **settings))), "a rollback leaves no trace"


@pytest.mark.slow
def test_a_rollback_without_a_checkpoint_restarts_the_run(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, recovery={"strategy": "checkfree, checkpoint"}), [Fault(step=5, stage=0)])
    assert outcomes(record) == ["started", "rolled back"] and facts(record, d.Form)[1].step == 0
    assert ending(record).outcome == "finished"


def test_a_port_in_use_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tiny(tmp_path, fleet={"port": port})
        with pytest.raises(UserError, match=rf"fleet\.port = {port}: cannot listen there .*; choose another port"):
            train(config)
    assert not (folder_of(config) / "workers").exists()


def test_a_loss_that_is_not_finite_ends_the_run_before_its_commit(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, optim={"lr": 1e30}))
    assert ending(record).outcome == "failed" and "optim.lr" in reason(record)
    assert all(commit.step < 16 for commit in facts(record, d.Commit))
    assert facts(record, e.WorkerFailed)[0].stage >= 0
