"""The model speaks: one token after another, greedily or by temperature and top-k."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from planaria.errors import UserError
from planaria.model.stages import Llama


def generate(
    model: Llama,
    tokens: list[int],
    max_new: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """At most ``max_new`` tokens that continue ``tokens``, as they are drawn; they end before the token ``stop``.

    Temperature 0 takes the likeliest token; otherwise one of the ``top_k`` likeliest (all, unless given) is drawn with
    probability softmax(logits / temperature), the same ones for the same seed. Past ``config.context`` tokens the model
    sees the newest ones only. There is no key-value cache: every token reads the whole window again.

    :raises UserError: on an empty prompt, ids outside the vocabulary, and a temperature or top_k out of range.
    """
    vocab = model.config.vocab
    if not tokens:
        raise UserError("generate: the prompt has no tokens; give at least one")
    if unknown := [t for t in tokens if not 0 <= t < vocab]:
        raise UserError(f"generate: token {unknown[0]} is outside the model's vocabulary of {vocab}")
    if temperature < 0:
        raise UserError(f"generate: temperature = {temperature} is negative; 0 is greedy, 1 is the model's own")
    if top_k is not None and top_k < 1:
        raise UserError(f"generate: top_k = {top_k}; give at least 1, or leave it out to draw from all tokens")
    generator = torch.Generator().manual_seed(seed)
    return _continue(model, list(tokens), max_new, temperature, top_k, generator, stop)


def _continue(
    model: Llama,
    tokens: list[int],
    max_new: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    stop: int | None,
) -> Iterator[int]:
    for _ in range(max_new):
        chosen = pick(_last_logits(model, tokens[-model.config.context :]), temperature, top_k, generator)
        if chosen == stop:
            return
        tokens.append(chosen)
        yield chosen


@torch.no_grad()
def _last_logits(model: Llama, window: list[int]) -> Tensor:
    """Logits [V] of the token after ``window``, on the CPU, where draws are the same for every device."""
    device = model.ends.embed_tokens.weight.device
    hidden = model.hidden(torch.tensor([window], device=device))
    return model.ends.logits(hidden[:, -1:])[0, 0].float().cpu()


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token id from logits [V]."""
    if temperature == 0:
        return int(logits.argmax())
    best = logits.topk(min(top_k or len(logits), len(logits)))
    draw = torch.multinomial(torch.softmax(best.values / temperature, 0), 1, generator=generator)
    return int(best.indices[draw])
