"""Tied heads of the ends stages of both families."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import Llama


def library_ends(kind: str) -> tuple[Any, int, int]:
    """Return the ends of a small decoder of ``transformers``, its width and its vocabulary."""
    pytest.importorskip("transformers")
    from small_decoders import section, small, stages_of

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
