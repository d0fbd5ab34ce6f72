"""Real processes that go on where others, of another cut or in another number, stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import (
    apart,
    assert_no_orphans,
    ending,
    facts,
    folder_of,
    inline,
    losses,
    resume,
    tiny,
    train,
    validation_losses,
)

from planaria.cli.commands import train as command
from planaria.cli.commands.replay import replay_run
from planaria.config.schema import RunConfig
from planaria.control import events as e
from planaria.control.logs import read_run
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.faults.trace import Fault
from planaria.lab.inline.engine import InlineEngine
from planaria.report.run.ledger import prove_exactly_once, sample_ledger
from planaria.runtime.checkpoint.loading import stage_for
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.engine import runs


def whole(config: RunConfig, steps: int) -> dict[int, float]:
    """By step, of a run in one process that is never cut otherwise."""
    data = prepare(config.data, config.model.vocab)
    engine = InlineEngine(config, *(Stream(data, split, 32, config.seed) for split in ("train", "validation")))
    return {result.step: result.loss for result in (engine.train_step() for _ in range(steps))}


@pytest.mark.slow
def test_two_stages_go_on_where_four_stopped_and_one_process_where_those_did(tmp_path: Path) -> None:
    """With a clip that binds in every layer."""
    config = tiny(tmp_path, stages=4, steps=6, optim={"clip": 1e-3, "clip_by": "layer"})
    train(config)
    record = resume(folder_of(config), pipeline__stages="2", train__steps="10")
    assert ending(record).outcome == "finished"
    assert {linked.stage for linked in facts(record, e.Linked)[-3:]} == {0, 1, 2}
    for stages, steps, engine in ((1, 12, "inline"), (4, 14, "fleet")):
        flags = {"pipeline.stages": stages, "train.steps": steps, "engine": engine}
        assert command.resume(folder_of(config), flags, quiet=True) == 0
        assert_no_orphans(folder_of(config))
    record = read_run(folder_of(config))
    assert prove_exactly_once(record) == []
    assert losses(record) == whole(config, 14), "to the last bit"


@pytest.mark.slow
def test_a_mixture_goes_on_at_another_cut_and_with_more_replicas(tmp_path: Path) -> None:
    """70 and 30 %: every worker finds its samples by their numbers."""
    texts = {"books": "to be or not to be " * 80, "code": "for i in range(10): print(i) " * 40}
    mixture = {}
    for (name, text), weight in zip(texts.items(), (0.7, 0.3), strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
        mixture[name] = {"source": str(tmp_path / f"{name}.txt"), "weight": weight}
    data, recovery = {"source": "stdlib", "mixture": mixture}, {"strategy": "checkpoint"}
    config = tiny(tmp_path, stages=4, steps=6, data=data, recovery=recovery, optim={"clip": 0.0})
    train(config, faults=[Fault(step=3, stage=2)])
    record = resume(folder_of(config), pipeline__stages="2", train__steps="10")
    assert losses(record) == whole(config, 10), "to the last bit"
    record = resume(folder_of(config), exchange__replicas="2", pipeline__stages="1", train__steps="14")
    assert ending(record).outcome == "finished"
    assert sum(line.samples for line in sample_ledger(record)) == 10 * 8 + 4 * 16


@pytest.mark.slow
def test_documents_are_kept_apart_by_every_worker(tmp_path: Path) -> None:
    """Each finds out by itself which tokens are of one document: also one that takes over, and in validations."""
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{i} bottles of beer"}}\n' for i in range(400)))
    data, recovery = {"source": str(tmp_path / "texts.jsonl"), "document_mask": True}, {"strategy": "redundant"}
    config = tiny(tmp_path, stages=3, steps=6, data=data, recovery=recovery, train={"steps": 6, "eval_every": 3})
    record = train(config, faults=[Fault(step=3, stage=2)])
    assert losses(record) == whole(config, 6), "to the last bit"
    trained, validated = inline(record)
    assert (losses(record), validation_losses(record)) == (trained, validated)
    apart_off = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": False})})
    assert losses(record) != whole(apart_off, 6)


@pytest.mark.slow
def test_two_that_agree_in_every_step_go_on_at_any_cut_and_engine(tmp_path: Path) -> None:
    """Inline every replica has files of its own, on the fleet they have one together: either reads the other's."""
    config = tiny(tmp_path, stages=4, steps=3, optim={"clip": 0.0}, exchange={"replicas": 2})
    train(config)
    shapes = ((1, 6, "inline", [0, 1]), (2, 9, "fleet", []), (2, 12, "inline", [0, 1]))
    for stages, steps, engine, apart_in in shapes:
        flags = {"pipeline.stages": str(stages), "train.steps": str(steps), "engine": engine}
        assert command.resume(folder_of(config), flags, quiet=True) == 0
        saved = CheckpointStore(folder_of(config) / "checkpoints").newest()
        assert saved is not None and sorted(saved.manifest.standings) == apart_in
    record = read_run(folder_of(config))
    assert prove_exactly_once(record) == []
    assert losses(record) == whole(config, 12), "to the last bit"


@pytest.mark.slow
def test_three_that_agree_in_every_step_go_on_where_two_met_now_and_then(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their steps take 24 samples, and 80 were used: blocks are shifted, and no sample is used twice."""
    exchange = {"replicas": 2, "kind": "noloco", "options": {"every": 3}}
    config = tiny(tmp_path, stages=2, steps=5, exchange=exchange)
    train(config)
    folder = folder_of(config)
    saved = CheckpointStore(folder / "checkpoints").newest()
    assert saved is not None and saved.manifest.samples == 80
    flags = {"exchange__replicas": "3", "exchange__kind": "allreduce", "pipeline__stages": "1"}
    record = resume(folder, **flags, train__steps="8")
    assert ending(record).outcome == "finished"
    started = facts(record, e.RunStarted)[-1]
    assert (started.offset, started.first_of(3)) == (8, 80)
    assert "2 replicas, now 3 replicas: they begin from the mean of weights and moments" in capfd.readouterr().out
    shape = "step-00000005: 2 stages, 2 replicas (noloco), now 1 stage, 3 replicas (allreduce)"
    assert f"went on in another shape: {shape}" in replay_run(folder)
    after = runs.config_of(folder)
    data = prepare(after.data, after.model.vocab)
    engine = InlineEngine(after, *(Stream(data, split, 32, after.seed) for split in ("train", "validation")))
    states = {n: stage_for(saved.folder, after, s, n // 2) for n, s in engine.stage.items()}
    engine.become(states)
    engine.step, engine.sample_offset = 5, 80 - 5 * after.samples
    found = {result.step: result.loss for result in (engine.train_step() for _ in range(3))}
    assert apart({step: losses(record)[step] for step in found}, found) < 1e-6
    last = CheckpointStore(folder / "checkpoints").newest()
    assert last is not None and last.manifest.samples == 80 + 3 * 24
    assert all(torch.isfinite(w).all() for w in stage_for(last.folder, after, 1).weights.values())
