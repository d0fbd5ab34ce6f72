"""Votes of tokens for a domain: a ridge router on input embeddings, fitted from unigram counts (arXiv 2606.06098).

An input embedding depends on the token alone, so the router is a table of V tokens × D domains. Word order and context
have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.lab.experts import ridge
from planaria.lab.experts.domains import TRAINED
from planaria.lab.experts.embedding import PRIOR_STRIDE
from planaria.lab.experts.experts_spec import VotesSpec
from planaria.lab.experts.log_probabilities import domain_samples
from planaria.lab.experts.manifest import TOKENIZER
from planaria.lab.experts.text_prior import SAMPLES, load_or_compute
from planaria.models.huggingface import import_model

FILE = "votes.safetensors"
"""file next to the parent's model: the token counts of each domain, and the digest of the model"""


def token_counts(tokens: Tensor, vocab: int) -> Tensor:
    """Return how often each token occurs: fp64 [V]."""
    return torch.bincount(tokens.flatten(), minlength=vocab).double()


def count_sums(embeddings: Tensor, counts: Tensor) -> Tensor:
    """Return :func:`ridge.sums` [D + 1, D + 1] of a domain's token embeddings: [E 1]ᵀ diag(n) [E 1]."""
    rows = F.pad(embeddings.double(), (0, 1), value=1.0)
    return rows.T @ (counts[:, None] * rows)


def ridge_table(embeddings: Tensor, counts: Sequence[Tensor], lam: float) -> Tensor:
    """Return the score of each token for each domain [V, N]: [E 1] W, with columns of W divided by their norm."""
    router = ridge.router([count_sums(embeddings, own) for own in counts], lam)
    return F.pad(embeddings.double(), (0, 1), value=1.0) @ router


def bayes_table(counts: Sequence[Tensor]) -> Tensor:
    """Return ln p(token | domain) [V, N] with one added to each count: naive Bayes, the control without embeddings."""
    smoothed = torch.stack(list(counts), 1) + 1
    return (smoothed / smoothed.sum(0)).log()


class VotesPrior:
    """A table that estimates the domain of a text."""

    def __init__(self, embeddings: Tensor, counts: Mapping[str, Tensor], spec: VotesSpec, end: int) -> None:
        """``embeddings`` [V, D]; ``counts``: domain → :func:`token_counts`; ``end``: id of the documents' separator.

        :raises UserError: for a single domain.
        """
        if len(counts) < 2:
            raise UserError(
                f"experts.mixture.prior = 'votes': a router needs two domains, and {', '.join(counts)!r} is the only "
                "one; use another prior"
            )
        self._domains, self._spec, self._end = list(counts), spec, end
        votes = torch.ones(len(embeddings), dtype=torch.bool)
        votes[end] = spec.padding
        used = [own * votes for own in counts.values()]
        self.table = bayes_table(used) if spec.by == "bayes" else ridge_table(embeddings, used, spec.ridge)

    @classmethod
    def load_or_fit(
        cls, parent: Path, run: Path, texts: Mapping[str, Sequence[str]], spec: VotesSpec, cache: str | None = None
    ) -> VotesPrior:
        """Return the prior by the model ``parent``; arguments and errors as ``RidgePrior.load_or_fit``."""
        model = import_model(parent).eval()
        vocab, context = model.config.vocab, model.config.context

        def read(sources: Sequence[str]) -> Tensor:
            return token_counts(domain_samples(run, sources, TRAINED, vocab, context, SAMPLES, cache)[:, :-1], vocab)

        counts = load_or_compute(parent, FILE, (vocab,), texts, read)
        with torch.inference_mode():
            embeddings = model.ends.embed_tokens(torch.arange(vocab))
        return cls(embeddings, counts, spec, Tokenizer.open(run / TOKENIZER).end)

    def scores(self, tokens: Tensor) -> Tensor:
        """Return the domains' scores [B, N] of texts [B, T]: shares of the votes, or mean scores; 0 without voters."""
        scores = self.table[tokens]
        votes = (tokens != self._end) | self._spec.padding
        if self._spec.keep:
            entropy = torch.special.entr(scores.softmax(-1)).sum(-1).masked_fill(~votes, torch.inf)
            order = entropy.argsort(stable=True, dim=-1)[:, : self._spec.keep]
            votes = votes & torch.zeros_like(votes).scatter(1, order, True)
        if self._spec.by == "votes":  # the first of equal scores
            scores = F.one_hot(scores.argmax(-1), len(self._domains)).double()
        return (scores * votes[..., None]).sum(1) / votes.sum(1, keepdim=True).clamp(min=1)

    def priors(self, samples: Tensor, domains: Sequence[str], temperature: float) -> Tensor:
        """Return ln π [E, N, T] over samples [N, T + 1], by the text before each token, updated every
        ``PRIOR_STRIDE`` tokens.

        π_j ∝ exp(s_j / T) with the :meth:`scores` s.
        """
        length = samples.shape[1] - 1
        own = [self._domains.index(domain) for domain in domains]
        scores = torch.stack([self.scores(samples[:, : at + 1])[:, own] for at in range(0, length, PRIOR_STRIDE)], -1)
        log_priors = (scores / temperature).log_softmax(1).transpose(0, 1)
        return log_priors.repeat_interleave(PRIOR_STRIDE, -1)[..., :length]

    def prior(self, tokens: Sequence[int], domains: Sequence[str], temperature: float) -> Tensor:
        """Return ln π [E] after these tokens."""
        scores = self.scores(torch.tensor(tokens)[None])[0, [self._domains.index(domain) for domain in domains]]
        return (scores / temperature).log_softmax(0)
