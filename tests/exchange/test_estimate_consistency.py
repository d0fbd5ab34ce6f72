"""A state machine of a stage's replicas: through steps, drops, deaths and resumptions estimates stay consistent and
only the residuals of the dead are lost."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from planaria.config.schema import ExchangeConfig, ModelConfig, PipelineConfig, RunConfig
from planaria.models.packing import pack, unpack
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import load_stage
from planaria.runtime.checkpoint.stage_file import stage_file, write_stage
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore, SealedCheckpoint
from planaria.runtime.worker.outer_state import OuterState
from planaria.runtime.worker.runner import StageRunner

MODEL = ModelConfig(vocab=32, dim=8, layers=1, heads=1, hidden=16, context=8)
STAGE, MOST = 1, 6
TOLERANCE = 1e-6


class Gradient:
    """The part of a stage's runner that an exchange of gradients uses."""

    stage = STAGE

    def __init__(self, like: dict[str, Tensor], seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.grads = {name: torch.randn(tensor.shape, generator=drawn) + 0.3 for name, tensor in like.items()}

    def rescale_for_skips(self) -> None:
        """Average nothing over microbatches."""

    def set_gradients(self, grads: dict[str, Tensor]) -> None:
        self.grads = grads


def flat(weights: Any) -> Tensor:
    return torch.cat([*(weights[name].reshape(-1) for name in sorted(weights)), torch.empty(0)]).double()


class Life(RuleBasedStateMachine):
    """``exact``: the sum of all mean gradients; ``reached``: of all steps; ``dead``: of the dead's residuals, as shares
    of the mean."""

    setting = "econtrol:top10%"

    @initialize(replicas=st.integers(2, 4))
    def begin(self, replicas: int) -> None:
        self.steps, self.exact, self.reached, self.dead = 0, torch.zeros(1), torch.zeros(1), torch.zeros(1)
        self.scale = 0.0
        self.state = StageRunner(self.config(replicas), STAGE).state()
        self.like = {name: tensor.detach() for name, tensor in self.state.weights.items()}
        self.held = [self.stood(replicas, {}) for _ in range(replicas)]

    def config(self, replicas: int) -> RunConfig:
        exchange = ExchangeConfig(replicas=replicas, compress=self.setting)
        return RunConfig(model=MODEL, pipeline=PipelineConfig(stages=1), exchange=exchange)

    def stood(self, replicas: int, outer: dict[str, Tensor]) -> OuterState:
        """Make a node with this outer state."""
        made = OuterState(self.config(replicas).exchange)
        made.begin(outer, self.like, self.steps)
        return made

    def debts(self) -> list[Tensor]:
        count = sum(tensor.numel() for tensor in self.like.values())
        return [debt if len(debt := flat(h.settled["residual"])) else torch.zeros(count).double() for h in self.held]

    def gradients(self, seed: int) -> list[Gradient]:
        return [Gradient(self.like, seed * MOST + place) for place in range(len(self.held))]

    def exchanged(self, gradients: list[Gradient], settling: int) -> None:
        """Send all updates; let the first ``settling`` nodes settle."""
        updates = {place: held.update(own) for place, (held, own) in enumerate(zip(self.held, gradients, strict=True))}
        for place in range(settling):
            self.held[place].settle(updates, place, gradients[place])

    @rule(seed=st.integers(0, 1000))
    def step(self, seed: int) -> None:
        gradients = self.gradients(seed)
        mean = torch.stack([flat(own.grads) for own in gradients]).mean(0)
        self.exchanged(gradients, len(self.held))
        first = flat(gradients[0].grads)
        assert all(torch.equal(flat(own.grads), first) for own in gradients), "all steps are equal, to the last bit"
        for held in self.held:
            held.commit()
        self.steps += 1
        self.exact, self.reached = self.exact + mean, self.reached + first
        self.scale += float(mean.norm())

    @rule(seed=st.integers(0, 1000), settling=st.integers(0, MOST))
    def step_that_is_dropped(self, seed: int, settling: int) -> None:
        before = [held.settled for held in self.held]
        self.exchanged(self.gradients(seed), min(settling, len(self.held)))
        for held, was in zip(self.held, before, strict=True):
            held.drop()
            held.commit()
            assert held.settled is was

    @rule(lost=st.integers(0, MOST), donor=st.integers(1, MOST))
    def death(self, lost: int, donor: int) -> None:
        count = len(self.held)
        lost = lost % count
        self.dead = self.dead + self.debts()[lost] / count
        given = StageState(
            {}, outer=self.held[(lost + 1 + donor % (count - 1)) % count].state_for_transfer(to_successor=False)
        )
        self.held[lost] = self.stood(count, unpack(pack(given)).outer)
        for held in self.held:
            held.after_member_change()

    @rule(place=st.integers(0, MOST))
    def succession(self, place: int) -> None:
        place = place % len(self.held)
        given = StageState({}, outer=self.held[place].state_for_transfer(to_successor=True))
        self.held[place] = self.stood(len(self.held), unpack(pack(given)).outer)

    @precondition(lambda self: self.steps)
    @rule(more=st.integers(-1, 1))
    def resumption(self, more: int) -> None:
        """Resume from real files with as many replicas, one fewer or one more."""
        count = min(MOST, max(2, len(self.held) + more))
        with tempfile.TemporaryDirectory() as folder:
            saved = self.saved(Path(folder))
            states = [load_stage(saved.folder, self.config(count), STAGE, place) for place in range(count)]
        self.held = [
            self.stood(count, {name: t for name, t in state.outer.items() if name != "rounds"}) for state in states
        ]

    def saved(self, folder: Path) -> SealedCheckpoint:
        """Save as a fleet does: one node with weights, the others with their own state."""
        store, digests = CheckpointStore(folder), {}
        for place, held in enumerate(self.held):
            state = replace(self.state if place == 0 else StageState({}), outer=held.settled.state())
            written = write_stage(store.unfinished(self.steps), STAGE, self.steps, state, place)
            digests[stage_file(Path(), STAGE, place).name] = written.sha256
        manifest = CheckpointManifest(
            step=self.steps,
            stages=[STAGE],
            pipeline_stages=1,
            digests=digests,
            model=MODEL,
            exchange=self.config(len(self.held)).exchange,
        )
        return store.seal("step", manifest, keep=1)

    @invariant()
    def all_agree(self) -> None:
        assert {held.settled.rounds for held in self.held} == {self.steps}
        assert len({held.exchange.codec(held.settled).exact for held in self.held}) == 1, "in full, or not"
        first, *others = [flat(held.settled["mean_estimate"]) for held in self.held]
        assert all(torch.equal(first, other) for other in others)

    @invariant()
    def the_mean_estimate_is_the_mean_of_estimates(self) -> None:
        mean, own = (self.held[0].settled["mean_estimate"], [held.settled["estimate"] for held in self.held])
        if mean and any(own):
            apart = flat(mean) - torch.stack([flat(estimate) for estimate in own]).mean(0)
            assert float(apart.norm() / flat(mean).norm()) < TOLERANCE

    @invariant()
    def only_the_residuals_of_the_dead_are_lost(self) -> None:
        """x − γ·mean e has moved by −γ times the sum of mean gradients, as if nothing were compressed."""
        if self.steps and "residual" in self.held[0].exchange.parts:
            residual = torch.stack(self.debts()).mean(0)
            assert float((self.reached + residual + self.dead - self.exact).norm()) < TOLERANCE * self.scale


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "setting", ["econtrol:top1%", "econtrol:rand20%", "econtrol:4bits", "ef21:top10%", "ef14:top10%"]
)
def test_only_the_residuals_of_the_dead_are_lost(setting: str) -> None:
    named = type("Life", (Life,), {"setting": setting})
    few = settings(max_examples=8, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(named, settings=few)
