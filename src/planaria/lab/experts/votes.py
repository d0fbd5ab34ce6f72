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
from planaria.lab.experts.experts_spec import VotesSpec
from planaria.lab.experts.manifest import TOKENIZER
from planaria.lab.experts.posterior import TextPrior
from planaria.lab.experts.text_prior import load_or_compute
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


class VotesPrior(TextPrior):
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
        self.domains, self._spec, self._end = list(counts), spec, end
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
        vocab = model.config.vocab
        data = run, model, texts, cache
        counts = load_or_compute(parent, FILE, (vocab,), data, lambda samples: token_counts(samples[:, :-1], vocab))
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
            scores = F.one_hot(scores.argmax(-1), len(self.domains)).double()
        return (scores * votes[..., None]).sum(1) / votes.sum(1, keepdim=True).clamp(min=1)

    def scores_at(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        return torch.stack([self.scores(tokens[:, :length]) for length in lengths], 1)
