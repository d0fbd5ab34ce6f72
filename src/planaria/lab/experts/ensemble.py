"""An ensemble at work: experts are loaded when they are needed, and let go when others are needed more.

A prior that the text itself determines changes while the text is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.lab.experts import manifest, posterior
from planaria.lab.experts.embedding import EVERY, Embedding
from planaria.lab.experts.experts_results import Speech
from planaria.lab.experts.listening import Listener
from planaria.lab.experts.manifest import TOKENIZER, Manifest, digest, place
from planaria.lab.experts.reading import Texts, token_logps
from planaria.models.decode import Reading, check_draws, check_one, pick
from planaria.models.huggingface import import_model
from planaria.models.stages import Llama


class Ensemble:
    """The experts of a manifest, speaking with one voice."""

    def __init__(self, folder: Path, held: int = 0) -> None:
        """At most ``held`` models are in memory at once; 0 is as many as go on speaking after a text's beginning.

        :raises UserError: when the manifest or the tokenizer is missing or damaged. Experts are looked at when they are
            first needed.
        """
        self.manifest: Manifest = manifest.read(folder)
        if digest(folder / TOKENIZER) != self.manifest.tokenizer:
            raise UserError(
                f"{folder / TOKENIZER}: is not the tokenizer that these experts were trained with; bring it back"
            )
        self.tokenizer = Tokenizer.open(folder / TOKENIZER)
        self._folder, self._held = folder, held or self.manifest.mixture.top_k or len(self.manifest.members)
        self._models: OrderedDict[str, Llama] = OrderedDict()
        self._told = text_prior(folder, self.manifest, self.tokenizer)

    def model(self, number: int) -> Llama:
        """Expert ``number``, loaded if need be.

        :raises UserError: when it is missing, is another than it was, or has another vocabulary.
        """
        member = self.manifest.members[number]
        if member.name not in self._models:
            while len(self._models) >= self._held:
                self._models.popitem(last=False)
            model = import_model(place(self._folder, member)).eval()
            if model.config.vocab != self.manifest.vocab:
                raise UserError(
                    f"expert {member.name!r} has a vocabulary of {model.config.vocab} ids, the ensemble of "
                    f"{self.manifest.vocab}; experts can speak together only with one vocabulary"
                )
            self._models[member.name] = model
        self._models.move_to_end(member.name)
        return self._models[member.name]

    def log_prior(self, samples: Tensor) -> Tensor:
        """ln π of the experts over samples [N, T + 1]: [E, N, T] where the text before a token tells, else [E]."""
        return self._belief() if self._told is None else self._told.over(samples)

    def log_prior_after(self, prompt: Sequence[int]) -> Tensor:
        """ln π [E] of the experts by the text so far, whatever they make of it."""
        return self._belief() if self._told is None else self._told.after(prompt)

    def _belief(self) -> Tensor:
        beliefs = [member.belief for member in self.manifest.members]
        return torch.tensor(beliefs, dtype=torch.float64).log_softmax(0)

    def logps(
        self, samples: Tensor, experts: Sequence[int] | None = None, on_read: Callable[[int], object] = lambda _: None
    ) -> Tensor:
        """Return ln p_j(x_t | x_<t) [E, N, T] of samples [N, T + 1]; of these ``experts``, or all.

        ``on_read`` receives the number of samples whenever an expert has read some.
        """
        asked = range(len(self.manifest.members)) if experts is None else experts
        return torch.stack([token_logps(self.model(j), samples, on_read) for j in asked])

    def weights(self, samples: Tensor) -> Tensor:
        """ln w [E, N, T] over samples [N, T + 1], as the manifest's mixture says."""
        mixture = self.manifest.mixture
        log_w = posterior.log_weights(self.logps(samples), self.log_prior(samples))
        return posterior.speakers(log_w, mixture.top_k, mixture.prefix)

    def generate(
        self, tokens: Sequence[int], max_new: int, temperature: float = 0.0, top_k: int = 0, seed: int = 0
    ) -> Iterator[int]:
        """At most ``max_new`` tokens that continue ``tokens``, drawn from the mixture; they end before the separator.

        The experts' weights are those of :meth:`weights`: with ``mixture.top_k`` only those go on that read the first
        ``prefix`` tokens best; with ``prefix = 0``, those that the prior of the whole prompt prefers. Arguments as in
        ``model.generate``.
        """
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.manifest.vocab:
            raise UserError(f"generate: a prompt needs one token or more, with ids below {self.manifest.vocab}")
        check_draws(temperature, top_k)
        check_one(max_new, seed)
        return _Speech(self, list(tokens), max_new, temperature, top_k, seed).run()


