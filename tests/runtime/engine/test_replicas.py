"""Replicas in one process: their losses, their rounds, and runs of them that are resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Settle
from planaria.control.facts.events import RoundWaitExpired
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.exchange.weight_message import consensus
from planaria.faults.trace import Fault, Trace
from planaria.lab.reference.engine import ReferenceEngine
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.run_observer import RunObserver
from planaria.report.run.sample_ledger import prove_exactly_once, sample_ledger
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.run_start import Origin
from support.observer import train_inline
from support.tiny_engine import Recipe, engine_of, losses

FOUR = {"stages": 2, "microbatches": 2, "microbatch_size": 2}


def replicas(config: Recipe, count: int = 4, mixed: bool = False, kind: str = "allreduce", **options: Any) -> RunConfig:
    return config(
        model={"layers": 2},
        pipeline=FOUR,
        routing={"mixed": mixed},
        exchange={"replicas": count, "kind": kind, "options": options},
    )


def weights(engine: ReferenceEngine, node: int) -> list[torch.Tensor]:
    return [w.clone() for w in engine.runners[node].state().weights.values()]


def test_all_reduced_replicas_equal_one_model_with_larger_batches(config: Recipe) -> None:
    many = engine_of(replicas(config, 4, kind="allreduce"))
    one = engine_of(config(model={"layers": 2}, pipeline=FOUR | {"microbatches": 8}))
    assert losses(many, 5) == pytest.approx(losses(one, 5), rel=1e-5)
    assert many.replicas is not None and many.replicas.spread() == 0.0


def test_rounds_of_gradients_count_steps(config: Recipe) -> None:
    """Also after a checkpoint of another number of replicas. Compressors draw by them, as on a fleet."""
    engine = engine_of(replicas(config, 3, kind="allreduce", bits=4))
    engine.step = 5
    engine.load_states({node: runner.state() for node, runner in engine.runners.items()})
    assert {int(engine.replicas.state(node).outer["rounds"]) for node in engine.stage} == {5}
    engine.train_step()
    assert {int(engine.replicas.state(node).outer["rounds"]) for node in engine.stage} == {6}


def test_without_an_exchange_each_replica_learns_from_its_own_samples(config: Recipe) -> None:
    many = engine_of(replicas(config, 2, kind="local"))
    losses(many, 6)
    assert many.replicas is not None and many.replicas.spread() > 0
    recipe = config(model={"layers": 2}, pipeline=FOUR)
    alone = engine_of(recipe)

    class Odd:
        """The samples of replica 1: every second share of the stream."""

        stream, rows = alone._train, False

        def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            step, own = divmod(first, recipe.pipeline.samples)
            return self.stream.batch(2 * step * recipe.pipeline.samples + recipe.pipeline.samples + own, size)

    alone._train = Odd()
    losses(alone, 6)
    for stage in range(3):
        for mine, theirs in zip(weights(many, 3 + stage), weights(alone, stage), strict=True):
            assert torch.equal(mine, theirs)


def test_pairs_meet_when_due_and_stay_closer(config: Recipe) -> None:
    gossip, local = (
        engine_of(replicas(config, 4, kind=kind, **({} if kind == "local" else {"every": 3})))
        for kind in ("pair_mean", "local")
    )
    rounds = [round for _ in range(9) for round in gossip.train_step().rounds]
    losses(local, 9)
    assert [round.number for round in rounds] == [0, 1, 2]
    assert all(sorted(r for group in round.groups for r in group) == [0, 1, 2, 3] for round in rounds)
    assert 0 < gossip.replicas.spread() < local.replicas.spread()
    size = sum(w.nbytes for node in gossip.replicas.nodes(0) for w in weights(gossip, node))
    assert all(round.blocking_bytes == 4 * size and round.prefetched_bytes == 0 for round in rounds)


def test_mixed_routes_keep_replicas_close_without_sending_weights(config: Recipe) -> None:
    engine = engine_of(replicas(config, 4, mixed=True, kind="local"))
    found = {route for step in range(8) for route in engine.resolved.routes(step)}
    assert any(len({node // 3 for node in route}) > 1 for route in found)
    for step in range(8):
        for stage in (1, 2):
            visits = [node for route in engine.resolved.routes(step) for node in route[1:-1] if node % 3 == stage]
            assert sorted(visits) == sorted([*range(stage, 12, 3)] * 2), "a permutation loads all alike"
    assert losses(engine, 8)[-1] < losses(engine_of(replicas(config, 4, kind="local")), 1)[0]


def test_the_consensus_of_replicas_is_their_mean(config: Recipe) -> None:
    engine = engine_of(replicas(config, 3, kind="noloco", every=4))
    losses(engine, 5)
    states = [engine.runners[node].state().weights for node in (1, 4, 7)]
    for name, tensor in consensus(states).items():
        assert torch.allclose(tensor, sum(state[name] for state in states) / 3, atol=1e-6)


def test_a_lost_node_takes_the_state_of_another_replica(config: Recipe) -> None:
    engine = engine_of(replicas(config, 2, kind="noloco", every=3))
    losses(engine, 4)
    engine.lose([4])
    assert all(torch.equal(a, b) for a, b in zip(weights(engine, 4), weights(engine, 1), strict=True))
    assert engine.replicas is not None and engine.replicas.outer[4].settled.rounds == 1
    losses(engine, 4)


def test_slow_weights_stay_equal_through_a_loss(config: Recipe) -> None:
    engine = engine_of(replicas(config, 4, kind="diloco", every=4))
    losses(engine, 6)
    engine.lose([4])
    losses(engine, 6)
    assert engine.replicas is not None and engine.replicas.spread() == 0.0


def test_a_fragment_in_flight_is_dropped_with_its_steps(config: Recipe) -> None:
    engine = engine_of(replicas(config, 2, kind="streaming_diloco", every=6, fragments=2, delay=2))
    losses(engine, 2)
    saved = {node: copy.deepcopy(engine.replicas.state(node)) for node in engine.runners}
    losses(engine, 2)
    engine.step = 2
    engine.load_states(saved)
    rounds = [round.number for _ in range(8) for round in engine.train_step().rounds]
    assert rounds == [0, 1]
    engine.lose([4])
    assert [round.number for _ in range(6) for round in engine.train_step().rounds] == [2, 3]


def train(recipe: RunConfig, folder: Path, origin: Origin | None = None, faults: tuple[Fault, ...] = ()) -> RunRecord:
    folder.mkdir(exist_ok=True)
    run_folders.write_config(folder, recipe)
    prepared = prepare(recipe.model_copy(update={"engine": "inline"}), trace=Trace(faults=faults))
    watch = RunObserver(folder, recipe.samples * recipe.model.context, NoProgress())
    try:
        ending = train_inline(prepared, folder, watch, origin or Origin())
    finally:
        watch.close()
    assert ending.outcome == "finished"
    return read_run(folder)


def resumed(recipe: RunConfig, folder: Path, step: int) -> RunRecord:
    load = dict.fromkeys(range(3), f"step-{step:08d}")
    positions = run_folders.newest_whole(folder).manifest.positions if recipe.exchange.kind != "allreduce" else {}
    return train(recipe, folder, Origin(step=step, load=load, positions=positions))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("exchange", [{"kind": "noloco", "every": 3, "bits": 8}, {"bits": 8}])
def test_a_run_of_replicas_resumes_bit_for_bit(exchange: dict[str, Any], config: Recipe, tmp_path: Path) -> None:
    def recipe(steps: int) -> RunConfig:
        made = replicas(config, 3, **exchange)
        return made.model_copy(update={"train": made.train.model_copy(update={"steps": steps, "eval_every": 5})})

    whole = train(recipe(12), tmp_path / "whole")
    train(recipe(7), tmp_path / "parted")
    again = resumed(recipe(12), tmp_path / "parted", 7)
    assert [m.loss for m in again.trained if m.step >= 7] == [m.loss for m in whole.trained if m.step >= 7]
    saved = [run_folders.newest_whole(tmp_path / name).manifest for name in ("whole", "parted")]
    assert saved[0].step == 12 and saved[0].digests == saved[1].digests


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_replicas(config: Recipe, tmp_path: Path) -> None:
    first = replicas(config, 3, kind="noloco", every=3)
    train(first, tmp_path / "run")
    model = load_model(run_folders.newest_whole(tmp_path / "run"))
    five = replicas(config, 5, kind="noloco", every=3)
    five = five.model_copy(update={"train": five.train.model_copy(update={"steps": 16})})
    saved = run_folders.newest_whole(tmp_path / "run")
    assert saved.manifest.samples == 10 * first.samples
    load = dict.fromkeys(range(3), saved.folder.name)
    record = train(five, tmp_path / "run", Origin(step=10, load=load, samples=saved.manifest.samples))
    assert prove_exactly_once(record) == [], "a sample was used twice, or not at all"
    assert max(line.span[1] for line in sample_ledger(record)) == 10 * first.samples + 6 * five.samples
    settled = [fact for _, fact in record.history if isinstance(fact, Settle)]
    assert {replica for fact in settled for replica in fact.members} == set(range(5))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_log_has_the_meetings_and_each_replicas_validation_loss(config: Recipe, tmp_path: Path) -> None:
    recipe = replicas(config, 4, kind="pair_mean", every=4)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"eval_every": 5})})
    record = train(recipe, tmp_path / "run", faults=(Fault(step=6, stage=5),))
    settled = [fact for _, fact in record.history if isinstance(fact, Settle)]
    assert sorted({fact.round for fact in settled}) == [0, 1]
    assert all(len(fact.members) == 2 for fact in settled)
    looks = {look.step: look.val_losses for look in record.validated}
    assert sorted(looks) == [0, 5, 10]
    assert len({*looks[0].values()}) == 1 and len({*looks[10].values()}) == 4


def test_no_replica_is_late_for_a_round_in_one_process(config: Recipe, tmp_path: Path) -> None:
    """With any patience, and however long a rebuild takes."""
    found = []
    for patience_s in (10.0, 0.001):
        recipe = replicas(config, 4, kind="noloco", every=3)
        exchange = recipe.exchange.model_copy(update={"patience_s": patience_s})
        recipe = recipe.model_copy(update={"exchange": exchange})
        record = train(recipe, tmp_path / str(patience_s), faults=(Fault(step=5, stage=4),))
        assert not [fact for _, fact in record.history if isinstance(fact, RoundWaitExpired)]
        found.append([(metric.step, metric.loss) for metric in record.trained])
    assert found[0] == found[1]
