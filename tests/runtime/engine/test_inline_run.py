from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from observer import Log, train_inline
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.faults.trace import Fault, Trace
from planaria.report.run.ledger import prove_exactly_once
from planaria.runtime.checkpoint.stage_file import read_stage, stage_file
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.engine.origin import START, Origin
from planaria.runtime.engine.prepare import prepare

Recipe = Callable[..., RunConfig]
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
    """A folder with nothing but one checkpoint of another run."""
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)


@pytest.mark.parametrize("faults", [(), (kill(2, 2), kill(7, 3))], ids=["untroubled", "with losses"])
def test_a_resumed_run_ends_bit_for_bit_like_one_that_went_through(
    faults: tuple[Fault, ...], config: Recipe, tmp_path: Path
) -> None:
    recipe = config(optim={"warmup": 3, "schedule": "cosine"}, checkpoint={"every": 5})
    ending, through = run(recipe, tmp_path / "through", *faults)
    assert ending == d.Finish(outcome="finished")
    copy_checkpoint(tmp_path / "through", tmp_path / "resumed", 5)
    ending, again = run(recipe, tmp_path / "resumed", *faults, origin=resumed(tmp_path, 5))
    assert ending == d.Finish(outcome="finished")
    assert again.losses() == {step: loss for step, loss in through.losses().items() if step >= 5}
    for stage in STAGES:
        ends = [stage_file(tmp_path / f / "checkpoints" / "step-00000010", stage) for f in ("through", "resumed")]
        assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_run_tells_what_a_fleet_would(config: Recipe, tmp_path: Path) -> None:
    recipe = config(train={"steps": 4, "eval_every": 2}, checkpoint={"every": 2, "keep": 1})
    _, log = run(recipe, tmp_path, kill(3, 2))
    assert isinstance(log.facts[0], e.RunStarted)
    told = [(f.kind, f.step, f.mode) for f in log.facts if isinstance(f, d.RunStep)]
    assert told == [
        ("run_step", step, mode)
        for step, mode in [
            (0, "evaluate"), (0, "train"), (1, "train"), (2, "evaluate"), (2, "train"), (3, "train"), (3, "train"),
            (4, "evaluate"),
        ]
    ]  # fmt: skip
    assert [f.step for f in log.facts if isinstance(f, d.Commit)] == [0, 1, 2, 3]
    assert [f.step for f in log.facts if isinstance(f, d.Seal)] == [2, 4]
    assert saved(tmp_path) == ["step-00000004"]
    faults = [(f.step, f.node) for f in log.facts if isinstance(f, e.FaultInjected)]
    assert faults == [(3, 2)]
    validations = [f for f in log.facts if isinstance(f, e.StageReady) and f.mode == "evaluate"]
    assert [f.step for f in validations if f.loss is not None] == [0, 2, 4]
    reborn = read_stage(tmp_path / "checkpoints" / "step-00000004", 2, 4)
    assert (set(reborn.clocks.values()), reborn.lr_scale) == ({1}, 1.1)
    (whole,) = log.worked
    assert (whole.stage, whole.step, whole.device_peak_bytes) == (-1, 4, 0)
    assert 2**25 < whole.peak_bytes < 2**40, "torch alone is more; and not kilobytes for bytes"


@pytest.mark.parametrize("moment", ["any", "commit"])
@pytest.mark.parametrize("lost", [[2], [1, 2, 3], [*STAGES]], ids=["one", "neighbours", "all"])
def test_with_the_oracle_a_run_is_the_run_without_failures(
    lost: list[int], moment: Any, config: Recipe, tmp_path: Path
) -> None:
    """The oracle restores the state that a worker had when it died."""
    _, free = run(config(), tmp_path / "free")
    faults = [Fault(step=step, stage=stage, moment=moment) for step in (3, 6) for stage in lost]
    ending, struck = run(config(recovery={"strategy": "oracle"}), tmp_path / "struck", *faults)
    assert ending == d.Finish(outcome="finished")
    assert len([f for f in struck.facts if isinstance(f, e.FaultInjected)]) == len(faults)
    assert struck.losses() == free.losses()


def test_without_regular_checkpoints_the_last_state_is_kept(config: Recipe, tmp_path: Path) -> None:
    run(config(train={"steps": 2}), tmp_path)
    assert saved(tmp_path) == ["step-00000002"]


def test_what_cannot_be_rebuilt_ends_the_run_with_the_survivors_saved(config: Recipe, tmp_path: Path) -> None:
    ending, log = run(config(), tmp_path, kill(3, 2), kill(3, 3))
    assert ending.outcome == "cannot"
    assert "stages 2 and 3 are adjacent" in ending.reason
    assert log.facts[-1] == ending
    (partial,) = CheckpointStore(tmp_path / "checkpoints").list()
    assert (partial.folder.name, partial.manifest.stages) == ("step-00000003.partial", [0, 1, 4])


