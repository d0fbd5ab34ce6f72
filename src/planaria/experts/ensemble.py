"""An ensemble at work: experts are loaded when they are needed, and let go when others are needed more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from planaria.data.tokenizer import Tokenizer
from planaria.errors import UserError
from planaria.experts import manifest, posterior
from planaria.experts.embedding import Embedding
from planaria.experts.manifest import TOKENIZER, Manifest, digest, place
from planaria.experts.reading import Texts, token_logps
from planaria.experts.results import Speech
from planaria.model.decode import Reading, check_draws, pick
from planaria.model.huggingface import import_model
from planaria.model.stages import Llama


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
        self._places = Embedding.open(folder) if self.manifest.mixture.prior == "clusters" else None

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
        if self._places is None:
            return self._belief()
        domains = [member.domain for member in self.manifest.members]
        return self._places.priors(samples, self.tokenizer.decode, domains, self.manifest.mixture.temperature)

    def log_prior_after(self, prompt: Sequence[int]) -> Tensor:
        """ln π [E] of the experts for a text that begins with these tokens, before any of them has read it."""
        if self._places is None:
            return self._belief()
        domains = [member.domain for member in self.manifest.members]
        return self._places.prior([self.tokenizer.decode(prompt)], domains, self.manifest.mixture.temperature)[:, 0]

    def _belief(self) -> Tensor:
        beliefs = [member.belief for member in self.manifest.members]
        return torch.tensor(beliefs, dtype=torch.float64).log_softmax(0)

    def logps(self, samples: Tensor, experts: Sequence[int] | None = None) -> Tensor:
        """ln p_j(x_t | x_<t) [E, N, T] of samples [N, T + 1]; of these ``experts``, or all."""
        asked = range(len(self.manifest.members)) if experts is None else experts
        return torch.stack([token_logps(self.model(j), samples) for j in asked])

    def weights(self, samples: Tensor) -> Tensor:
        """ln w [E, N, T] over samples [N, T + 1], as the manifest's mixture says."""
        mixture = self.manifest.mixture
        log_w = posterior.log_weights(self.logps(samples), self.log_prior(samples))
        return posterior.speakers(log_w, mixture.top_k, mixture.prefix)

    def generate(
        self, tokens: Sequence[int], max_new: int, temperature: float = 0.0, top_k: int = 0, seed: int = 0
    ) -> Iterator[int]:
        """At most ``max_new`` tokens that continue ``tokens``, drawn from the mixture; they end before the separator.

        With ``mixture.top_k`` only the experts that read the prompt best go on. Arguments as in ``model.generate``.
        """
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.manifest.vocab:
            raise UserError(f"generate: a prompt needs one token or more, with ids below {self.manifest.vocab}")
        check_draws(temperature, top_k)
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
        mixture, log_prior = ensemble.manifest.mixture, ensemble.log_prior_after(tokens)
        self._speaking, self._log_w = list(range(len(log_prior))), log_prior
        if mixture.prefix == 0:
            self._narrow(mixture.top_k)
        self._log_w = self._after_prompt()
        self._narrow(mixture.top_k)

    def run(self) -> Iterator[int]:
        """The new tokens."""
        context, readings = self._ensemble.manifest.context, list[Reading]()
        for left in range(self._left, 0, -1):
            if readings and len(self._tokens) <= context:
                newest = torch.tensor(self._tokens[-1:])
                for reading in readings:
                    reading.read(newest)
            else:
                window = self._tokens[-context:]
                room = min(left, max(0, context - len(self._tokens)))
                readings = [Reading(self._ensemble.model(j), [window], room) for j in self._speaking]
            log_p = torch.stack([reading.logits[0].double().log_softmax(-1) for reading in readings])
            mixture = posterior.mixed(log_p, self._log_w[:, None])
            uniform = torch.rand(1, generator=self._generator)
            chosen = int(pick(mixture.float()[None], self._temperature, self._top_k, uniform))
            if chosen == self._ensemble.tokenizer.end:
                return
            self._log_w = (self._log_w + log_p[:, chosen]).log_softmax(0)
            self._tokens.append(chosen)
            yield chosen

    def _after_prompt(self) -> Tensor:
        """ln w of those who speak, after the prompt."""
        if len(self._tokens) < 2:
            return self._log_w
        samples = torch.tensor(self._tokens[-self._ensemble.manifest.context - 1 :])[None]
        return (self._log_w + self._ensemble.logps(samples, self._speaking)[:, 0].sum(-1)).log_softmax(0)

    def _narrow(self, k: int) -> None:
        """Only the ``k`` (0: all) strongest go on."""
        if 0 < k < len(self._speaking):
            kept = sorted(self._log_w.topk(k).indices.tolist())
            self._speaking = [self._speaking[place] for place in kept]
            self._log_w = self._log_w[kept].log_softmax(0)
