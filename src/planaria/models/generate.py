"""Complete one text token by token, greedily or by temperature and top-k."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from planaria.models.decode import DecodingBatch
from planaria.models.family import TextModel
from planaria.models.llama_stages import Llama
from planaria.models.sampling import Sampling, check_ids


def generate(
    model: Llama,
    tokens: list[int],
    max_new: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stops: Collection[int] = (),
) -> Iterator[int]:
    """Yield at most ``max_new`` tokens that continue ``tokens``, as they are drawn; end before one of ``stops``.

    Temperature 0 is greedy. Otherwise draw from the ``top_k`` likeliest (default: all) with probability softmax(logits
    / temperature), reproducibly for the same seed. Beyond ``config.context`` tokens the model sees the newest ones
    only, and every token reads that whole window again, because all positions change. So memory is bounded by the
    context.

    :raises UserError: for an empty prompt, ids outside the vocabulary, and a length, temperature, top_k or seed out of
        range.
    """
    check_ids(tokens, model.config.vocab)
    draws = Sampling(max_new, temperature, top_k, seed)
    draws.check()
    return _continue(model, list(tokens), draws, stops)


class LlamaText(TextModel):
    """A LLaMA that completes texts."""

    def __init__(self, model: Llama) -> None:
        self._model = model

    def logits(self, tokens: Tensor) -> Tensor:
        return self._model.forward(tokens)

    def generate(self, tokens: Sequence[int], draws: Sampling, stops: Collection[int] = ()) -> Iterator[int]:
        return generate(self._model, [*tokens], *draws, stops)


def texts(ids: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the text of ``ids`` as they arrive; the pieces join to ``decode`` of all of them.

    A piece is held back while it ends within a character.
    """
    tokens_so_far: list[int] = []
    before = done = 0  # tokens_so_far[before:done] were yielded; they are decoded again as context of the next ids
    for token in ids:
        tokens_so_far.append(token)
        whole, old = decode(tokens_so_far[before:]), decode(tokens_so_far[before:done])
        if len(whole) > len(old) and not whole.endswith("\ufffd"):
            yield whole[len(old) :]
            before, done = done, len(tokens_so_far)
    if rest := decode(tokens_so_far[before:])[len(decode(tokens_so_far[before:done])) :]:
        yield rest


def _continue(model: Llama, tokens: list[int], draws: Sampling, stops: Collection[int]) -> Iterator[int]:
    context = model.config.context
    reading = None
    generator = torch.Generator().manual_seed(draws.seed)
    for _ in range(draws.max_new):
        if reading is not None and len(tokens) <= context:
            reading.read(torch.tensor(tokens[-1:], device=reading.logits.device))
        else:
            reading = DecodingBatch(model, [tokens[-context:]], min(draws.max_new, max(0, context - len(tokens))))
        chosen = draws.pick(reading.logits, generator)
        if chosen in stops:
            return
        tokens.append(chosen)
        yield chosen
