"""Hot replicas as an arm: two copies share a step's samples, and a lost stage is copied from its twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.config import shipped
from planaria.config.schema import RunConfig
from planaria.data.shards import Dataset
from planaria.faults.trace import Fault, Trace
from planaria.lab.compare.clock import ArmClock, arm_clock, waiting_s
from planaria.lab.compare.race import ArmCourse, LossEvent, ValidationPoint, race
from planaria.lab.compare.race_results import score
from planaria.lab.compare.race_spec import Comparison, TraceSpec, load, trace_for, traces_for
from planaria.lab.compare.run_comparison import clock_config, resolve_arms
from support.exchange_recipes import recipe as clocked
from support.race_jobs import config, one

STEPS = 12
FIRST_OF_TWIN = 3
"""The twin's node of stage 0, with two block stages."""


def arm(folder: Path, replicas: int, strategy: str = "checkpoint", kind: str = "allreduce") -> RunConfig:
    """Return two microbatches a step, shared by ``replicas``."""
    plain = config(folder)
    return plain.model_copy(
        update={
            "pipeline": plain.pipeline.model_copy(update={"microbatches": 2 // replicas}),
            "exchange": plain.exchange.model_copy(update={"replicas": replicas, "kind": kind}),
            "recovery": plain.recovery.model_copy(update={"strategy": strategy}),
            "checkpoint": plain.checkpoint.model_copy(update={"every": 4}),
            "train": plain.train.model_copy(update={"steps": STEPS, "eval_every": 1}),
        }
    )


def raced(recipe: RunConfig, dataset: Dataset, faults: Mapping[int, Sequence[int]] | None = None) -> ArmCourse:
    return race(recipe, dataset, faults or {}, lambda tick, loss: None)


def losses(course: ArmCourse) -> list[float]:
    return [point.loss for point in course.points]


def test_without_failures_two_replicas_learn_like_one(tmp_path: Path, dataset: Dataset) -> None:
    alone, hot = (raced(arm(tmp_path, replicas), dataset) for replicas in (1, 2))
    assert len(losses(alone)) == STEPS and losses(alone)[-1] < losses(alone)[0]
    assert losses(hot) == pytest.approx(losses(alone), rel=1e-6)
    assert raced(arm(tmp_path, 2), dataset) == hot


def test_a_lost_stage_is_copied_from_its_twin(tmp_path: Path, dataset: Dataset) -> None:
    undisturbed = raced(arm(tmp_path, 2), dataset)
    struck = {2: [1], 5: [FIRST_OF_TWIN], 6: [0, 2, FIRST_OF_TWIN + 1], 9: [FIRST_OF_TWIN + 2]}
    course = raced(arm(tmp_path, 2), dataset, struck)
    assert [loss.outcome for loss in course.loss_events] == [
        "1: peer",
        "3: peer",
        "0: peer, 2: peer, 4: peer",
        "5: peer",
    ]
    assert [loss.stages for loss in course.loss_events] == list(struck.values())
    assert all(loss.moved_bytes > 0 and not loss.steps_lost for loss in course.loss_events)
    assert (course.points, course.ticks, course.stopped) == (undisturbed.points, STEPS, "")
    assert raced(arm(tmp_path, 2), dataset, struck) == course


def test_a_stage_lost_in_both_replicas_is_left_to_the_chain(tmp_path: Path, dataset: Dataset) -> None:
    both = {6: [1, 2, FIRST_OF_TWIN + 1]}
    back = raced(arm(tmp_path, 2), dataset, both)
    (loss,) = back.loss_events
    assert (loss.outcome, loss.rolled_back, loss.steps_lost) == ("all: step 4", True, 2)
    undisturbed = losses(raced(arm(tmp_path, 2), dataset))
    assert losses(back) == undisturbed[:6] + undisturbed[4 : STEPS - 2], "two steps are repeated"
    rebuilt = raced(arm(tmp_path, 2, "checkfree, random"), dataset, both)
    assert rebuilt.loss_events[0].outcome == "1: random, 2: peer, 4: random" and not rebuilt.loss_events[0].rolled_back
    stuck = raced(arm(tmp_path, 2, "checkfree"), dataset, {6: [0, FIRST_OF_TWIN]})
    assert stuck.stopped.startswith("tick 6: checkfree cannot") and stuck.ticks == 6


def test_further_replicas_fail_equally_often_and_the_first_is_unchanged() -> None:
    spec = TraceSpec(hourly=0.5, step_s=60.0, ends=True, adjacent_probability=0.3)
    comparison, recipe = Comparison.model_construct(trace=spec), RunConfig()
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 20_000})})
    first, second, third = traces_for(comparison, recipe, 7, 3)
    assert first == trace_for(comparison, recipe, 7) and first.generated is not None and first.generated.seed == 7
    assert second == trace_for(comparison, recipe, 7, 1) and len({first.faults, second.faults, third.faults}) == 3
    assert [len(second.faults), len(third.faults)] == pytest.approx([len(first.faults)] * 2, rel=0.1)
    assert {fault.stage for fault in second.faults} == set(range(5))
    assert trace_for(comparison, recipe, 8, 1).faults != second.faults
    still = comparison.model_copy(update={"trace": spec.model_copy(update={"hourly": 0.0})})
    assert len(traces_for(still, recipe, 7, 3)) == 1


