"""Runners that sleep in place of computing, and stragglers."""

from __future__ import annotations

import time

import pytest
import torch

from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.sleeping_runner import SleepingRunner, Slowness, slowdown_factor
from planaria.runtime.worker.step_samples import StepInputs
from support.tiny_engine import Recipe


def test_a_sleeper_takes_its_time_and_returns_tensors_of_the_real_size(config: Recipe) -> None:
    recipe = config(network={"forward_s": [0.02], "backward_s": [0.04], "emulate": True})
    runner = SleepingRunner(recipe, 1)
    runner.use_prices(1, ResolvedRun(recipe).prices)
    before = {name: p.detach().clone() for name, p in runner.parameters.items()}
    runner.begin(StepInputs(microbatches=1))
    x = torch.zeros(recipe.pipeline.microbatch_size, recipe.model.context, recipe.model.dim)
    start = time.monotonic()
    out = runner.forward(0, 1, x)
    middle = time.monotonic()
    back = runner.backward(0, 1, x)
    end = time.monotonic()
    assert middle - start >= 0.02
    assert end - middle >= 0.04
    assert out.shape == back.shape == x.shape
    assert runner.finish() == 0.0
    runner.commit(0)
    assert set(runner.state().clocks.values()) == {1}
    assert all(torch.equal(runner.parameters[name], tensor) for name, tensor in before.items())


def test_a_sleeping_stage_0_needs_no_data(config: Recipe) -> None:
    runner = SleepingRunner(config(network={"emulate": True}), 0)
    runner.begin(StepInputs(microbatches=1))
    hidden = runner.forward(0, 0, None)
    assert hidden is not None and runner.forward(0, 5, hidden) is None
    assert runner.loss == 0.0
    assert runner.backward(0, 5, None) is not None
    assert runner.backward(0, 0, hidden) is None
    assert runner.finish() == 0.0


def test_stragglers_are_drawn_per_replica_and_round_and_reproducible(config: Recipe) -> None:
    recipe = config(network={"straggle_probability": 0.25, "straggle_factor": 3.0})
    drawn = [slowdown_factor(recipe, replica, round) for replica in range(8) for round in range(100)]
    assert set(drawn) == {1.0, 3.0} and 150 < drawn.count(3.0) < 250
    assert drawn == [slowdown_factor(recipe, replica, round) for replica in range(8) for round in range(100)]
    assert slowdown_factor(config(), 0, 0) == 1.0


def test_slowness_is_the_same_however_work_is_divided(config: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("planaria.runtime.worker.sleeping_runner.time.monotonic", lambda: now)
    monkeypatch.setattr("planaria.runtime.worker.sleeping_runner.time.sleep", pass_time)
    recipe = config(network={"straggle_probability": 0.25, "straggle_factor": 3.0})
    ends = []
    for pieces in (1, 7, 60):
        now = 100.0
        slowness = Slowness(recipe, 2, every_s=0.5)
        for _ in range(pieces):
            slowness.sleep(6.0 / pieces)
        ends.append(now)
    assert ends == [pytest.approx(ends[0])] * 3
    times = [slowdown_factor(recipe, 2, piece) for piece in range(int((ends[0] - 100.0) / 0.5) + 1)]
    assert 3.0 in times and sum(0.5 / t for t in times) >= 6.0 > sum(0.5 / t for t in times[:-1])