def overheard(ensemble: Ensemble, texts: Texts, parts: int = 6) -> Speech:
    """Who speaks when, over pieces of every domain's test text joined within one context; ``parts`` such texts."""
    each = ensemble.manifest.context // len(ensemble.manifest.members)
    domains = [member.domain for member in ensemble.manifest.members if member.domain in texts.test]
    pieces, weights = list[str](), list[list[float]]()
    for part in range(parts):
        joined = torch.cat([texts.test[domain][part % len(texts.test[domain]), :each] for domain in domains])
        log_w = ensemble.weights(joined[None])[:, 0]
        pieces += [ensemble.tokenizer.decode([token]) or "␃" for token in joined[1:].tolist()]
        weights += [[round(w, 3) for w in row] for row in log_w.exp().T.tolist()]
    return Speech(experts=[member.name for member in ensemble.manifest.members], pieces=pieces, weights=weights)


class _Speech:
    """One text being continued."""

    def __init__(
        self, ensemble: Ensemble, tokens: list[int], max_new: int, temperature: float, top_k: int, seed: int
    ) -> None:
        self._ensemble, self._tokens, self._left = ensemble, tokens, max_new
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)
        self._few, self._prefix = ensemble.manifest.mixture.top_k, ensemble.manifest.mixture.prefix
        self._speaking = list(range(len(ensemble.manifest.members)))
        self._said = torch.zeros(len(self._speaking), dtype=torch.float64)
        """ln p_j of the text so far [E], of those who speak"""
        self._prior = self._said
        """ln π_j [E], of those who speak"""
        self._readings: list[Reading] = []
        if self._prefix == 0:
            self._prior = ensemble.log_prior_after(tokens)
            self._narrow()
        self._hear_prompt()

    def run(self) -> Iterator[int]:
        """The new tokens."""
        for left in range(self._left, 0, -1):
            log_p = self._next(left)
            uniform = torch.rand(1, generator=self._generator)
            mixture = posterior.mixed(log_p, self._log_w()[:, None])
            chosen = int(pick(mixture.float()[None], self._temperature, self._top_k, uniform))
            if chosen == self._ensemble.tokenizer.end:
                return
            self._said = self._said + log_p[:, chosen]
            self._tokens.append(chosen)
            self._place(self._tokens)
            if len(self._tokens) - 1 == self._prefix:
                self._narrow()
            yield chosen

    def _next(self, left: int) -> Tensor:
        """ln p_j of every next token [E, V]; ``left`` of them are still wanted."""
        context = self._ensemble.manifest.context
        if self._readings and len(self._tokens) <= context:
            newest = torch.tensor(self._tokens[-1:])
            for reading in self._readings:
                reading.read(newest)
        else:
            window = self._tokens[-context:]
            room = min(left, max(0, context - len(self._tokens)))
            self._readings = [Reading(self._ensemble.model(j), [window], room) for j in self._speaking]
        return torch.stack([reading.logits[0].double().log_softmax(-1) for reading in self._readings])

    def _hear_prompt(self) -> None:
        """All who speak read the prompt; those who fall silent after the prefix, no further."""
        heard = self._tokens[-self._ensemble.manifest.context - 1 :]
        if 0 < self._prefix < len(heard) - 1 and self._falls_silent():
            self._hear(heard[: self._prefix + 1])
            self._narrow()
        self._hear(heard)
        if len(heard) - 1 == self._prefix:
            self._narrow()

    def _hear(self, heard: list[int]) -> None:
        self._place(heard)
        if len(heard) > 1:
            self._said = self._ensemble.logps(torch.tensor(heard)[None], self._speaking)[:, 0].sum(-1)

    def _place(self, text: list[int]) -> None:
        """The prior by the text as it was when it was last looked at; a single speaker needs none."""
        if len(self._speaking) == 1:
            return
        at = (len(text) - 1) // EVERY * EVERY
        if at == len(text) - 1 or not self._readings:
            self._prior = self._ensemble.log_prior_after(text[: at + 1])[self._speaking]

    def _log_w(self) -> Tensor:
        return (self._prior + self._said).log_softmax(0)

    def _falls_silent(self) -> bool:
        return 0 < self._few < len(self._speaking)

    def _narrow(self) -> None:
        """Only the strongest go on, if there are more than shall."""
        if self._falls_silent():
            kept = sorted(self._log_w().topk(self._few).indices.tolist())
            self._speaking = [self._speaking[place] for place in kept]
            self._prior, self._said = self._prior[kept], self._said[kept]
            self._readings = [self._readings[place] for place in kept] if self._readings else []


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
