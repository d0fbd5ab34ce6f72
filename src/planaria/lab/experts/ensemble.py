"""Inference with an ensemble of experts that are loaded on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.lab.experts import manifest, posterior
from planaria.lab.experts.embedding import ClusterPrior, Embedding
from planaria.lab.experts.experts_results import TextWeights
from planaria.lab.experts.experts_spec import MixtureSpec
from planaria.lab.experts.log_probabilities import DomainTexts, token_logps
from planaria.lab.experts.manifest import TOKENIZER, EnsembleManifest, digest, expert_folder
from planaria.lab.experts.posterior import PRIOR_STRIDE, TextPrior
from planaria.lab.experts.text_prior import RidgePrior
from planaria.lab.experts.votes import VotesPrior
from planaria.models.decode import DecodingBatch
from planaria.models.huggingface import import_model
from planaria.models.llama_stages import Llama
from planaria.models.sampling import Sampling, pick


class Ensemble:
    """The experts of a manifest as one model."""

    def __init__(self, folder: Path, max_models: int = 0) -> None:
        """Keep at most ``max_models`` models in memory; 0: as many as remain active after a text's prefix.

        :raises UserError: when the manifest or the tokenizer is missing or damaged. Experts are checked on first use.
        """
        self.manifest: EnsembleManifest = manifest.read(folder)
        if digest(folder / TOKENIZER) != self.manifest.tokenizer:
            raise UserError(
                f"{folder / TOKENIZER} is not the tokenizer that these experts were trained with; restore it"
            )
        self.tokenizer = Tokenizer.open(folder / TOKENIZER)
        self._folder = folder
        self._max_models = max_models or self.manifest.mixture.top_k or len(self.manifest.members)
        self._models: OrderedDict[str, Llama] = OrderedDict()
        self._text_prior = text_prior(folder, self.manifest, self.tokenizer)
        self._prior_of = [member.domain for member in self.manifest.members], self.manifest.mixture.temperature
        """arguments of the text prior: domains and temperature"""

    def model(self, number: int) -> Llama:
        """Return expert ``number``, loading it if necessary.

        :raises UserError: when it is missing, has changed, or has another vocabulary.
        """
        member = self.manifest.members[number]
        if member.name not in self._models:
            while len(self._models) >= self._max_models:
                self._models.popitem(last=False)
            model = import_model(expert_folder(self._folder, member)).eval()
            if model.config.vocab != self.manifest.vocab:
                raise UserError(
                    f"expert {member.name!r} has a vocabulary of {model.config.vocab} ids, the ensemble of "
                    f"{self.manifest.vocab}; experts of one ensemble need the same vocabulary"
                )
            self._models[member.name] = model
        self._models.move_to_end(member.name)
        return self._models[member.name]

    def log_prior(self, samples: Tensor) -> Tensor:
        """Return ln π of the experts over samples [N, T + 1]: [E, N, T] if it depends on the text, else [E]."""
        return self._belief() if self._text_prior is None else self._text_prior.priors(samples, *self._prior_of)

    def log_prior_after(self, prompt: Sequence[int]) -> Tensor:
        """Return the prior ln π [E] of the experts after a prompt."""
        return self._belief() if self._text_prior is None else self._text_prior.prior(prompt, *self._prior_of)

    def _belief(self) -> Tensor:
        beliefs = [member.belief for member in self.manifest.members]
        return torch.tensor(beliefs, dtype=torch.float64).log_softmax(0)

    def logps(
        self, samples: Tensor, experts: Sequence[int] | None = None, on_read: Callable[[int], object] = lambda _: None
    ) -> Tensor:
        """Return ln p_j(x_t | x_<t) [E, N, T] of samples [N, T + 1]; of these ``experts``, or all.

        ``on_read`` gets the number of samples whenever an expert has read some.
        """
        chosen = range(len(self.manifest.members)) if experts is None else experts
        return torch.stack([token_logps(self.model(j), samples, on_read) for j in chosen])

    def weights(self, samples: Tensor) -> Tensor:
        """Return ln w [E, N, T] over samples [N, T + 1], by the manifest's mixture."""
        mixture = self.manifest.mixture
        log_w = posterior.log_weights(self.logps(samples), self.log_prior(samples))
        return posterior.keep_strongest(log_w, mixture.top_k, mixture.prefix)

    def generate(
        self, tokens: Sequence[int], max_new: int, temperature: float = 0.0, top_k: int = 0, seed: int = 0
    ) -> Iterator[int]:
        """Yield at most ``max_new`` tokens that continue ``tokens``, drawn from the mixture, until the separator.

        The experts' weights are those of :meth:`weights`: with ``mixture.top_k`` only the best on the first ``prefix``
        tokens remain active; with ``prefix = 0``, those that the prior of the whole prompt prefers. Arguments as in
        ``model.generate``.
        """
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.manifest.vocab:
            raise UserError(f"generate: a prompt needs one token or more, with ids below {self.manifest.vocab}")
        Sampling(max_new, temperature, top_k or None, seed).check()
        return _Continuation(self, list(tokens), max_new, temperature, top_k, seed).run()