def test_a_resumed_run_is_not_struck_by_the_blow_that_ended_it(config: Recipe, tmp_path: Path) -> None:
    blows = kill(3, 1), kill(6, 2)
    run(config(), tmp_path, *blows)
    load = dict.fromkeys([0, 2, 3, 4], "step-00000003.partial")
    ending, log = run(config(), tmp_path, *blows, origin=Origin(3, 0, load, struck=True))
    assert ending == d.Finish(outcome="finished")
    assert list(log.losses()) == list(range(3, 10))
    assert [f.step for f in log.facts if isinstance(f, e.FaultInjected)] == [6]


def record(config: RunConfig, folder: Path, log: Log) -> RunRecord:
    return RunRecord(folder, config, [(float(t), fact) for t, fact in enumerate(log.facts)], [], [])


def tries(log: Log) -> list[tuple[int, float]]:
    """(step, loss) of every training step that was carried out, in order."""
    reports = [fact for fact in log.facts if isinstance(fact, e.StageReady)]
    return [(r.step, r.loss) for r in reports if r.loss is not None and r.mode == "train"]


@pytest.mark.parametrize(("every", "back_to"), [(2, 2), (4, 0)], ids=["to a checkpoint", "to the beginning"])
def test_after_a_rollback_the_same_steps_come_again(every: int, back_to: int, config: Recipe, tmp_path: Path) -> None:
    recipe = config(train={"steps": 6}, checkpoint={"every": every}, recovery={"strategy": "checkpoint"})
    _, untroubled = run(recipe, tmp_path / "untroubled")
    ending, log = run(recipe, tmp_path / "struck", kill(3, 2), kill(3, 0))
    assert ending == d.Finish(outcome="finished")
    once = tries(untroubled)
    assert tries(log) == once[:3] + once[back_to:], "the same losses, bit for bit"
    assert sorted((f.step, f.node) for f in log.facts if isinstance(f, e.FaultInjected)) == [(3, 0), (3, 2)]
    assert [f.step for f in log.facts if isinstance(f, d.Form) and f.outcome == "rolled back"] == [back_to]
    assert not prove_exactly_once(record(recipe, tmp_path, log))
    for stage in STAGES:
        ends = [stage_file(tmp_path / f / "checkpoints" / "step-00000006", stage) for f in ("struck", "untroubled")]
        assert ends[0].read_bytes() == ends[1].read_bytes()


def test_only_what_nothing_else_can_rebuild_is_rolled_back(config: Recipe, tmp_path: Path) -> None:
    chain = {"strategy": "checkfree, checkpoint"}
    recipe = config(train={"steps": 6}, checkpoint={"every": 2}, recovery=chain)
    ending, log = run(recipe, tmp_path, kill(1, 2), kill(3, 2), kill(5, 1), kill(5, 3))
    assert ending == d.Finish(outcome="finished")
    assert [step for step, _ in tries(log)] == [0, 1, 2, 3, 4, 4, 5]
    assert [f.step for f in log.facts if isinstance(f, d.Form) and f.outcome == "rolled back"] == [4]
    assert not prove_exactly_once(record(recipe, tmp_path, log))


def test_a_resumed_run_does_not_roll_back_beyond_where_it_took_up(config: Recipe, tmp_path: Path) -> None:
    recipe = config(train={"steps": 6}, checkpoint={"every": 3}, recovery={"strategy": "checkpoint"})
    _, through = run(recipe, tmp_path / "through")
    copy_checkpoint(tmp_path / "through", tmp_path / "resumed", 3)
    ending, log = run(recipe, tmp_path / "resumed", kill(5, 1), origin=resumed(tmp_path, 3))
    assert ending == d.Finish(outcome="finished")
    once = dict(tries(through))
    assert tries(log) == [(step, once[step]) for step in (3, 4, 3, 4, 5)]
    assert not prove_exactly_once(record(recipe, tmp_path, log))


def test_a_stage_of_a_run_that_was_resumed_in_part_is_rolled_back_to_the_seed(config: Recipe, tmp_path: Path) -> None:
    """Its newest checkpoint is partial: a stage that it lacks begins anew, after every rollback.

    An older checkpoint, though whole, is of a past that the resumption has left behind.
    """
    recipe = config(train={"steps": 6}, recovery={"strategy": "checkpoint"})
    run(config(train={"steps": 6}, checkpoint={"every": 2}), tmp_path, kill(3, 1))
    assert saved(tmp_path) == ["step-00000002", "step-00000003.partial"]
    load = dict.fromkeys([0, 2, 3, 4], "step-00000003.partial")
    ending, log = run(recipe, tmp_path, kill(5, 0), origin=Origin(3, 0, load, struck=True))
    assert ending == d.Finish(outcome="finished")
    again = tries(log)
    assert [step for step, _ in again] == [3, 4, 3, 4, 5]
    assert again[:2] == again[2:4]
