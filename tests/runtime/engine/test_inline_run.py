"""Runs on the inline engine: their logs, checkpoints, resumptions and rollbacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault, Trace
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.checkpoint.stage_file import read_stage, stage_file
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.run_start import START, Origin
from support.observer import Log, train_inline
from support.tiny_engine import Recipe

STAGES = range(5)


def run(config: RunConfig, folder: Path, *faults: Fault, origin: Origin = START) -> tuple[d.Finish, Log]:
    log = Log()
    config = config.model_copy(update={"engine": "inline"})
    return train_inline(prepare(config, trace=Trace(faults=faults)), folder, log, origin), log


def kill(step: int, stage: int) -> Fault:
    return Fault(step=step, stage=stage)


def saved(folder: Path) -> list[str]:
    return [s.folder.name for s in CheckpointStore(folder / "checkpoints").list()]


def resumed(folder: Path, step: int) -> Origin:
    name = f"step-{step:08d}"
    return Origin(step, 0, dict.fromkeys(STAGES, name))


def copy_checkpoint(source: Path, target: Path, step: int) -> None:
    """Make a folder with one checkpoint of another run."""
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)


def assert_same_files(home: Path, one: str, other: str, checkpoint: str) -> None:
    """Compare the checkpoint's stage files of two runs, byte for byte."""
    for stage in STAGES:
        first, second = (stage_file(home / run / "checkpoints" / checkpoint, stage) for run in (one, other))
        assert first.read_bytes() == second.read_bytes()


def all_of(log: Log, kind: type[Any]) -> list[Any]:
    return [fact for fact in log.facts if isinstance(fact, kind)]


@pytest.mark.parametrize("faults", [(), (kill(2, 2), kill(7, 3))], ids=["undisturbed", "with losses"])
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(
    faults: tuple[Fault, ...], config: Recipe, tmp_path: Path
) -> None:
    recipe = config(optim={"warmup": 3, "schedule": "cosine"}, checkpoint={"every": 5})
    ending, through = run(recipe, tmp_path / "through", *faults)
    assert ending == d.Finish(outcome="finished")
    copy_checkpoint(tmp_path / "through", tmp_path / "resumed", 5)
    ending, again = run(recipe, tmp_path / "resumed", *faults, origin=resumed(tmp_path, 5))
    assert ending == d.Finish(outcome="finished")
    assert again.losses() == {step: loss for step, loss in through.losses().items() if step >= 5}
    assert_same_files(tmp_path, "through", "resumed", "step-00000010")


def test_a_run_logs_the_same_as_a_fleet(config: Recipe, tmp_path: Path) -> None:
    recipe = config(train={"steps": 4, "eval_every": 2}, checkpoint={"every": 2, "keep": 1})
    _, log = run(recipe, tmp_path, kill(3, 2))
    assert isinstance(log.facts[0], e.RunStarted)
    reported = [(f.kind, f.step, f.mode) for f in log.facts if isinstance(f, d.RunStep)]
    assert reported == [
        ("run_step", step, mode)
        for step, mode in [
            (0, "evaluate"), (0, "train"), (1, "train"), (2, "evaluate"), (2, "train"), (3, "train"), (3, "train"),
            (4, "evaluate"),
        ]
    ]  # fmt: skip
    assert [f.step for f in all_of(log, d.Commit)] == [0, 1, 2, 3]
    assert [f.step for f in all_of(log, d.Seal)] == [2, 4]
    assert saved(tmp_path) == ["step-00000004"]
    assert [(f.step, f.node) for f in all_of(log, e.FaultInjected)] == [(3, 2)]
    validations = [f for f in all_of(log, e.StageReady) if f.mode == "evaluate"]
    assert [f.step for f in validations if f.loss is not None] == [0, 2, 4]
    rebuilt = read_stage(tmp_path / "checkpoints" / "step-00000004", 2, 4)
    assert (set(rebuilt.clocks.values()), rebuilt.lr_scale) == ({1}, 1.1)
    (whole,) = log.worked
    assert (whole.stage, whole.step, whole.device_peak_bytes) == (-1, 4, 0)
    assert 2**25 < whole.peak_bytes < 2**40, "torch alone is more; and not kilobytes for bytes"


@pytest.mark.parametrize("moment", ["any", "commit"])
@pytest.mark.parametrize("lost", [[2], [1, 2, 3], [*STAGES]], ids=["one", "neighbours", "all"])
def test_a_run_with_the_oracle_equals_one_without_failures(
    lost: list[int], moment: Any, config: Recipe, tmp_path: Path
) -> None:
    """The oracle restores the state that a worker had when it died."""
    _, free = run(config(), tmp_path / "free")
    faults = [Fault(step=step, stage=stage, moment=moment) for step in (3, 6) for stage in lost]
    ending, disturbed = run(config(recovery={"strategy": "oracle"}), tmp_path / "disturbed", *faults)
    assert ending == d.Finish(outcome="finished")
    assert len(all_of(disturbed, e.FaultInjected)) == len(faults)
    assert disturbed.losses() == free.losses()


def test_without_regular_checkpoints_the_last_state_is_saved(config: Recipe, tmp_path: Path) -> None:
    run(config(train={"steps": 2}), tmp_path)
    assert saved(tmp_path) == ["step-00000002"]


