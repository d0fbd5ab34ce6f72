from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.models.llama_stages import Llama, global_name
from planaria.pipeline.routing import routes
from planaria.recovery.chain import ChainPlan
from planaria.recovery.checkfree import merge
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.learning_rate import learning_rate
from planaria.runtime.worker.runner import NonFinite, StageRunner
from support.schedules import on_schedule, shape
from support.tiny_engine import Recipe, engine_of, lose, losses, train_stream, whole


def pipeline_gradients(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients by global name of the engine's first step, before they are applied."""
    caught: dict[str, Tensor] = {}

    def commit(runner: StageRunner, step: int) -> None:
        for name, parameter in runner.parameters.items():
            known = global_name(config.model, config.pipeline.stages, runner.stage, name)
            assert known not in caught or torch.equal(caught[known], parameter.grad), "a stage's nodes disagree"
            caught[known] = parameter.grad.clone()

    monkeypatch.setattr(StageRunner, "commit", commit)
    return engine_of(config).train_step().loss, caught


def plain_gradients(config: RunConfig, orders: Sequence[Sequence[int]]) -> tuple[float, dict[str, Tensor]]:
    """Return the same for the whole model, by ordinary backpropagation over the same samples.

    Microbatch i goes through the block stages in the order ``orders[i]``.
    """
    stream = train_stream(config)
    model = Llama(config.model, config.pipeline.stages, seed=config.seed)
    losses = []
    for i, order in enumerate(orders):
        tokens, targets = stream.batch(i * config.pipeline.microbatch_size, config.pipeline.microbatch_size)
        x = model.ends.embed(tokens)
        for stage in order:
            x = model.stages[stage - 1](x)
        losses.append(model.ends.loss(x, targets))
    loss = torch.stack(losses).mean()
    loss.backward()
    model.ends.fold_gradients()
    gradients = {}
    for stage, part in enumerate((model.ends, *model.stages)):
        for name, parameter in part.named_parameters():
            gradients[global_name(config.model, len(model.stages), stage, name)] = parameter.grad
    return loss.item(), gradients


def same_gradients(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("in_flight", [1, 2, 3, None])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_backpropagation_through_the_whole_model(
    tied: bool, order: str, in_flight: int | None, config: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = config(model={"tied": tied}, pipeline={"order": order, "in_flight": in_flight}, optim={"clip": 0.0})
    same_gradients(pipeline_gradients(recipe, monkeypatch), plain_gradients(recipe, [(1, 2, 3, 4)] * 4))


@pytest.mark.parametrize(
    ("stages", "crossed"), [(4, (2, 1, 4, 3)), (6, (2, 1, 3, 4, 6, 5))], ids=["pairs only", "middle stages"]
)
def test_gradients_of_swapped_routes_equal_backpropagation(
    stages: int, crossed: tuple[int, ...], config: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = {"stages": stages, "microbatches": 3}
    recipe = config(model={"layers": stages}, pipeline=pipeline, routing={"kind": "swapped"}, optim={"clip": 0.0})
    orders = [range(1, stages + 1), crossed, range(1, stages + 1)]
    same_gradients(pipeline_gradients(recipe, monkeypatch), plain_gradients(recipe, orders))


def test_gradients_do_not_depend_on_the_order_of_work(config: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: every stage sums microbatches in their own order, whichever was ready first."""
    plans = [{"order": order, "in_flight": n} for order in ("1f1b", "gpipe") for n in (1, 2, 4)]
    found = [pipeline_gradients(config(pipeline=plan), monkeypatch) for plan in plans]
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(gradients[name], tensor) for name, tensor in found[0][1].items())


def test_the_same_run_twice_is_the_same_bit_for_bit(config: Recipe) -> None:
    runs = [engine_of(config()) for _ in range(2)]
    torch.manual_seed(77)  # whatever the process did before must not matter
    assert losses(runs[0], 6) == losses(runs[1], 6)
    assert whole(runs[0]) == whole(runs[1])


@pytest.mark.slow
def test_losses_do_not_depend_on_the_cut(config: Recipe) -> None:
    # Clipping is per stage, so it is the one thing that the cut may change.
    cuts = [losses(engine_of(config(pipeline={"stages": stages}, optim={"clip": 0.0})), 6) for stages in (1, 2, 4)]
    for cut in cuts[1:]:
        assert cut == pytest.approx(cuts[0], abs=1e-6)


GOLDEN = [5.4742489, 5.3566136, 5.1529903, 4.9114842, 4.6485767, 4.3863516, 4.1884184, 4.0279961, 3.9208202, 3.8685756]


def test_golden_losses(config: Recipe) -> None:
    """A change of these numbers is a change of the algorithm: document it, and update them."""
    recipe = config(optim={"warmup": 3, "schedule": "cosine", "weight_decay": 0.1, "clip": 0.5})
    assert losses(engine_of(recipe), 10) == pytest.approx(GOLDEN, rel=1e-5)


@pytest.mark.slow
def test_training_learns_and_validation_changes_nothing(config: Recipe) -> None:
    engine, undisturbed = engine_of(config()), engine_of(config())
    first = engine.evaluate()
    assert first == pytest.approx(math.log(257), abs=0.1)  # knows nothing yet
    before = whole(engine)
    assert engine.evaluate() == first
    assert whole(engine) == before
    trained = losses(engine, 10)
    assert trained == losses(undisturbed, 10)
    assert engine.step == 10
    assert engine.evaluate() < first - 1.0


def test_every_stage_clips_its_gradient_in_a_step(config: Recipe) -> None:
    engine = engine_of(config(optim={"clip": 0.01}))
    assert engine.train_step().step == 0
    assert engine.runners.keys() == set(range(5))
    for runner in engine.runners.values():
        assert runner.grad_norm is not None and runner.grad_norm > 0.01
        assert runner.clipped_norm == 0.01


def test_a_lost_stage_is_rebuilt_by_the_formula(config: Recipe) -> None:
    engine = engine_of(config())
    losses(engine, 3)
    before = whole(engine)
    one, other = (engine.runners[stage].state() for stage in (1, 3))
    expected = merge(one.weights, other.weights, one.grad_norm**2, other.grad_norm**2)
    assert lose(engine, 2) == ChainPlan({2: ("checkfree", (1, 3))}, rollback=None, reason="")
    rebuilt = engine.runners[2].state()
    assert rebuilt.weights.keys() == expected.keys()
    assert all(torch.equal(rebuilt.weights[name], tensor) for name, tensor in expected.items())
    assert (rebuilt.moments, rebuilt.clocks, rebuilt.lr_scale) == ({}, {}, 1.1)
    assert (rebuilt.grad_norm, rebuilt.clipped_norm) == (None, None)
    after = whole(engine)
    assert {s: after[s] for s in after if s != 2} == {s: before[s] for s in before if s != 2}
    assert engine.step == 3


def test_a_rebuilt_stage_has_a_tenth_higher_learning_rate(config: Recipe) -> None:
    recipe = config(optim={"warmup": 5, "schedule": "cosine"})
    engine = engine_of(recipe)
    losses(engine, 2)
    for _ in range(2):
        engine.lose([2])
        assert engine.runners[2].lr_scale == 1.1
        engine.train_step()
        rates = {stage: runner.optimizer.param_groups[0]["lr"] for stage, runner in engine.runners.items()}
        assert rates[2] / rates[3] == pytest.approx(1.1, rel=1e-12)
        assert rates[3] == learning_rate(recipe.optim, engine.step - 1, recipe.train.steps)
        assert set(engine.runners[2].state().clocks.values()) == {1}
    assert {stage: set(runner.state().clocks.values()) for stage, runner in engine.runners.items()} == {
        0: {4}, 1: {4}, 2: {1}, 3: {4}, 4: {4},
    }  # fmt: skip


def test_two_stages_that_are_not_adjacent_are_rebuilt_at_once(config: Recipe) -> None:
    engine = engine_of(config(model={"layers": 5}, pipeline={"stages": 5}))
    losses(engine, 2)
    given = {s: engine.runners[s].state() for s in (1, 3, 5)}
    assert engine.lose([4, 2]).rebuilt == {2: ("checkfree", (1, 3)), 4: ("checkfree", (3, 5))}
    for stage in (2, 4):
        one, other = given[stage - 1], given[stage + 1]
        expected = merge(one.weights, other.weights, one.grad_norm**2, other.grad_norm**2)
        state = engine.runners[stage].state()
        assert all(torch.equal(state.weights[name], tensor) for name, tensor in expected.items())
    assert math.isfinite(engine.train_step().loss)


@pytest.mark.parametrize("stages", [[0], [1], [4], [2, 3], [1, 3]])
def test_a_failed_rebuild_leaves_the_other_stages_unchanged(stages: list[int], config: Recipe) -> None:
    engine = engine_of(config())
    engine.train_step()
    before = whole(engine)
    plan = engine.lose(stages)
    assert not plan.rollback
    assert plan.reason.startswith("checkfree cannot rebuild it: ")
    assert whole(engine) == before


def test_a_loss_that_is_not_finite_is_never_committed(config: Recipe) -> None:
    engine = engine_of(config())
    engine.train_step()
    with torch.no_grad():
        next(iter(engine.runners[2].parameters.values())).fill_(math.nan)
    before = whole(engine)
    with pytest.raises(NonFinite, match=r"the loss is nan; lower optim.lr"):
        engine.train_step()
    assert whole(engine) == before
    assert engine.step == 1


@pytest.mark.slow
def test_training_recovers_from_the_loss_of_a_middle_stage(config: Recipe) -> None:
    """CheckFree's claim in small: 50 steps after a loss the model is as good as an undisturbed one.

    The initial weights are large, so that the middle stages matter early in training.
    """
    early = {"context": 32, "init_std": 0.15}
    engine = engine_of(config(model=early, pipeline={"microbatch_size": 4}, optim={"lr": 3e-3}, train={"steps": 300}))
    losses(engine, 250)
    others = {stage: copy.deepcopy(engine) for stage in (2, 3)}
    before = engine.evaluate()
    losses(engine, 50)
    undisturbed = engine.evaluate()
    worse, jumps = [], []
    for stage, other in others.items():
        other.lose([stage])
        jumps.append(other.evaluate() - before)
        losses(other, 50)
        worse.append(other.evaluate() - undisturbed)
    assert min(jumps) > 0.3, "losing a stage has an effect"
    assert statistics.mean(worse) <= 0.05


@pytest.mark.parametrize("own", [0, 2])
def test_gradients_of_skipping_routes_are_means_over_a_stages_microbatches(
    own: int, config: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = config(
        model={"layers": 6 + own, "ends_layers": own},
        pipeline={"stages": 6, "microbatches": 5},
        routing={"kind": "skipping", "skip": 0.4, "swaps": 2},
        optim={"clip": 0.0},
    )
    orders = [route[1:-1] for route in routes(recipe, 0)]
    assert {len(order) for order in orders} == {4} and any(list(order) != sorted(order) for order in orders)
    loss, expected = plain_gradients(recipe, orders)
    for stage in range(1, 7):
        seen = sum(stage in order for order in orders)
        assert 0 < seen < 5
        for name, gradient in expected.items():
            if name.startswith(f"model.layers.{own + stage - 1}."):
                gradient.mul_(5 / seen)
    same_gradients(pipeline_gradients(recipe, monkeypatch), (loss, expected))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("skip", [0.0, 0.5])
def test_gradients_of_a_schedule_equal_backpropagation_on_its_routes(
    skip: float, tied: bool, config: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten nodes, two per stage, which sum their gradients; skipping and swapping, or neither."""
    plain = config(model={"tied": tied}, optim={"clip": 0.0}, **shape(skip))
    recipe = on_schedule(plain, tmp_path, disorderly=skip > 0)
    resolved = ResolvedRun(recipe)
    stage = resolved.arrangement.stage
    orders = [[stage[node] for node in route[1:-1]] for route in resolved.routes(0)]
    assert {len(order) for order in orders} == {4 if not skip else 2}
    assert any(order != sorted(order) for order in orders) == bool(skip)
    loss, expected = plain_gradients(recipe, orders)
    for block in range(1, 5):
        seen = sum(block in order for order in orders)
        for name, gradient in expected.items():
            if name.startswith(f"model.layers.{block - 1}."):
                gradient.mul_(6 / seen)
    same_gradients(pipeline_gradients(recipe, monkeypatch), (loss, expected))


@pytest.mark.slow
def test_a_shorter_run_follows_the_schedule_of_schedule_steps(config: Recipe) -> None:
    cosine = {"schedule": "cosine", "warmup": 2}
    long = engine_of(config(optim=cosine, train={"steps": 9}))
    short = engine_of(config(optim=cosine, train={"steps": 4, "schedule_steps": 9}))
    apart = engine_of(config(optim=cosine, train={"steps": 4}))
    found = losses(long, 5)
    assert losses(short, 5) == found
    assert losses(apart, 5) != found, "its own schedule"


STRUCK = {2: [2], 3: [0], 5: [1, 2, 3], 6: [0, 1, 2, 3, 4]}
"""step → stages lost before it: neighbours, the ends, everybody"""


def test_the_oracle_equals_no_failures_bit_for_bit(config: Recipe) -> None:
    free, disturbed = engine_of(config()), engine_of(config(recovery={"strategy": "oracle"}))
    for step in range(8):
        if step in STRUCK:
            assert not disturbed.lose(STRUCK[step]).reason
        assert disturbed.train_step().loss == free.train_step().loss, step
    assert disturbed.moved_bytes == 0


def test_reset_keeps_all_weights_and_the_other_stages_moments(config: Recipe) -> None:
    engine = engine_of(config(recovery={"strategy": "reset"}))
    losses(engine, 3)
    before = {node: runner.state() for node, runner in engine.runners.items()}
    weights = {node: {n: w.clone() for n, w in state.weights.items()} for node, state in before.items()}
    plan = engine.lose([2])
    assert plan.rebuilt == {2: ("reset", ())}
    for node, runner in engine.runners.items():
        after = runner.state()
        assert all(torch.equal(after.weights[name], weight) for name, weight in weights[node].items())
        assert bool(after.moments) == (node != 2)
    free = engine_of(config())
    undisturbed = losses(free, 5)
    assert engine.train_step().loss == undisturbed[3], "the weights are those of the step"
    assert engine.train_step().loss != undisturbed[4], "the first update without moments differs"
