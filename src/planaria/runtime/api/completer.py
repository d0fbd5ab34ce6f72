"""Complete texts with a trained model: of a run, in a folder, or in a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from planaria.models.chat import Template, template_in
from planaria.models.families import make_family
from planaria.models.foreign_weights import WeightsFile
from planaria.models.generate import LlamaText, texts
from planaria.models.llama_stages import Llama
from planaria.models.sampling import Sampling, check_ids
from planaria.runtime.preparation.weight_sources import open_weights, tokenizer_of


class Completer:
    """A model in memory that completes token ids."""

    def __init__(self, source: str | Path) -> None:
        """Load the model at a path or "hf:OWNER/NAME".

        :raises UserError: if there is none, it is damaged, or its tokenizer is missing.
        """
        weights = open_weights(source, family="")
        self.place, self.tokenizer = weights.path, tokenizer_of(weights)
        self.template: Template | None = template_in(weights.usage, weights.path)
        """its chat template"""
        self.ends = weights.usage.ends if weights.usage is not None else ()
        """further ids after which it has no more to write"""
        self.vocab, self.context = weights.config.vocab, _context(weights)
        """ids, and tokens of the longest text that it reads"""
        self.llama: Llama | None = None
        """the model, if it is a LLaMA"""
        model = make_family(weights.config).text_model(weights.config, weights.tensor, self.context)
        if model is None:
            longer = weights.config.model_copy(update={"context": self.context})
            self.llama = replace(weights, config=longer).model().eval()
            model = LlamaText(self.llama)
        self._model = model

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to logits [B, T, V]."""
        return self._model.logits(tokens)

    def generate(self, tokens: Sequence[int], draws: Sampling, stops: Collection[int] = ()) -> Iterator[int]:
        """Yield tokens that continue ``tokens``, as they are drawn; end before one of ``stops``.

        :raises UserError: before the first token, for an empty prompt, ids outside the vocabulary, and invalid draws.
        """
        check_ids(tokens, self.vocab)
        draws.check()
        return self._model.generate(tokens, draws, stops)


def _context(weights: WeightsFile) -> int:
    """Return the most tokens that a model reads; training a pretrained model further does not reduce them."""
    return max(weights.config.context, weights.usage.context if weights.usage is not None else 0)


def complete(
    folder: Path, prompt: str, max_new: int = 60, temperature: float = 0.7, top_k: int = 40, seed: int = 0
) -> str:
    """Return ``prompt`` and its completion by the model in ``folder`` (a run, or an exported model)."""
    return prompt + "".join(stream(folder, prompt, max_new, temperature, top_k, seed))


def stream(
    folder: Path,
    prompt: str,
    max_new: int,
    temperature: float,
    top_k: int,
    seed: int,
    note: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """Yield the completion of ``prompt`` piece by piece; invalid arguments are refused before the first piece.

    ``note`` receives a line if the text may exceed the model's context.
    """
    model = Completer(folder)
    tokens = model.tokenizer.encode_prompt(prompt) or [model.tokenizer.end]
    new = model.generate(tokens, Sampling(max_new, temperature, top_k, seed), (model.tokenizer.end,))
    note_context(len(tokens) + max_new, model.context, note)
    return texts(new, model.tokenizer.decode)


def note_context(length: int, context: int, note: Callable[[str], object] | None) -> None:
    """Report the effect of a text of up to ``length`` tokens on a model with a shorter context."""
    if note is not None and length > context:
        note(f"beyond its context of {context} tokens, the model sees only the newest {context}, and each takes longer")
