"""Replicas whose microbatches change from one to another: their rounds lie within steps, under the controller."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tiny import engine_of

from observer import Log, train_inline
from planaria.config.schema import RunConfig
from planaria.control import events as e
from planaria.exchange.base import Offer
from planaria.exchange.kinds import exchange
from planaria.faults.trace import Fault, Trace
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import CheckpointStore, replica_folder
from planaria.runtime.engine.exchange_round import RoundMember
from planaria.runtime.engine.lockstep_rounds import rounds_by
from planaria.runtime.engine.origin import START, Origin
from planaria.runtime.engine.prepare import prepare
from planaria.runtime.engine.runner import StageRunner

Recipe = Callable[..., RunConfig]
REPLICAS, STEPS = 4, 10
KINDS: list[dict[str, Any]] = [
    {"kind": "noloco", "options": {"every": 3}},
    {"kind": "streaming_diloco", "options": {"every": 6, "fragments": 2, "delay": 2}},
    {"kind": "local"},
    {"kind": "diloco", "options": {"every": 4}},
    {},
]


def recipe(config: Recipe, said: dict[str, Any], steps: int = STEPS) -> RunConfig:
    return config(
        model={"layers": 2},
        pipeline={"stages": 2, "microbatches": 2},
        exchange={"replicas": REPLICAS, **said},
        routing={"mixed": True},
        train={"steps": steps},
        checkpoint={"every": 5},
    ).model_copy(update={"engine": "inline"})


def run(config: RunConfig, folder: Path, *faults: Fault, origin: Origin = START) -> list[float]:
    """The loss of each step, the mean over the replicas."""
    log = Log()
    ending = train_inline(prepare(config, trace=Trace(faults=faults)), folder, log, origin)
    assert ending.outcome == "finished", ending
    told = defaultdict[int, list[float]](list)
    for fact in log.facts:
        if isinstance(fact, e.StageReady) and fact.loss is not None and fact.mode == "train":
            told[fact.step].append(fact.loss)
    return [fmean(losses[-REPLICAS:]) for _, losses in sorted(told.items())]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("said", KINDS, ids=lambda said: said.get("kind", "allreduce"))
@pytest.mark.parametrize("lost", [None, 4], ids=["untroubled", "with a loss"])
def test_a_run_has_the_losses_of_an_engine_without_workers(
    lost: int | None, said: dict[str, Any], config: Recipe, tmp_path: Path
) -> None:
    given = recipe(config, said)
    engine, expected = engine_of(given), []
    for step in range(STEPS):
        if lost is not None and step == 5:
            engine.lose([lost])
        expected.append(engine.train_step().loss)
    faults = () if lost is None else (Fault(step=5, stage=lost),)
    assert run(given, tmp_path / "run", *faults) == pytest.approx(expected, rel=1e-9)
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").newest()
    assert saved is not None and saved.manifest.replicas == (REPLICAS if said else 1)
    for node, runner in engine.runners.items() if said else ():
        replica, stage = divmod(node, 3)
        state = read_stage(replica_folder(saved.folder, replica), stage, STEPS)
        assert all(torch.equal(state.weights[n], w) for n, w in runner.state().weights.items())


def test_a_resumed_run_goes_on_bit_for_bit(config: Recipe, tmp_path: Path) -> None:
    whole = run(recipe(config, KINDS[0]), tmp_path / "whole")
    run(recipe(config, KINDS[0], steps=6), tmp_path / "parted")
    origin = Origin(step=6, load=dict.fromkeys(range(3), "step-00000006"))
    assert run(recipe(config, KINDS[0]), tmp_path / "parted", origin=origin) == whole[6:]


def test_a_worker_that_dies_while_others_settle_leaves_no_trace_of_the_round(config: Recipe, tmp_path: Path) -> None:
    """Step 2 ends with a round, and the ends of replica 0 die at its last action: by then block stages have settled."""
    given = recipe(config, KINDS[0])
    engine, expected = engine_of(given), []
    for step in range(STEPS):
        if step == 2:
            engine.lose([0])
        expected.append(engine.train_step().loss)
    last = Fault(step=2, stage=0, moment="backward", offset=0.99)
    assert run(given, tmp_path / "run", last) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("step", [3, 4, 2, 5])
def test_what_is_under_way_between_steps_is_given_up_by_all(step: int, config: Recipe, tmp_path: Path) -> None:
    """A fragment is offered after step 2 and settled after step 4. The state that replicas share stays the same."""
    run(recipe(config, KINDS[1]), tmp_path / "run", Fault(step=step, stage=4))
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").newest()
    assert saved is not None and saved.step == STEPS
    for stage in range(3):
        first, *others = (read_stage(replica_folder(saved.folder, r), stage, STEPS).outer for r in range(REPLICAS))
        assert first and all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_an_update_that_is_no_number_ends_the_run(
    config: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offer(self: RoundMember, round: int, runner: StageRunner) -> Offer:
        found = honest(self, round, runner)
        if runner.stage == 1:
            assert found.blocking is not None
            found = self._own = Offer(torch.full_like(found.blocking, torch.nan))
        return found

    honest = RoundMember.offer
    monkeypatch.setattr(RoundMember, "offer", offer)
    ending = train_inline(prepare(recipe(config, KINDS[0])), tmp_path / "run", Log())
    assert ending.outcome == "failed" and "the update of" in ending.reason and "lower optim.lr" in ending.reason


@pytest.mark.parametrize("every", [1, 3, 7])
def test_rounds_are_counted_by_what_is_settled(every: int, config: Recipe) -> None:
    rule = exchange(recipe(config, {"kind": "noloco", "options": {"every": every}}).exchange)
    assert [rounds_by(rule, n) for n in range(2 * every + 1)] == [n // every for n in range(2 * every + 1)]
