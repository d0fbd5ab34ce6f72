"""Runs on dialogues: a step's loss is the mean over all its targets, however they are spread over microbatches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.nn import functional as F

import planaria
from planaria.cli.commands.evaluate import evaluate
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.models.llama_layers import mask_of
from planaria.models.llama_stages import BlockStage, Llama, LlamaFamily
from planaria.runtime.preparation.unused_settings import require_used
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepInputs, batches, computed_length, learned_targets, masks
from support import dialogue_corpus
from support.tiny_engine import config_in, engine_of, losses, train_stream

SMALL = {"model": {"layers": 2, "context": 24}, "optim": {"clip": 0.0}}


def recipe(
    home: Path, microbatches: int = 4, size: int = 2, stages: int = 2, longest: int = 12, **sections: Any
) -> RunConfig:
    pipeline = {"stages": stages, "microbatches": microbatches, "microbatch_size": size, **sections.pop("pipeline", {})}
    given = {**SMALL, "pipeline": pipeline, **sections}
    return config_in(
        home,
        data={**dialogue_corpus.write_dialogues(home, longest=longest), **given.pop("data", {}), "validation": 0.2},
        **given,
    )


@pytest.mark.parametrize(("pack", "longest", "size"), [(True, 12, 2), (False, 12, 2), (False, 40, 1)])
def test_a_step_has_the_gradient_of_the_mean_over_its_targets(
    tmp_path: Path, pack: bool, longest: int, size: int
) -> None:
    """Four microbatches of ``size`` samples, whose answers have from one token to ``longest`` and the end token."""
    config = recipe(
        tmp_path, size=size, model={"layers": 2, "context": 2 * longest}, data={"pack": pack}, longest=longest
    )
    stream, engine = train_stream(config), engine_of(config)
    whole = Llama(config.model, 2, config.seed)
    tokens, targets = stream.batch(0, 4 * size)
    mask = mask_of(stream.documents(0, tokens)) if pack else None
    counts = [int((part >= 0).sum()) for part in targets.split(size)]
    assert max(counts) > min(counts) * (10 if longest == 40 else 1), "answers differ much in length"
    assert stream.learned(0, 4 * size).sum() == sum(counts)
    x = whole.ends.embed(tokens, mask)
    for stage in whole.stages:
        x = stage(x, mask)
    loss = F.cross_entropy(whole.ends.logits(x).flatten(0, 1), targets.flatten())
    loss.backward()
    whole.ends.fold_gradients()
    kept: dict[int, dict[str, torch.Tensor]] = {}
    computed = list[int]()
    engine.runners[1].module.register_forward_pre_hook(lambda module, inputs: computed.append(inputs[0].shape[1]))
    for node, runner in engine.runners.items():
        commit = runner.commit

        def keep(step: int, node: int = node, runner: StageRunner = runner, commit: Any = commit) -> None:
            kept[node] = {name: grad.clone() for name, grad in runner.grads.items()}
            commit(step)

        runner.commit = keep  # type: ignore[method-assign]
    assert engine.train_step().loss == pytest.approx(loss.item(), rel=1e-6)
    for node, module in enumerate([whole.ends, *whole.stages]):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(kept[node][name], parameter.grad, rtol=1e-5, atol=1e-7)
    assert computed == [computed_length((part >= 0).numpy()) for part in targets.split(size)]
    assert size > 1 or min(computed) < 2 * longest, "padding is not computed"


def computed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[float]]:
    """Return the tokens of each pass of block stages, and the losses, of three steps."""
    engine, passes = engine_of(config), list[int]()

    def forward(self: BlockStage, x: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        passes.append(x.shape[1])
        return whole(self, x, *mask)

    whole = BlockStage.forward
    with monkeypatch.context() as patch:
        patch.setattr(BlockStage, "forward", forward)
        return passes, losses(engine, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"recovery": {"strategy": "redundant, checkpoint"}},
        {"pipeline": {"wire": "6/4"}, "train": {"recompute": True}},
        {"data": {"pack": True, "document_mask": True}},
        {"exchange": {"replicas": 4, "coded": {"scheme": "gc", "stragglers": 1}}, "microbatches": 2},
    ],
)
def test_padding_is_not_computed_and_has_no_effect(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by twins, with codecs and masks, and in coded steps."""
    sections = {"data": {"pack": False}, "model": {"layers": 2, "context": 77}} | changes
    config = recipe(tmp_path, size=1, longest=40, **sections)
    passes, found = computed(config, monkeypatch)
    assert max(passes) <= 77 and sum(passes) < (0.95 if config.data.pack else 0.8) * 77 * len(passes)
    monkeypatch.setattr(LlamaFamily, "accepts_shorter_samples", lambda family: False)
    passes, expected = computed(config, monkeypatch)
    assert {*passes} == {77} and found == pytest.approx(expected, rel=1e-5)