def test_further_traces_affect_their_replicas_nodes_and_the_identity(
    tmp_path: Path,
    dataset: Dataset,
) -> None:
    plain = one(tmp_path, dataset)
    assert plain.lost_nodes_by_tick() == {3: [1]}
    twin = [Trace(faults=(Fault(step=3, stage=1), Fault(step=4, stage=0)))]
    hot = plain.model_copy(update={"replica_traces": twin})
    assert hot.lost_nodes_by_tick() == {3: [1, FIRST_OF_TWIN + 1], 4: [FIRST_OF_TWIN]}
    assert hot.identity() != plain.identity()
    spared = plain.model_copy(update={"faults": False})
    assert (
        spared.model_copy(update={"replica_traces": twin}).identity() == spared.identity()
        and not spared.lost_nodes_by_tick()
    )


def test_a_step_takes_half_the_microbatches_plus_the_wait_for_the_twin() -> None:
    hot, half, whole = (arm_clock(clocked(n, microbatches=m)) for n, m in ((2, 2), (1, 2), (1, 4)))
    assert hot.step_s == pytest.approx(half.step_s + waiting_s(clocked(2))) and half.step_s < whole.step_s
    assert (hot.workers, half.workers, whole.workers) == (6, 3, 3)
    lost = LossEvent(tick=3, stages=[1], outcome="1: peer", moved_bytes=100, rolled_back=False, steps_lost=0)
    assert hot.recovery_s(lost, 50.0) == pytest.approx(hot.step_s / 2 + 7.0 + 5.0)


def test_machine_hours_are_hours_times_machines() -> None:
    course = ArmCourse(
        points=[ValidationPoint(tick=n, step=n, loss=9.0 - n) for n in (1, 2, 3, 4)], loss_events=[], ticks=4, saved=[]
    )
    alone, twins = (
        ArmClock(step_s, 0.0, 0.0, 0.0, 0.0, 1.0, workers=count) for step_s, count in ((3600.0, 7), (1800.0, 14))
    )
    (run,) = score({1: course}, {1: course}, (alone, twins), {1: "d"}, 1.0, 1.0)
    assert (run.hours, run.machine_hours, run.hours_ratio) == (2.0, 28.0, 0.5)


def test_the_clock_counts_microbatches_in_proportion(tmp_path: Path) -> None:
    path = shipped.find("bursts")
    comparison, arms = load(path, {})
    found = {each.name: clock_config(path, comparison, each, arms[0].config) for each in arms}
    assert found["fault-free"].pipeline.microbatches == 16 == found["parity-2"].pipeline.microbatches
    assert found["hot-replicas"].pipeline.microbatches == 8 and found["hot-replicas"].exchange.replicas == 2
    (tmp_path / "odd.toml").write_text("pipeline = { stages = 6, microbatches = 3 }\nmodel = { layers = 6 }\n")
    odd = comparison.model_copy(update={"clock": str(tmp_path / "odd.toml")})
    hot = next(each for each in arms if each.name == "hot-replicas")
    with pytest.raises(UserError) as refused:
        clock_config(path, odd, hot, arms[0].config)
    message = str(refused.value)
    assert "compare.arms.hot-replicas: pipeline.microbatches = 2 of 4 are not a multiple of " in message
    assert message.endswith("odd.toml's 3; use another number, or another compare.clock")
    narrow = hot.config.model_copy(update={"model": hot.config.model.model_copy(update={"dim": 32})})
    with pytest.raises(UserError, match=r"compare\.arms\.hot-replicas\.model\.dim = 32: compare\.clock"):
        clock_config(path, comparison, hot.model_copy(update={"config": narrow}), arms[0].config)


@pytest.mark.parametrize("name", ["recovery", "pareto", "exchange", "bursts"])
def test_every_arm_of_a_shipped_comparison_is_supported(name: str) -> None:
    path = shipped.find(name)
    comparison, arms = load(path, {}, trace_overrides={"adjacent_probability": 0.25})
    assert comparison.trace.adjacent_probability == 0.25
    ready, clocks = resolve_arms(path, comparison, arms)
    assert [each.name for each in ready] == list(clocks) and len(ready) > 3
    saved = {each.name: each.config.checkpoint.every for each in ready}
    assert "best" not in saved.values()
    if name == "bursts":
        assert saved["hot-replicas"] == saved["parity-2-saved-rarely"] > 10 * int(saved["parity-2"])
