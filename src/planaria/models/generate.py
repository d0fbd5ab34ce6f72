"""Complete one text token by token, greedily or by temperature and top-k."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from planaria.common.errors import UserError
from planaria.models.decode import Reading, check_draws, check_one, check_prompts, pick
from planaria.models.llama_stages import Llama


def generate(
    model: Llama,
    tokens: list[int],
    max_new: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield at most ``max_new`` tokens that continue ``tokens``, as they are drawn; end before ``stop``.

    Temperature 0 is greedy. Otherwise draw from the ``top_k`` likeliest (default: all) with probability softmax(logits
    / temperature), reproducibly for the same seed. Beyond ``config.context`` tokens the model sees the newest ones
    only, and every token reads that whole window again, because all positions change. So memory is bounded by the
    context.

    :raises UserError: for an empty prompt, ids outside the vocabulary, and a length, temperature, top_k or seed out of
        range.
    """
    check_prompts(model, [tokens], at_most=len(tokens))
    if top_k is not None and top_k < 1:
        raise UserError(f"generate: top_k = {top_k}; give at least 1, or leave it out to draw from all tokens")
    check_draws(temperature, top_k or 0)
    check_one(max_new, seed)
    generator = torch.Generator().manual_seed(seed)
    return _continue(model, list(tokens), max_new, temperature, top_k or 0, generator, stop)


def texts(ids: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the text of ``ids`` as they arrive; the pieces join to ``decode`` of all of them.

    A piece is held back while it ends within a character.
    """
    known: list[int] = []
    before = done = 0  # known[before:done] have been given out; they are decoded again as what the next ids follow
    for one in ids:
        known.append(one)
        whole, old = decode(known[before:]), decode(known[before:done])
        if len(whole) > len(old) and not whole.endswith("\ufffd"):
            yield whole[len(old) :]
            before, done = done, len(known)
    if rest := decode(known[before:])[len(decode(known[before:done])) :]:
        yield rest


def _continue(
    model: Llama,
    tokens: list[int],
    max_new: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    stop: int | None,
) -> Iterator[int]:
    context, reading = model.config.context, None
    for _ in range(max_new):
        if reading is not None and len(tokens) <= context:
            reading.read(torch.tensor(tokens[-1:], device=reading.logits.device))
        else:
            reading = Reading(model, [tokens[-context:]], min(max_new, max(0, context - len(tokens))))
        # Numbers and choice on the CPU, where they are the same for every device.
        uniform = torch.rand(1, generator=generator)
        chosen = int(pick(reading.logits.float().cpu(), temperature, top_k, uniform))
        if chosen == stop:
            return
        tokens.append(chosen)
        yield chosen