def domain_weights_over_text(ensemble: Ensemble, texts: DomainTexts, count: int = 6) -> TextWeights:
    """Return the experts' weights over ``count`` texts, each joined from pieces of every domain's test text."""
    each = ensemble.manifest.context // len(ensemble.manifest.members)
    domains = [member.domain for member in ensemble.manifest.members if member.domain in texts.test]
    pieces, weights = list[str](), list[list[float]]()
    for text_number in range(count):
        joined = torch.cat([texts.test[domain][text_number % len(texts.test[domain]), :each] for domain in domains])
        log_w = ensemble.weights(joined[None])[:, 0]
        pieces += [ensemble.tokenizer.decode([token]) or "␃" for token in joined[1:].tolist()]
        weights += [[round(w, 3) for w in row] for row in log_w.exp().T.tolist()]
    return TextWeights(experts=[member.name for member in ensemble.manifest.members], pieces=pieces, weights=weights)


class _Continuation:
    """The continuation of one text."""

    def __init__(
        self, ensemble: Ensemble, tokens: list[int], max_new: int, temperature: float, top_k: int, seed: int
    ) -> None:
        self._ensemble, self._tokens, self._max_new = ensemble, tokens, max_new
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)
        self._kept_experts, self._prefix = ensemble.manifest.mixture.top_k, ensemble.manifest.mixture.prefix
        self._active = list(range(len(ensemble.manifest.members)))
        self._log_p = torch.zeros(len(self._active), dtype=torch.float64)
        """ln p_j of the text so far [E], of the active experts"""
        self._prior = self._log_p
        """ln π_j [E], of the active experts"""
        self._readings: list[DecodingBatch] = []
        if self._prefix == 0:
            self._prior = ensemble.log_prior_after(tokens)
            self._narrow()
        self._read_prompt()

    def run(self) -> Iterator[int]:
        """Yield the new tokens."""
        for left in range(self._max_new, 0, -1):
            log_p = self._next(left)
            uniform = torch.rand(1, generator=self._generator)
            mixture = posterior.log_mixture(log_p, self._log_w()[:, None])
            chosen = int(pick(mixture.float()[None], self._temperature, self._top_k, uniform))
            if chosen == self._ensemble.tokenizer.end:
                return
            self._log_p = self._log_p + log_p[:, chosen]
            self._tokens.append(chosen)
            self._update_prior(self._tokens)
            if len(self._tokens) - 1 == self._prefix:
                self._narrow()
            yield chosen

    def _next(self, left: int) -> Tensor:
        """Return ln p_j of every next token [E, V]; ``left`` more tokens are wanted."""
        context = self._ensemble.manifest.context
        if self._readings and len(self._tokens) <= context:
            newest = torch.tensor(self._tokens[-1:])
            for reading in self._readings:
                reading.read(newest)
        else:
            window = self._tokens[-context:]
            room = min(left, max(0, context - len(self._tokens)))
            self._readings = [DecodingBatch(self._ensemble.model(j), [window], room) for j in self._active]
        return torch.stack([reading.logits[0].double().log_softmax(-1) for reading in self._readings])

    def _read_prompt(self) -> None:
        """Read the prompt; experts dropped after the prefix read only that."""
        prompt = self._tokens[-self._ensemble.manifest.context - 1 :]
        if 0 < self._prefix < len(prompt) - 1 and self._drops_some():
            self._read(prompt[: self._prefix + 1])
            self._narrow()
        self._read(prompt)
        if len(prompt) - 1 == self._prefix:
            self._narrow()

    def _read(self, text: list[int]) -> None:
        self._update_prior(text)
        if len(text) > 1:
            self._log_p = self._ensemble.logps(torch.tensor(text)[None], self._active)[:, 0].sum(-1)

    def _update_prior(self, text: list[int]) -> None:
        """Update the prior every ``PRIOR_STRIDE`` tokens; a single expert needs none."""
        if len(self._active) == 1:
            return
        at = (len(text) - 1) // PRIOR_STRIDE * PRIOR_STRIDE
        if at == len(text) - 1 or not self._readings:
            self._prior = self._ensemble.log_prior_after(text[: at + 1])[self._active]

    def _log_w(self) -> Tensor:
        return (self._prior + self._log_p).log_softmax(0)

    def _drops_some(self) -> bool:
        return 0 < self._kept_experts < len(self._active)

    def _narrow(self) -> None:
        """Keep only the strongest experts, if there are more than ``top_k``."""
        if self._drops_some():
            kept = sorted(self._log_w().argsort(stable=True, descending=True)[: self._kept_experts].tolist())
            self._active = [self._active[index] for index in kept]
            self._prior, self._log_p = self._prior[kept], self._log_p[kept]
            self._readings = [self._readings[index] for index in kept] if self._readings else []


def prior_of_parent(
    parent: Path, run: Path, texts: Mapping[str, Sequence[str]], mixture: MixtureSpec, cache: str | None = None
) -> TextPrior:
    """Return the prior ``ridge`` or ``votes``; arguments and errors as :meth:`RidgePrior.load_or_fit`."""
    if mixture.prior == "votes":
        return VotesPrior.load_or_fit(parent, run, texts, mixture.votes, cache)
    return RidgePrior.load_or_fit(parent, run, texts, cache)


def text_prior(folder: Path, ensemble: EnsembleManifest, tokenizer: Tokenizer) -> TextPrior | None:
    """Return the text prior of the ensemble in ``folder``, or None if its prior is the same for all texts.

    :raises UserError: when a file that it needs is missing or damaged.
    """
    if ensemble.mixture.prior == "clusters":
        return ClusterPrior(Embedding.open(folder), tokenizer.decode)
    if not ensemble.mixture.is_fitted_on_parent:
        return None
    texts = {member.domain: ensemble.parts(member.domain) for member in ensemble.members}
    return prior_of_parent(folder / ensemble.prior_model(folder), folder, texts, ensemble.mixture)
