"""A stage's runner: its part of a step, its state, updates that are taken back, and copies that follow it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.models.state import StageState
from planaria.runtime.worker.gradient_sums import add_new_gradients, detach_gradients
from planaria.runtime.worker.runner import NonFinite, StageRunner
from planaria.runtime.worker.step_samples import StepInputs
from support.tiny_engine import Recipe, raw

MICROBATCHES = 2


def activations(config: RunConfig, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (config.pipeline.microbatch_size, config.model.context, config.model.dim)
    return [torch.randn(shape, generator=generator) for _ in range(MICROBATCHES)]


def one_step(runner: StageRunner, seed: int) -> float:
    """Do a block stage's part of a step on random activations and gradients; return the norm."""
    runner.begin(StepInputs(microbatches=MICROBATCHES))
    for i, x in enumerate(activations(runner.config, seed)):
        runner.forward(i, 1, x)
    for i, grad in enumerate(activations(runner.config, seed + 100)):
        runner.backward(i, 1, grad)
    return runner.finish()


def trained(config: RunConfig, steps: int = 3) -> StageRunner:
    runner = StageRunner(config, 1)
    for step in range(steps):
        one_step(runner, step)
        runner.commit(step)
    return runner


def copied(state: StageState) -> StageState:
    weights = {name: tensor.clone() for name, tensor in state.weights.items()}
    moments = {name: {key: t.clone() for key, t in pair.items()} for name, pair in state.moments.items()}
    return replace(state, weights=weights, moments=moments)


def test_activations_and_gradients_are_passed_on_without_their_graph(config: Recipe) -> None:
    runner = StageRunner(config(), 1)
    runner.begin(StepInputs(microbatches=MICROBATCHES))
    x = activations(runner.config, 1)[0]
    y = runner.forward(0, 1, x)
    assert (y.shape, y.requires_grad, x.requires_grad) == (x.shape, False, False)
    expected_x = x.clone().requires_grad_()
    expected = runner.module(expected_x)
    assert torch.equal(y, expected)
    grad = activations(runner.config, 2)[0]
    torch.testing.assert_close(runner.backward(0, 1, grad), torch.autograd.grad(expected, expected_x, grad)[0])


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
def test_norms_before_and_after_clipping_are_kept(clip: float, config: Recipe) -> None:
    runner = StageRunner(config(optim={"clip": clip}), 1)
    norm = one_step(runner, 1)
    held = torch.cat([p.grad.flatten() for p in runner.parameters.values()]).norm().item()
    assert norm > 0.5
    assert held == pytest.approx(clip if 0 < clip < norm else norm, rel=1e-4)
    assert runner.grad_norm is None, "not committed yet"
    runner.commit(0)
    assert runner.grad_norm == norm
    assert runner.clipped_norm == (0.5 if clip == 0.5 else norm)


def test_half_a_step_is_discarded_when_the_next_one_begins(config: Recipe) -> None:
    runner, other = StageRunner(config(), 1), StageRunner(config(), 1)
    runner.begin(StepInputs(microbatches=MICROBATCHES))
    for i, x in enumerate(activations(runner.config, 9)):
        runner.forward(i, 1, x)
    runner.backward(0, 1, activations(runner.config, 10)[0])
    assert one_step(runner, 1) == one_step(other, 1)


def test_a_loaded_state_continues_bit_for_bit(config: Recipe) -> None:
    runner, other = trained(config()), StageRunner(config(), 1, initialise=False)
    other.load(copied(runner.state()))
    assert raw(other.state()) == raw(runner.state())
    for step in (3, 4):
        for each in (runner, other):
            assert one_step(each, step)
            each.commit(step)
    assert raw(other.state()) == raw(runner.state())


def test_a_loaded_state_is_not_shared_with_its_source(config: Recipe) -> None:
    runner, other = trained(config()), StageRunner(config(), 1)
    other.load(runner.state())
    before = raw(copied(runner.state()))
    one_step(other, 7)
    other.commit(3)
    assert raw(runner.state()) == before


def test_loading_restores_the_random_generator(config: Recipe) -> None:
    runner = trained(config())
    kept = copied(runner.state())
    expected = torch.rand(4)
    torch.rand(100)
    runner.load(kept)
    assert torch.equal(torch.rand(4), expected)


