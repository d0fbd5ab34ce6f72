"""Runs with a document mask: the same at every cut and in `planaria eval`, and off unless requested."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import planaria
from planaria.cli.commands.evaluate import evaluate
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.models.llama_layers import document_mask
from planaria.models.llama_stages import Llama
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.worker.step_samples import batches, masks
from support import dialogue_corpus
from support.tiny_engine import config_in, engine_of, losses, train_stream


def recipe(home: Path, apart: bool = True, **sections: Any) -> RunConfig:
    """A tiny run on documents that are shorter than a sample."""
    file = home / "documents.jsonl"
    if not file.exists():
        rng = random.Random(1)
        texts = ("".join(rng.choices("abcdef ", k=rng.randint(3, 12))) for _ in range(300))
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"source": str(file), "document_mask": apart, "validation": 0.2}
    return config_in(home, data=data, **sections)


def test_every_cut_trains_as_the_whole_model(tmp_path: Path) -> None:
    def at(stages: int, **model: int) -> list[float]:
        sections: dict[str, Any] = {"pipeline": {"stages": stages}, "model": model, "optim": {"clip": 0.0}}
        engine = engine_of(recipe(tmp_path, **sections))
        return [*losses(engine, 4), engine.evaluate()]

    four = at(4)
    assert four == at(1) == at(2, ends_layers=2)
    config = recipe(tmp_path)
    stream = train_stream(config)
    batch = batches(stream, 0, config.pipeline.microbatch_size)
    apart = masks(config.data, stream, batch, 0, config.pipeline.microbatch_size)
    whole, found = Llama(config.model, 4, config.seed), []
    for microbatch in range(config.pipeline.microbatches):
        tokens, targets = batch(microbatch)
        mask = document_mask(tokens, 256)
        assert torch.equal(mask, apart(microbatch)) and not torch.equal(mask, torch.ones_like(mask).tril())
        x = whole.ends.embed(tokens)
        for stage in whole.stages:
            x = stage(x, mask)
        found.append(whole.ends.loss(x, targets) / config.pipeline.microbatches)
    assert torch.stack(found).sum().item() == four[0]


@pytest.mark.parametrize("strategy", ["redundant", "checkfree"])
def test_lost_stages_are_restored(tmp_path: Path, strategy: str) -> None:
    """Twins compute what their stages do; a rebuilt stage trains on."""
    engine = engine_of(recipe(tmp_path, recovery={"strategy": strategy}))
    losses(engine, 3)
    assert not engine.lose([2]).reason
    further = losses(engine, 3)
    whole = losses(engine_of(recipe(tmp_path)), 6)[3:]
    assert (further == whole) == (strategy == "redundant")
    assert whole != losses(engine_of(recipe(tmp_path, apart=False)), 6)[3:], "the mask changes losses"


def test_copies_use_the_masks_of_their_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planaria.runtime.worker.runner import StageRunner

    passed: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    plain, shadow = StageRunner.forward, StageRunner.forward_copy
    inside = [False]

    def forward(self: StageRunner, microbatch: int, hop: int, x: torch.Tensor | None) -> torch.Tensor | None:
        y = plain(self, microbatch, hop, x)
        if self.stage == 2 and y is not None:
            passed[inside[0]].append(y)
        return y

    def shadowed(self: StageRunner, microbatch: int, x: torch.Tensor) -> None:
        inside[0] = True
        shadow(self, microbatch, x)
        inside[0] = False

    monkeypatch.setattr(StageRunner, "forward", forward)
    monkeypatch.setattr(StageRunner, "forward_copy", shadowed)
    losses(engine_of(recipe(tmp_path, recovery={"strategy": "redundant"})), 3)
    own, twins = passed[False], passed[True]
    assert len(twins) == 2 * 4  # the twin has a state after the first step
    assert all(torch.equal(one, other) for one, other in zip(own[4:], twins, strict=True))


def test_eval_applies_the_mask(tmp_path: Path) -> None:
    train = {"steps": 3, "eval_every": 3, "eval_microbatches": 4}
    config = recipe(tmp_path, train=train).model_copy(update={"engine": "inline", "out": str(tmp_path / "runs")})
    planaria.train(config, progress=False)
    folder = tmp_path / "runs" / "run"
    evaluate(folder, "0.25", 4, None)
    whole = json.loads((folder / "omission.json").read_text())[0]
    last = list(read_run(folder).validated)[-1].val_loss
    assert torch.tensor(whole["perplexity"]).log().item() == pytest.approx(last, rel=1e-6)


def test_families_without_masks_are_refused(tmp_path: Path) -> None:
    from planaria.models.llama_stages import LlamaFamily

    check(recipe(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaFamily, "accepts_document_mask", False)
        with pytest.raises(UserError, match=r"data\.document_mask: model\.family = 'llama' takes no masks"):
            check(recipe(tmp_path))
        with pytest.raises(UserError, match=r"takes no masks; set data\.pack = false, which needs none"):
            check(config_in(tmp_path, data=dialogue_corpus.write_dialogues(tmp_path)))