def test_a_failed_rebuild_ends_the_run_with_the_survivors_saved(config: Recipe, tmp_path: Path) -> None:
    ending, log = run(config(), tmp_path, kill(3, 2), kill(3, 3))
    assert ending.outcome == "cannot"
    assert "stages 2 and 3 are adjacent" in ending.reason
    assert log.facts[-1] == ending
    (partial,) = CheckpointStore(tmp_path / "checkpoints").list()
    assert (partial.folder.name, partial.manifest.stages) == ("step-00000003.partial", [0, 1, 4])


def test_a_resumed_run_skips_the_fault_that_ended_it(config: Recipe, tmp_path: Path) -> None:
    blows = kill(3, 1), kill(6, 2)
    run(config(), tmp_path, *blows)
    load = dict.fromkeys([0, 2, 3, 4], "step-00000003.partial")
    ending, log = run(config(), tmp_path, *blows, origin=Origin(3, 0, load, faults_injected=True))
    assert ending == d.Finish(outcome="finished")
    assert list(log.losses()) == list(range(3, 10))
    assert [f.step for f in log.facts if isinstance(f, e.FaultInjected)] == [6]


def record(config: RunConfig, folder: Path, log: Log) -> RunRecord:
    return RunRecord(folder, config, [(float(t), fact) for t, fact in enumerate(log.facts)], [], [])


def tries(log: Log) -> list[tuple[int, float]]:
    """(step, loss) of every training step that was carried out, in order."""
    return [(r.step, r.loss) for r in all_of(log, e.StageReady) if r.loss is not None and r.mode == "train"]


@pytest.mark.parametrize(("every", "back_to"), [(2, 2), (4, 0)], ids=["to a checkpoint", "to the beginning"])
def test_a_rollback_repeats_the_same_steps(every: int, back_to: int, config: Recipe, tmp_path: Path) -> None:
    recipe = config(train={"steps": 6}, checkpoint={"every": every}, recovery={"strategy": "checkpoint"})
    _, undisturbed = run(recipe, tmp_path / "undisturbed")
    ending, log = run(recipe, tmp_path / "disturbed", kill(3, 2), kill(3, 0))
    assert ending == d.Finish(outcome="finished")
    once = tries(undisturbed)
    assert tries(log) == once[:3] + once[back_to:], "the same losses, bit for bit"
    assert sorted((f.step, f.node) for f in log.facts if isinstance(f, e.FaultInjected)) == [(3, 0), (3, 2)]
    assert [f.step for f in log.facts if isinstance(f, d.Form) and f.outcome == "rolled back"] == [back_to]
    assert not prove_exactly_once(record(recipe, tmp_path, log))
    assert_same_files(tmp_path, "disturbed", "undisturbed", "step-00000006")


def test_a_rollback_follows_only_where_nothing_can_be_rebuilt(config: Recipe, tmp_path: Path) -> None:
    chain = {"strategy": "checkfree, checkpoint"}
    recipe = config(train={"steps": 6}, checkpoint={"every": 2}, recovery=chain)
    ending, log = run(recipe, tmp_path, kill(1, 2), kill(3, 2), kill(5, 1), kill(5, 3))
    assert ending == d.Finish(outcome="finished")
    assert [step for step, _ in tries(log)] == [0, 1, 2, 3, 4, 4, 5]
    assert [f.step for f in log.facts if isinstance(f, d.Form) and f.outcome == "rolled back"] == [4]
    assert not prove_exactly_once(record(recipe, tmp_path, log))


def test_a_resumed_run_rolls_back_no_further_than_its_start(config: Recipe, tmp_path: Path) -> None:
    recipe = config(train={"steps": 6}, checkpoint={"every": 3}, recovery={"strategy": "checkpoint"})
    _, through = run(recipe, tmp_path / "through")
    copy_checkpoint(tmp_path / "through", tmp_path / "resumed", 3)
    ending, log = run(recipe, tmp_path / "resumed", kill(5, 1), origin=resumed(tmp_path, 3))
    assert ending == d.Finish(outcome="finished")
    once = dict(tries(through))
    assert tries(log) == [(step, once[step]) for step in (3, 4, 3, 4, 5)]
    assert not prove_exactly_once(record(recipe, tmp_path, log))


def test_a_partly_resumed_run_rolls_missing_stages_back_to_the_seed(config: Recipe, tmp_path: Path) -> None:
    """Its newest checkpoint is partial: a stage that it lacks restarts after every rollback.

    An older whole checkpoint belongs to a past that the resumption has discarded.
    """
    recipe = config(train={"steps": 6}, recovery={"strategy": "checkpoint"})
    run(config(train={"steps": 6}, checkpoint={"every": 2}), tmp_path, kill(3, 1))
    assert saved(tmp_path) == ["step-00000002", "step-00000003.partial"]
    load = dict.fromkeys([0, 2, 3, 4], "step-00000003.partial")
    ending, log = run(recipe, tmp_path, kill(5, 0), origin=Origin(3, 0, load, faults_injected=True))
    assert ending == d.Finish(outcome="finished")
    again = tries(log)
    assert [step for step, _ in again] == [3, 4, 3, 4, 5]
    assert again[:2] == again[2:4]