def test_a_state_of_another_model_is_refused(config: Recipe) -> None:
    runner = StageRunner(config(), 1)
    state = runner.state()
    name = next(iter(state.weights))
    with pytest.raises(ValueError, match=f"stage 1: parameters differ: .*{name}"):
        runner.load(StageState({n: t for n, t in state.weights.items() if n != name}, lr_scale=1.0))
    with pytest.raises(ValueError, match=rf"stage 1: {name} is \[3\], not \["):
        runner.load(StageState(state.weights | {name: torch.zeros(3)}, lr_scale=1.0))


def test_a_stage_loaded_with_weights_alone_restarts_its_optimizer(config: Recipe) -> None:
    """AdamW's bias correction counts the stage's own updates: its first one moves every weight by its learning rate."""
    runner = trained(config(optim={"lr": 1e-3, "clip": 0.0}), steps=5)
    weights = {name: p.detach().clone() for name, p in runner.parameters.items()}
    runner.load(StageState({name: weight.clone() for name, weight in weights.items()}, lr_scale=1.1))
    assert raw(runner.state()) == (raw(StageState(weights))[0], {}, {}, 1.1, None, None)
    one_step(runner, 8)
    runner.commit(5)
    moved = torch.cat([(runner.parameters[n] - w).detach().abs().flatten() for n, w in weights.items()])
    assert moved.median().item() == pytest.approx(1.1e-3, rel=1e-2)


def test_a_steps_gradient_is_returned_clipped_with_its_norms(config: Recipe) -> None:
    runner = trained(config(optim={"clip": 0.5}))
    with pytest.raises(AssertionError, match="no finished step"):
        runner.gradients()
    norm = one_step(runner, 3)
    gradients = runner.gradients()
    assert (gradients.grad_norm, gradients.clipped_norm) == (norm, 0.5)
    assert gradients.weights.keys() == runner.parameters.keys()
    assert torch.cat([g.flatten() for g in gradients.weights.values()]).norm().item() == pytest.approx(0.5, rel=1e-4)
    runner.drop()
    with pytest.raises(AssertionError, match="no finished step"):
        runner.gradients()


CLOCKED = {"warmup": 5, "schedule": "cosine", "weight_decay": 0.1}
"""an optimizer to which it matters which step it is"""


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("steps", [0, 3], ids=["first update", "later update"])
def test_a_dropped_step_leaves_no_trace(steps: int, prepared: bool, config: Recipe) -> None:
    runner, other = (trained(config(optim=CLOCKED), steps) for _ in range(2))
    before = raw(copied(runner.state()))
    for _ in range(2):
        one_step(runner, 50)
        if prepared:
            runner.prepare(steps)
        assert (raw(runner.state()) != before) == prepared
        runner.drop()
        assert raw(runner.state()) == before
        assert all(p.grad is None for p in runner.parameters.values())
    for each in (runner, other):
        one_step(each, 3)
        each.commit(steps)
    assert raw(runner.state()) == raw(other.state())


@pytest.mark.parametrize("steps", [0, 3], ids=["first update", "later update"])
def test_prepare_and_commit_make_one_update(steps: int, config: Recipe) -> None:
    runner, other = (trained(config(optim=CLOCKED), steps) for _ in range(2))
    for step in (steps, steps + 1):
        for each in (runner, other):
            one_step(each, step)
        runner.prepare(step)
        prepared = raw(copied(runner.state()))
        for each in (runner, other):
            each.commit(step)
        assert prepared == raw(runner.state()) == raw(other.state())
    runner.drop()
    assert raw(runner.state()) == raw(other.state()), "what is committed is not taken back"


@pytest.mark.parametrize("prepared", [False, True])
def test_a_copy_that_applies_the_gradients_stays_equal_bit_for_bit(prepared: bool, config: Recipe) -> None:
    runner, twin = trained(config(optim=CLOCKED)), StageRunner(config(optim=CLOCKED), 1, initialise=False)
    runner.lr_scale = 1.1
    twin.load(copied(runner.state()))
    for step in (3, 4, 5):
        one_step(runner, step)
        gradients = copied(runner.gradients())
        if prepared:
            runner.prepare(step)
        runner.commit(step)
        twin.forward_copy(0, activations(runner.config, 7)[0])
        twin.apply(step, gradients)
        assert raw(twin.state()) == raw(runner.state())
        assert not twin._pending.outputs, "a finished step takes no memory"


