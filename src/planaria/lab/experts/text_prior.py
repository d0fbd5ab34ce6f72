"""Priors that the text itself tells: what is believed of the experts changes while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from planaria.data.tokenizer import Tokenizer
from planaria.lab.experts.embedding import Embedding
from planaria.lab.experts.listening import Listener
from planaria.lab.experts.manifest import Manifest


class TextPrior(Protocol):
    """ln π of E experts."""

    def over(self, samples: Tensor) -> Tensor:
        """Samples [N, T + 1] → [E, N, T], each by the text before a token, never by a token itself."""
        ...

    def after(self, tokens: Sequence[int]) -> Tensor:
        """[E] by a text."""
        ...


@dataclass(frozen=True)
class ByWords:
    """``clusters``: by where a text lies among the domains'."""

    embedding: Embedding
    tokenizer: Tokenizer
    domains: Sequence[str]
    """of the experts"""
    temperature: float

    def over(self, samples: Tensor) -> Tensor:
        return self.embedding.priors(samples, self.tokenizer.decode, self.domains, self.temperature)

    def after(self, tokens: Sequence[int]) -> Tensor:
        return self.embedding.prior([self.tokenizer.decode(tokens)], self.domains, self.temperature)[:, 0]


@dataclass(frozen=True)
class ByParent:
    """``ridge``: by what the parent makes of it."""

    listener: Listener
    domains: Sequence[str]
    """of the experts"""
    temperature: float

    def over(self, samples: Tensor) -> Tensor:
        return self.listener.priors(samples, self.domains, self.temperature)

    def after(self, tokens: Sequence[int]) -> Tensor:
        return self.listener.prior(tokens, self.domains, self.temperature)


def text_prior(folder: Path, ensemble: Manifest, tokenizer: Tokenizer) -> TextPrior | None:
    """That of the ensemble in ``folder``; None where its prior is the same for all texts.

    :raises UserError: when what it rests on is missing or damaged.
    """
    domains, mixture = [member.domain for member in ensemble.members], ensemble.mixture
    if mixture.prior == "clusters":
        return ByWords(Embedding.open(folder), tokenizer, domains, mixture.temperature)
    if mixture.prior == "ridge":
        texts = {domain: ensemble.parts(domain) for domain in domains}
        listener = Listener.beside(folder / ensemble.listener(folder), folder, texts)
        return ByParent(listener, domains, mixture.temperature)
    return None
