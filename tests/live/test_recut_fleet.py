"""Real processes that resume the checkpoints of others with another cut or number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import planaria
from planaria.cli.commands.check import replay_run
from planaria.control.facts import events as e
from planaria.faults.trace import Fault
from planaria.lab.reference.engine import ReferenceEngine
from planaria.report.run.sample_ledger import sample_ledger
from planaria.runtime.checkpoint.loading import load_stage
from planaria.runtime.preparation import run_folders
from support.live.harness import (
    apart,
    ending,
    facts,
    folder_of,
    inline,
    inline_losses,
    losses,
    newest,
    resume,
    tiny,
    train,
)


@pytest.mark.slow
def test_two_stages_resume_from_four_and_one_process_from_those(tmp_path: Path) -> None:
    """With a clip that binds in every layer."""
    config = tiny(tmp_path, stages=4, steps=6, optim={"clip": 1e-3, "clip_by": "layer"})
    train(config)
    record = resume(folder_of(config), pipeline__stages="2", train__steps="10")
    assert ending(record).outcome == "finished"
    assert {linked.stage for linked in facts(record, e.Linked)[-3:]} == {0, 1, 2}
    for stages, steps, engine in (("1", "12", "inline"), ("4", "14", "fleet")):
        record = resume(folder_of(config), pipeline__stages=stages, train__steps=steps, engine=engine)
    assert losses(record) == inline_losses(config, 14), "to the last bit"


@pytest.mark.slow
def test_a_mixture_resumes_at_another_cut_and_with_more_replicas(tmp_path: Path) -> None:
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
    assert losses(record) == inline_losses(config, 10), "to the last bit"
    record = resume(folder_of(config), exchange__replicas="2", pipeline__stages="1", train__steps="14")
    assert ending(record).outcome == "finished"
    assert sum(line.samples for line in sample_ledger(record)) == 10 * 8 + 4 * 16


@pytest.mark.slow
def test_every_worker_applies_the_document_mask(tmp_path: Path) -> None:
    """Each computes the mask itself: also a worker that takes a stage over, and in validations."""
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{i} bottles of beer"}}\n' for i in range(400)))
    data, recovery = {"source": str(tmp_path / "texts.jsonl"), "document_mask": True}, {"strategy": "redundant"}
    config = tiny(tmp_path, stages=3, steps=6, data=data, recovery=recovery, train={"steps": 6, "eval_every": 3})
    record = train(config, faults=[Fault(step=3, stage=2)])
    assert losses(record) == inline_losses(config, 6), "to the last bit"
    assert (losses(record), {m.step: m.val_loss for m in record.validated}) == inline(record)
    unmasked = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": False})})
    assert losses(record) != inline_losses(unmasked, 6)


@pytest.mark.slow
def test_two_all_reduced_replicas_resume_at_any_cut_and_engine(tmp_path: Path) -> None:
    """All replicas share one set of files, on either engine."""
    config = tiny(tmp_path, stages=4, steps=3, optim={"clip": 0.0}, exchange={"replicas": 2})
    train(config)
    for stages, steps, engine in (("1", "6", "inline"), ("2", "9", "fleet"), ("2", "12", "inline")):
        record = resume(folder_of(config), pipeline__stages=stages, train__steps=steps, engine=engine)
        assert newest(folder_of(config)).manifest.positions == {}
    assert losses(record) == inline_losses(config, 12), "to the last bit"


@pytest.mark.slow
def test_three_all_reduced_replicas_resume_two_of_noloco(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their steps take 24 samples, and 80 were used: sample blocks are shifted so that none is used twice."""
    exchange = {"replicas": 2, "kind": "noloco", "options": {"every": 3}}
    config = tiny(tmp_path, stages=2, steps=5, exchange=exchange)
    train(config)
    folder = folder_of(config)
    saved = newest(folder)
    assert saved.manifest.samples == 80
    flags = {"exchange__replicas": "3", "exchange__kind": "allreduce", "pipeline__stages": "1"}
    record = resume(folder, **flags, train__steps="8")
    assert ending(record).outcome == "finished"
    started = facts(record, e.RunStarted)[-1]
    assert (started.offset, started.first_of(3)) == (8, 80)
    assert "2 replicas, now 3 replicas: they begin from the mean of weights and moments" in capfd.readouterr().out
    shape = "step-00000005: 2 stages, 2 replicas (noloco), now 1 stage, 3 replicas (allreduce)"
    assert f"continued in another shape: {shape}" in replay_run(folder)
    after = run_folders.config_of(folder)
    engine = ReferenceEngine(after, *planaria.streams(after))
    engine.load_states({n: load_stage(saved.folder, after, s, n // 2) for n, s in engine.stage.items()})
    engine.step, engine.sample_offset = 5, 80 - 5 * after.samples
    found = {result.step: result.loss for result in (engine.train_step() for _ in range(3))}
    assert apart({step: losses(record)[step] for step in found}, found) < 1e-6
    last = newest(folder)
    assert last.manifest.samples == 80 + 3 * 24
    assert all(torch.isfinite(w).all() for w in load_stage(last.folder, after, 1).weights.values())
