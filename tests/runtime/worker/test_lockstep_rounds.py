"""Replicas with mixed routes: their rounds lie within steps, under the controller."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from planaria.config.schema import RunConfig
from planaria.control.facts import events as e
from planaria.exchange.base import Update
from planaria.faults.trace import Fault, Trace
from planaria.lab.reference.engine import ReferenceEngine
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import CheckpointStore, replica_folder
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.run_start import START, Origin
from planaria.runtime.worker.exchange_round import RoundMember
from planaria.runtime.worker.runner import StageRunner
from support.observer import Log, train_inline
from support.tiny_engine import Recipe, engine_of

REPLICAS, STEPS = 4, 10
KINDS: list[dict[str, Any]] = [
    {"kind": "noloco", "options": {"every": 3}},
    {"kind": "streaming_diloco", "options": {"every": 6, "fragments": 2, "delay": 2}},
    {"kind": "eager", "options": {"every": 3}},
    {"kind": "local"},
    {"kind": "diloco", "options": {"every": 4}},
    {},
]


def recipe(config: Recipe, exchange: dict[str, Any], steps: int = STEPS) -> RunConfig:
    return config(
        model={"layers": 2},
        pipeline={"stages": 2, "microbatches": 2},
        exchange={"replicas": REPLICAS, **exchange},
        routing={"mixed": True},
        train={"steps": steps},
        checkpoint={"every": 5},
    ).model_copy(update={"engine": "inline"})


def run(config: RunConfig, folder: Path, *faults: Fault, origin: Origin = START) -> list[float]:
    """Return the mean loss of the replicas for each step."""
    log = Log()
    ending = train_inline(prepare(config, trace=Trace(faults=faults)), folder, log, origin)
    assert ending.outcome == "finished", ending
    reported = defaultdict[int, list[float]](list)
    for fact in log.facts:
        if isinstance(fact, e.StageReady) and fact.loss is not None and fact.mode == "train":
            reported[fact.step].append(fact.loss)
    return [fmean(losses[-REPLICAS:]) for _, losses in sorted(reported.items())]


def engine_losses(engine: ReferenceEngine, lost: dict[int, int]) -> list[float]:
    """Return the losses of an engine without workers that loses node ``lost[step]`` before ``step``."""
    found = []
    for step in range(STEPS):
        if step in lost:
            engine.lose([lost[step]])
        found.append(engine.train_step().loss)
    return found


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("exchange", KINDS, ids=lambda exchange: exchange.get("kind", "allreduce"))
@pytest.mark.parametrize("lost", [None, 4], ids=["untroubled", "with a loss"])
def test_a_run_equals_an_engine_without_workers(
    lost: int | None, exchange: dict[str, Any], config: Recipe, tmp_path: Path
) -> None:
    given = recipe(config, exchange)
    engine = engine_of(given)
    expected = engine_losses(engine, {} if lost is None else {5: lost})
    faults = () if lost is None else (Fault(step=5, stage=lost),)
    assert run(given, tmp_path / "run", *faults) == pytest.approx(expected, rel=1e-9)
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").newest()
    assert saved is not None and saved.manifest.replicas == (REPLICAS if exchange else 1)
    for node, runner in engine.runners.items() if exchange else ():
        replica, stage = divmod(node, 3)
        state = read_stage(replica_folder(saved.folder, replica), stage, STEPS)
        assert all(torch.equal(state.weights[n], w) for n, w in runner.state().weights.items())


def test_a_resumed_run_continues_bit_for_bit(config: Recipe, tmp_path: Path) -> None:
    whole = run(recipe(config, KINDS[0]), tmp_path / "whole")
    run(recipe(config, KINDS[0], steps=6), tmp_path / "parted")
    origin = Origin(step=6, load=dict.fromkeys(range(3), "step-00000006"))
    assert run(recipe(config, KINDS[0]), tmp_path / "parted", origin=origin) == whole[6:]


def test_a_death_during_a_round_leaves_no_trace_of_it(config: Recipe, tmp_path: Path) -> None:
    """Step 2 ends with a round; stage 0 of replica 0 dies at its last action, after block stages have settled."""
    given = recipe(config, KINDS[0])
    expected = engine_losses(engine_of(given), {2: 0})
    last = Fault(step=2, stage=0, moment="backward", offset=0.99)
    assert run(given, tmp_path / "run", last) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("step", [3, 4, 2, 5])
def test_a_fragment_in_flight_is_given_up_by_all(step: int, config: Recipe, tmp_path: Path) -> None:
    """A fragment is sent after step 2 and settled after step 4; the shared state of replicas stays equal."""
    run(recipe(config, KINDS[1]), tmp_path / "run", Fault(step=step, stage=4))
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").newest()
    assert saved is not None and saved.step == STEPS
    for stage in range(3):
        first, *others = (read_stage(replica_folder(saved.folder, r), stage, STEPS).outer for r in range(REPLICAS))
        assert first and all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_an_update_with_nan_ends_the_run(config: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: RoundMember, round: int, runner: StageRunner) -> Update:
        found = honest(self, round, runner)
        if runner.stage == 1:
            found = self._own = Update(torch.full_like(found.blocking, torch.nan))
        return found

    honest = RoundMember.update
    monkeypatch.setattr(RoundMember, "update", update)
    ending = train_inline(prepare(recipe(config, KINDS[0])), tmp_path / "run", Log())
    assert ending.outcome == "failed" and "the update of" in ending.reason and "lower optim.lr" in ending.reason