def test_a_copy_of_stage_0_follows_a_tied_table(config: Recipe) -> None:
    recipe = config()
    runner, twin = StageRunner(recipe, 0), StageRunner(recipe, 0)
    tokens = torch.arange(32).view(2, 16)
    for step in range(3):
        runner.begin(StepInputs(lambda i: (tokens + i, tokens + i + 1), microbatches=1))
        hidden = runner.forward(0, 0, None)
        runner.forward(0, 5, hidden)
        runner.backward(0, 0, runner.backward(0, 5, None))
        runner.finish()
        gradients = copied(runner.gradients())
        runner.commit(step)
        twin.apply(step, gradients)
        assert raw(twin.state()) == raw(runner.state())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_not_committed(poison: float, config: Recipe) -> None:
    runner = trained(config())
    before = raw(runner.state())
    runner.begin(StepInputs(microbatches=1))
    runner.forward(0, 1, activations(runner.config, 1)[0])
    runner.backward(0, 1, torch.full_like(activations(runner.config, 1)[0], poison))
    with pytest.raises(NonFinite, match=r"the gradient norm of stage 1 is (nan|inf); lower optim.lr"):
        runner.finish()
    assert raw(runner.state()) == before
    with pytest.raises(AssertionError, match="update without a finished step"):
        runner.commit(3)


def test_stage_0_takes_data_and_returns_the_mean_loss(config: Recipe) -> None:
    recipe = config()
    runner = StageRunner(recipe, 0)
    tokens = torch.arange(32).view(2, 16)
    runner.begin(StepInputs(lambda i: (tokens + i, tokens + i + 1), microbatches=MICROBATCHES))
    assert runner.loss is None
    hidden = [runner.forward(i, 0, None) for i in range(MICROBATCHES)]
    expected = []
    for i, x in reversed(list(enumerate(hidden))):  # in any order, without effect on the sum
        assert runner.forward(i, 5, x) is None
        expected.insert(0, runner.module.loss(x, tokens + i + 1).item())
    assert runner.loss == pytest.approx(sum(expected) / MICROBATCHES, rel=1e-6)
    for i in range(MICROBATCHES):
        assert runner.backward(i, 0, runner.backward(i, 5, None)) is None
    assert runner.finish()


def test_a_validation_keeps_no_graph_and_has_no_norm(config: Recipe) -> None:
    runner = trained(config())
    before = raw(runner.state())
    runner.begin(StepInputs(train=False, microbatches=1))
    runner.forward(0, 1, activations(runner.config, 1)[0])
    assert not runner._pending.outputs
    assert runner.finish() is None
    assert raw(runner.state()) == before


def test_every_parameter_is_corrected_by_its_own_clock(config: Recipe) -> None:
    """Parameters from stages with other clocks continue as they would there; one parameter has another state's."""
    plain = config(optim={"weight_decay": 0.1})
    old, young = trained(plain, steps=5), trained(plain, steps=2)
    name = next(iter(old.parameters))
    mixed = copied(old.state())
    mixed.moments[name], mixed.clocks[name] = copied(young.state()).moments[name], 2
    runner, other = StageRunner(plain, 1), StageRunner(plain, 1)
    runner.load(mixed)
    other.load(replace(mixed, clocks=dict.fromkeys(mixed.clocks, 2)))
    assert runner.state().clocks == {n: 2 if n == name else 5 for n in mixed.moments}
    for each in (runner, other):
        one_step(each, 9)
        each.commit(9)
    assert runner.state().clocks == {n: 3 if n == name else 6 for n in mixed.moments}
    same = {n for n in mixed.weights if torch.equal(runner.state().weights[n], other.state().weights[n])}
    assert same == {name}, "the others were corrected by their own, older clocks"


def test_the_clock_of_a_parameter_without_a_gradient_stands_still(config: Recipe) -> None:
    runner = trained(config())
    name = next(iter(runner.parameters))
    one_step(runner, 9)
    runner.parameters[name].grad = None
    runner.commit(9)
    assert runner.state().clocks == {n: 3 if n == name else 4 for n in runner.parameters}
    other = StageRunner(config(), 1)
    other.load(copied(runner.state()))
    assert raw(other.state()) == raw(runner.state())


def test_gradients_set_aside_and_added_equal_autograds_sums() -> None:
    """Also of a parameter that some passes do not reach, and of one that none does."""
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    inputs = torch.randn(4, 3)

    def grads(apart: bool) -> list[Tensor | None]:
        for parameter in parameters:
            parameter.grad = None
        for n, x in enumerate(inputs):
            sums = detach_gradients(parameters) if apart else []
            ((parameters[0] * x).sum() ** 2 + (parameters[1] @ x if n % 2 else 0.0)).backward()
            add_new_gradients(sums)
        return [parameter.grad for parameter in parameters]

    found, wanted = grads(True), grads(False)
    assert found[2] is None and wanted[2] is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[:2], wanted[:2], strict=True))