def test_a_subspace_computes_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its codec would send the zeros of padding as large numbers."""
    model = {"layers": 2, "context": 24, "tied": False}
    config = recipe(tmp_path, size=1, model=model, pipeline={"wire": {"kind": "subspace", "rank": 8}})
    assert {*computed(config, monkeypatch)[0]} == {24}


@given(arrays(np.bool_, st.tuples(st.integers(1, 3), st.integers(1, 40))))
def test_all_targets_are_among_the_computed_tokens(learned: npt.NDArray[np.bool_]) -> None:
    length = computed_length(learned)
    assert not learned[:, length:].any() and 1 <= length <= learned.shape[1]
    assert length in (8, learned.shape[1]) or (length % 8 == 0 and learned[:, length - 8 : length].any())


def test_the_cut_into_microbatches_and_replicas_does_not_matter(tmp_path: Path) -> None:
    expected = losses(engine_of(recipe(tmp_path, microbatches=8, size=1)), 4)
    for cut in (
        recipe(tmp_path, microbatches=1, size=8),
        recipe(tmp_path, microbatches=2, exchange={"replicas": 2, "kind": "allreduce"}),
        recipe(tmp_path, microbatches=2, exchange={"replicas": 2, "kind": "allreduce"}, routing={"mixed": True}),
        recipe(tmp_path, microbatches=2, size=1, exchange={"replicas": 4, "coded": {"scheme": "gc", "stragglers": 1}}),
        recipe(tmp_path, microbatches=4, stages=1),
    ):
        assert losses(engine_of(cut), 4) == pytest.approx(expected, rel=1e-5)


def test_a_stage_that_routes_skip_takes_the_mean_over_the_targets_it_saw(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    stream = train_stream(config)
    batch, apart = batches(stream, 0, 2), masks(config.data, stream, batches(stream, 0, 2), 0, 2)
    counts = learned_targets(stream, 0, 2, 4)
    assert counts is not None and apart is not None

    def gradient(microbatches: list[int]) -> dict[str, torch.Tensor]:
        """Of stage 1, if only these microbatches pass through it."""
        ends, block = (StageRunner(config, stage) for stage in (0, 1))
        for runner in (ends, block):
            runner.begin(StepInputs(None if runner is block else batch, True, 4, apart, target_counts=counts))
        for microbatch in range(4):
            x = ends.forward(microbatch, 0, None)
            if microbatch in microbatches:
                x = block.forward(microbatch, 1, x)
            ends.forward(microbatch, 2, x)
            grad = ends.backward(microbatch, 2, None)
            if microbatch in microbatches:
                block.backward(microbatch, 1, grad)
        block.rescale_for_skips()
        return {name: grad.clone() for name, grad in block.grads.items()}

    some, parts = gradient([0, 3]), [gradient([n]) for n in (0, 3)]
    shares = [counts.counts[n] / (counts.counts[0] + counts.counts[3]) for n in (0, 3)]
    assert shares[0] != 0.5
    for name, grad in some.items():
        expected = sum(share * part[name] for share, part in zip(shares, parts, strict=True))
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("exchange", [{"kind": "noloco", "options": {"every": 3}}, {"kind": "local"}])
def test_replicas_that_step_alone_take_the_mean_over_their_own_targets(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    config = recipe(tmp_path, microbatches=2, exchange={"replicas": 2, **exchange})
    engine, stream = engine_of(config), train_stream(config)
    found: dict[int, float | None] = {}
    for node, runner in engine.runners.items():
        if runner.stage == 0:
            finish = runner.finish

            def note(node: int = node, runner: StageRunner = runner, finish: Any = finish) -> float | None:
                found[node] = runner.loss
                norm: float | None = finish()
                return norm

            runner.finish = note  # type: ignore[method-assign]
    engine.train_step()
    whole = Llama(config.model, 2, config.seed)
    for first, loss in zip((0, 4), (loss for _, loss in sorted(found.items())), strict=True):
        tokens, targets = stream.batch(first, 4)
        mask = mask_of(stream.documents(first, tokens))
        x = whole.ends.embed(tokens, mask)
        for stage in whole.stages:
            x = stage(x, mask)
        expected = F.cross_entropy(whole.ends.logits(x).flatten(0, 1), targets.flatten())
        assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_packed_dialogues_do_not_see_each_other(tmp_path: Path) -> None:
    """The first dialogue of a row is another; the loss of the second stays."""
    config = recipe(tmp_path)
    stream, whole = train_stream(config), Llama(config.model, 2, config.seed)
    n = next(n for n in range(stream.windows) if int(stream.documents(n, stream.batch(n, 1)[0]).max()) > 1)
    tokens, _ = stream.batch(n, 1)
    numbers = stream.documents(n, tokens)
    second, found = int((numbers[0] == 1).sum()), []
    for shift in (0, 1):
        changed = tokens.clone()
        changed[0, :second] = (changed[0, :second] + shift) % 257
        x = whole.ends.embed(changed, mask_of(numbers))
        for stage in whole.stages:
            x = stage(x, mask_of(numbers))
        found.append(whole.ends.logits(x)[0, second:])
    assert 0 < second < tokens.shape[1] and torch.equal(*found)


def test_eval_weighs_microbatches_by_their_targets(tmp_path: Path) -> None:
    train = {"steps": 2, "eval_every": 2, "eval_microbatches": 3}
    config = recipe(tmp_path, train=train).model_copy(update={"engine": "inline", "out": str(tmp_path / "runs")})
    planaria.train(config, progress=False)
    evaluate(tmp_path / "runs" / "run", None, 4, None)  # a quarter of two stages is none
    whole = json.loads((tmp_path / "runs" / "run" / "omission.json").read_text())[0]
    last = list(read_run(tmp_path / "runs" / "run").validated)[-1].val_loss
    assert torch.tensor(whole["perplexity"]).log().item() == pytest.approx(last, rel=1e-6)


def test_an_export_has_the_chat_template_of_the_dialogues(tmp_path: Path) -> None:
    """Also of a run that starts from no weights."""
    config = recipe(tmp_path, train={"steps": 1}).model_copy(update={"engine": "inline", "out": str(tmp_path / "runs")})
    planaria.train(config, progress=False)
    assert (tmp_path / "runs" / "run" / "model" / "chat_template.jinja").read_text() == dialogue_corpus.TEMPLATE


def test_settings_of_dialogues_are_refused_for_texts_and_the_reverse(tmp_path: Path) -> None:
    texts = {"source": "stdlib", "format": "text", "template": None}
    for field, value in (("learn", "last"), ("pack", False), ("template", "a.jinja")):
        with pytest.raises(UserError, match=rf"data\.{field} = .*: it is for dialogues, and these are texts"):
            require_used(recipe(tmp_path, data={**texts, field: value}))
    with pytest.raises(UserError, match=r"data\.tokenization = 'legacy': it is for texts, and these are dialogues"):
        require_used(recipe(tmp_path, data={"tokenization": "legacy"}))
    mixture = {"mixture": {"a": {"source": "stdlib", "weight": 1}}, "source": "stdlib", "template": None}
    with pytest.raises(UserError, match=r"data\.format = 'messages': with data\.mixture, each source has its own"):
        require_used(recipe(tmp_path, data={**mixture, "format": "messages"}))


def test_few_dialogues_leave_none_to_validate_with(tmp_path: Path) -> None:
    (tmp_path / "dialogues.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    (tmp_path / "dialogues.jinja").write_text(dialogue_corpus.TEMPLATE)
    with pytest.raises(UserError, match=r"has no dialogue; .*, or train\.eval_every = 0 or a larger data\.validation"):
        planaria.train(recipe(tmp_path, train={"eval_every": 1}), progress=False)
