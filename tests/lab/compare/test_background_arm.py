"""Arms with background checkpoints: their costs, and the steps lost in rollbacks."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from benchmarks.rollback import rollback

from planaria.common.errors import UserError
from planaria.config import registry
from planaria.config.schema import RunConfig
from planaria.data.shards import Dataset
from planaria.lab.commands.advise import experience
from planaria.lab.compare.advice import FailureRate, candidates, predict
from planaria.lab.compare.clock import ArmClock, arm_clock
from planaria.lab.compare.race import ArmCourse, race
from planaria.lab.compare.rollback import rollback_mean
from planaria.models.families import stage_parameters
from planaria.recovery.checkpoint import best_steps
from planaria.runtime.prediction.copy_costs import state_bytes, step_bytes_and_memory
from planaria.runtime.resolved_run import ResolvedRun
from support.race_jobs import config

NETWORK = {
    "forward_s": [1.0], "backward_s": [2.0], "bandwidth": 1e9, "store_bandwidth": 1e5, "memory_bandwidth": 1e7,
    "hourly": 0.2,
}  # fmt: skip


def recipe(background: bool) -> RunConfig:
    return RunConfig.model_validate({"network": NETWORK, "checkpoint": {"background": background}})


def test_training_pauses_only_for_the_copy_and_the_upload_takes_several_steps() -> None:
    waiting, beside = arm_clock(recipe(False)), arm_clock(recipe(True))
    size = state_bytes(recipe(True)) * max(stage_parameters(recipe(True).model, 4, stage) for stage in (0, 1))
    assert (waiting.save_s, waiting.write_s, waiting.behind) == (pytest.approx(size / 1e5), 0.0, 0)
    assert (beside.save_s, beside.write_s) == (pytest.approx(size / 1e7), pytest.approx(size / 1e5))
    assert (beside.behind - 1) * beside.step_s < beside.write_s <= beside.behind * beside.step_s
    assert beside.load_s == waiting.load_s
    assert (
        step_bytes_and_memory(ResolvedRun(recipe(True)))[1]
        == step_bytes_and_memory(ResolvedRun(recipe(False)))[1] + 1.0
    )


def test_the_prediction_respects_the_delay_of_uploads() -> None:
    found = {}
    for name, way in candidates(recipe(False)).items():
        if name.startswith("checkpoint"):
            found[name] = predict(name, way, arm_clock(way), FailureRate(0.01, frozenset(range(5))), experience())
    waiting, beside = found["checkpoint"], found["checkpoint, in the background"]
    clock = arm_clock(recipe(True))
    assert beside.interval is not None and waiting.interval is not None
    assert clock.behind <= beside.interval and beside.certain
    chance = 1 - 0.99**5
    ticks = 300 * rollback_mean(beside.interval, chance, behind=clock.behind)
    each = clock.step_s / 2 + clock.load_s
    hours = (ticks * clock.step_s + ticks / beside.interval * clock.save_s + ticks * 0.01 * 5 * each) / 3600
    assert beside.hours.mean == pytest.approx(hours)
    assert best_steps(0.2, 5, clock.step_s, clock.save_s) <= best_steps(0.2, 5, clock.step_s, clock.write_s)


def test_each_registered_strategy_declares_the_variants_to_weigh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of an installed package needs no entry in a list of planaria."""
    (tmp_path / "weighed.py").write_text(
        "from planaria.recovery.checkfree import CheckFree\n\nclass Noisy(CheckFree):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {"noisy": EntryPoint("noisy", "weighed:Noisy", "planaria.recovery")}
    monkeypatch.setattr(registry, "_entry_points", lambda kind: points)
    assert {name: variant.recovery.strategy for name, variant in candidates(recipe(False)).items()} == {
        "checkpoint": "checkpoint",
        "checkpoint, in the background": "checkpoint",
        "checkfree": "checkfree, checkpoint",
        "checkfree_plus": "checkfree_plus, checkpoint",
        "echo (8 bits)": "echo, checkpoint",
        "echo (2 bits)": "echo, checkpoint",
        "redundant": "redundant, checkpoint",
        "redundant, gradients only": "redundant, checkpoint",
        "noisy": "noisy, checkpoint",
    }


@pytest.mark.parametrize("behind", [0, 1, 2, 3])
def test_a_race_rolls_back_to_the_predicted_step(tmp_path: Path, dataset: Dataset, behind: int) -> None:
    raced = config(tmp_path)
    raced = raced.model_copy(
        update={
            "recovery": raced.recovery.model_copy(update={"strategy": "checkpoint"}),
            "checkpoint": raced.checkpoint.model_copy(update={"every": 2, "background": behind > 0}),
            "train": raced.train.model_copy(update={"steps": 14}),
        }
    )
    struck = {3: [1], 8: [2], 9: [1]}
    course: ArmCourse = race(raced, dataset, struck, lambda tick, loss: None, behind)
    assert course.points, "the race was validated"
    reached = 14 - sum(met.steps_lost for met in course.loss_events)
    done = rollback(reached, 2, struck, behind=behind)
    assert (done.ticks, done.rollbacks) == (14, len(course.loss_events)) and done.saves == len(course.saved)


def test_uploads_that_take_time_need_steps_that_take_time() -> None:
    free = recipe(True).network.model_copy(update={"forward_s": [], "backward_s": [], "bandwidth": None})
    with pytest.raises(UserError, match=r"checkpoint\.background: .* set network\.forward_s"):
        arm_clock(recipe(True).model_copy(update={"network": free}))
    assert arm_clock(recipe(False).model_copy(update={"network": free})).step_s == 0.0


def test_hours_include_copies_but_not_uploads() -> None:
    clock = ArmClock(10.0, 1.0, 100.0, 0.0, 0.0, 1e9, write_s=95.0)
    course = ArmCourse(points=[], loss_events=[], ticks=20, saved=[10, 20])
    assert clock.behind == 10 and clock.seconds(course, 20, 1.0) == 202.0
