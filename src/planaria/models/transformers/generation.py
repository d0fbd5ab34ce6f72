"""Completion by the whole model of ``transformers``: the library's own ``generate``, with planaria's draws.

The library keeps caches and prepares inputs as each architecture needs; the choice of tokens is that of
:class:`planaria.models.sampling.Sampling`, so equal logits and seeds yield equal texts in both families.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.models.family import TextModel
from planaria.models.sampling import Sampling
from planaria.models.transformers.loading import hide_progress
from planaria.models.transformers.skeleton import in_one_line


class LibraryText(TextModel):
    """A model of the library that completes texts of up to ``context`` tokens."""

    def __init__(self, model: Any, context: int) -> None:
        self._model, self._context = model, context

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits

    def generate(self, tokens: Sequence[int], draws: Sampling, stops: Collection[int] = ()) -> Iterator[int]:
        """:raises UserError: if the library fails."""
        return generate(self._model, tokens, self._context, draws, stops)


def generate(
    model: Any, tokens: Sequence[int], context: int, draws: Sampling, stops: Collection[int] = ()
) -> Iterator[int]:
    """Yield at most ``draws.max_new`` tokens that continue ``tokens``, as they are drawn; end before one of ``stops``.

    Beyond ``context`` tokens the model sees the newest ones only, and reads all of them again for every token.

    :raises UserError: if the library fails.
    """
    sequence = list(tokens)
    generator = torch.Generator().manual_seed(draws.seed)
    left = draws.max_new
    while left > 0:
        window = sequence[-context:]
        for token in _Call(model, window, min(left, context - len(window) + 1), draws, generator, stops).run():
            if token in stops:
                return
            sequence.append(token)
            left -= 1
            yield token


@dataclass
class _Call:
    """One call of the library's ``generate``, in a thread, since it returns only when it has all tokens.

    It draws at most ``most`` tokens by numbers of ``generator``, until one of ``stops``.
    """

    model: Any
    tokens: Sequence[int]
    most: int
    draws: Sampling
    generator: torch.Generator
    stops: Collection[int]
    _drawn: queue.SimpleQueue[int | Exception | None] = field(default_factory=queue.SimpleQueue)
    _left: bool = False
    """whether the caller takes no more tokens"""

    def run(self) -> Iterator[int]:
        """Yield the tokens, one of ``stops`` included."""
        thread = threading.Thread(target=self._run, name="planaria-generate", daemon=True)
        thread.start()
        try:
            while (drawn := self._drawn.get()) is not None:
                if isinstance(drawn, Exception):
                    raise UserError(f"generate: transformers fails: {in_one_line(drawn)}") from drawn
                yield drawn
        finally:
            self._left = True
            thread.join()

    def _run(self) -> None:
        end: Exception | None = None
        try:
            with hide_progress():
                self._generate()
        except Exception as error:  # the library may raise anything
            end = error
        self._drawn.put(end)

    def _generate(self) -> None:
        ids = torch.tensor([self.tokens], device=self.model.device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.most,
            do_sample=False,  # only one token is left
            use_cache=True,
            eos_token_id=[*self.stops] or None,
            pad_token_id=0,
            logits_processor=[self._choose],
            stopping_criteria=[self._stop],
        )

    def _choose(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Draw a token by ``scores`` [1, V], pass it on, and leave only its score finite."""
        chosen = self.draws.pick(scores, self.generator)
        self._drawn.put(chosen)
        only = torch.full_like(scores, -torch.inf)
        only[:, chosen] = 0.0
        return only

    def _stop(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), self._left, dtype=torch.bool, device=ids.device)
