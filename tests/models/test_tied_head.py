"""Tied heads, and the chunked loss: equal values and gradients, less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from planaria.config.schema import ModelConfig
from planaria.models import chunked_loss
from planaria.models.chunked_loss import head_loss
from planaria.models.llama_stages import Llama


def library_ends(kind: str) -> tuple[Any, int, int]:
    """Return the ends of a small decoder of ``transformers``, its width and its vocabulary."""
    pytest.importorskip("transformers")
    from support.small_decoders import section, small, stages_of

    decoder = small(kind)
    config = section(decoder)
    return stages_of(decoder, config, 4)[0][0], config.dim, config.vocab


def ends(kind: str) -> tuple[Any, int, int]:
    if kind != "llama":
        return library_ends(kind)
    config = ModelConfig(vocab=12, dim=16, layers=2, heads=4, hidden=24, context=8, tied=True)
    return Llama(config, stages=2, seed=1).ends, config.dim, config.vocab


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_copy_of_tied_ends_stays_tied(kind: str) -> None:
    one, width, _ = ends(kind)
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.table.add_(1.0)
    x = torch.randn(1, 3, width)
    assert not torch.equal(other.logits(x), one.logits(x))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "moved": lambda module: module.to(torch.float64),
    "copied": copy.deepcopy,
    "loaded": lambda module: (module.load_state_dict(module.state_dict()), module)[1],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_gradient_of_the_head_outlives_changes_of_the_module(kind: str, change: str) -> None:
    """One that is not folded yet, as in a step whose ends move to another device."""
    found = []
    for changed in (False, True):
        torch.manual_seed(1)
        one, width, vocab = ends(kind)
        one.loss(torch.randn(2, 4, width), torch.randint(0, vocab, (2, 4))).backward()
        one = CHANGES[change](one) if changed else one
        one.fold_gradients()
        found.append(one.table.grad)
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(found[1].float(), found[0], rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(2, 50), st.integers(1, 45), st.integers(0, 1 << 30))
def test_loss_and_gradients_match_those_of_all_logits(tokens: int, dim: int, vocab: int, rows: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, dim, generator=draw, requires_grad=True)
    head = torch.randn(vocab, dim, generator=draw, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), generator=draw)
    whole = F.cross_entropy(x @ head.T, targets)
    wanted = torch.autograd.grad(whole * 0.7, (x, head))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "CPU_BYTES", 4 * vocab * rows)
        loss = head_loss(x, head, targets)
        found = torch.autograd.grad(loss * 0.7, (x, head))
        with torch.no_grad():
            assert torch.allclose(head_loss(x, head, targets), whole, atol=1e-6)
    assert torch.allclose(loss, whole, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6, rtol=1e-5)


def test_under_autocast_the_error_is_that_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x, head = torch.randn(64, 32, requires_grad=True), torch.randn(300, 32, requires_grad=True)
    targets = torch.randint(300, (64,))
    exact = torch.autograd.grad(F.cross_entropy(x @ head.T, targets), (x, head))
    errors = []
    for chunk in (1 << 30, 4 * 300 * 10):
        monkeypatch.setattr(chunked_loss, "CPU_BYTES", chunk)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = head_loss(x, head, targets)
        assert loss.dtype == torch.float32
        found = torch.autograd.grad(loss, (x, head))
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)])
    assert all(ours <= 1.5 * theirs for theirs, ours in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(("compiled", "rows"), [(True, 40_000), (False, 8_888)])
def test_a_chunk_has_as_many_rows_as_device_memory_allows(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, rows: int
) -> None:
    """A sixteenth of 80 GB, with a vocabulary of 32,000 in bf16."""
    monkeypatch.setattr(chunked_loss, "_device_bytes", lambda _: 16 * 32_000 * 160_000)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    assert chunked_loss.rows_on(torch.device("cuda"), 32_000, 2) == rows
    assert chunked_loss.rows_on(torch.device("cpu"), 32_000, 2) == 262
