"""Document masks: documents in one sample do not attend to each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planaria.config.schema import ModelConfig
from planaria.models.llama_layers import document_mask
from planaria.models.llama_stages import Llama

END = 9
CONFIG = ModelConfig(vocab=10, dim=16, layers=3, heads=4, kv_heads=2, hidden=24, context=12, ends_layers=1)
TOKENS = torch.tensor([[1, 2, 3, END, 4, 5, 6, 7, END, END, 8, 1], [2] * 12])


def test_a_separator_begins_the_next_document() -> None:
    rows = ["".join("x" if seen else "." for seen in row) for row in document_mask(TOKENS, END)[0, 0].tolist()]
    assert rows == [
        "x...........",
        "xx..........",
        "xxx.........",
        "...x........",
        "...xx.......",
        "...xxx......",
        "...xxxx.....",
        "...xxxxx....",
        "........x...",
        ".........x..",
        ".........xx.",
        ".........xxx",
    ]
    assert torch.equal(document_mask(TOKENS, END)[1, 0], torch.ones(12, 12, dtype=torch.bool).tril())


def logits(model: Llama, tokens: Tensor, masked: bool = True) -> Tensor:
    mask = document_mask(tokens, END) if masked else None
    x = model.ends.embed(tokens, mask)
    for stage in model.stages:
        x = stage(x, mask)
    return model.ends.logits(x)


def test_a_document_has_the_logits_that_it_has_alone() -> None:
    """Positions differ, but rotary attention depends on distances only."""
    model = Llama(CONFIG, stages=2, seed=1)
    together = logits(model, TOKENS)
    for first, stop in ((0, 3), (3, 8), (8, 9), (9, 12)):
        alone = logits(model, TOKENS[:1, first:stop], masked=False)
        assert torch.allclose(together[0, first:stop], alone[0], atol=1e-6)
    assert torch.allclose(together[1], logits(model, TOKENS, masked=False)[1], atol=1e-6)
    assert not torch.allclose(together[0], logits(model, TOKENS, masked=False)[0], atol=1e-3)


def test_other_documents_have_no_influence() -> None:
    """Neither on values nor on gradients, bit for bit."""
    model = Llama(CONFIG, stages=2, seed=1)
    changed = TOKENS.clone()
    changed[0, :3] = torch.tensor([7, 7, 7])
    assert torch.equal(logits(model, TOKENS)[:, 3:], logits(model, changed)[:, 3:])
    logits(model, TOKENS)[0, 3:].sum().backward()
    grad = model.ends.embed_tokens.weight.grad
    assert grad is not None
    assert grad[[2, 3]].abs().sum() == 0 and grad[4].abs().sum() > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_and_cuts_give_equal_gradients(recompute: bool) -> None:
    model = Llama(CONFIG, stages=2, seed=1)
    for stage in (model.ends, *model.stages):
        stage.recompute = recompute  # type: ignore[assignment]
    logits(model, TOKENS).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    plain = Llama(CONFIG, stages=1, seed=1)
    logits(plain, TOKENS).square().sum().backward()
    named = [p.grad for p in plain.parameters() if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(found, named, strict=True))
