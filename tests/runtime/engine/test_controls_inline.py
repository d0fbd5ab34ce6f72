"""Control strategies on the inline engine: the oracle leaves no trace of a loss, reset loses the moments alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import config_in, engine_of

STRUCK = {2: [2], 3: [0], 5: [1, 2, 3], 6: [0, 1, 2, 3, 4]}
"""step → stages lost before it: neighbours, the ends, everybody"""


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_the_oracle_equals_no_failures_bit_for_bit(tmp_path: Path, beta2: float) -> None:
    free = engine_of(config_in(tmp_path, optim={"beta2": beta2}))
    struck = engine_of(config_in(tmp_path, optim={"beta2": beta2}, recovery={"strategy": "oracle"}))
    for step in range(8):
        if step in STRUCK:
            assert not struck.lose(STRUCK[step]).reason
        assert struck.train_step().loss == free.train_step().loss, step
    assert struck.moved_bytes == 0


def test_reset_keeps_all_weights_and_the_other_stages_moments(tmp_path: Path) -> None:
    engine = engine_of(config_in(tmp_path, recovery={"strategy": "reset"}))
    for _ in range(3):
        engine.train_step()
    before = {node: runner.state() for node, runner in engine.runners.items()}
    weights = {node: {n: w.clone() for n, w in state.weights.items()} for node, state in before.items()}
    plan = engine.lose([2])
    assert plan.rebuilt == {2: ("reset", ())}
    for node, runner in engine.runners.items():
        after = runner.state()
        assert all(torch.equal(after.weights[name], weight) for name, weight in weights[node].items())
        assert bool(after.moments) == (node != 2)
    free = engine_of(config_in(tmp_path))
    losses = [free.train_step().loss for _ in range(5)]
    assert engine.train_step().loss == losses[3], "the weights are those of the step"
    assert engine.train_step().loss != losses[4], "the first update without moments differs"
