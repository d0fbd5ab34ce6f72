"""Priors and posteriors of a mixture of experts: p(x_t | x_<t) = Σ_j w_{j,t} · p_j(x_t | x_<t).

All values are logarithms, for E experts and N texts of T tokens. ``logps`` [E, N, T] holds ln p_j(x_t | x_<t) from the
experts' softmax over one vocabulary. A prior is [E], the same for all texts, or [E, N, T], given by the text before
each token. Nothing overflows. Only a token that *every* active expert considers impossible gets -inf.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.lab.experts.minimax_weights import FLOOR, TOLERANCE, MinimaxWeights, make_problem, worst_domain

PRIOR_STRIDE = 16
"""tokens after which the prior of a text is updated"""


class TextPrior(ABC):
    """Prior of experts that depends on the text so far: π_j ∝ exp(s_j / T) with the score s_j of their domain."""

    domains: Sequence[str]
    """domains with a score"""

    @abstractmethod
    def scores_at(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the domains' scores [N, L, D] after the first tokens of texts [N, T], for each of L ``lengths``."""

    def priors(self, samples: Tensor, domains: Sequence[str], temperature: float) -> Tensor:
        """Return ln π [E, N, T] of the domains' experts over samples [N, T + 1], by the text before each token.

        It is updated every ``PRIOR_STRIDE`` tokens.
        """
        length = samples.shape[1] - 1
        log_priors = self._log_priors(samples[:, :-1], range(1, length + 1, PRIOR_STRIDE), domains, temperature)
        return log_priors.repeat_interleave(PRIOR_STRIDE, -1)[..., :length]

    def prior(self, tokens: Sequence[int], domains: Sequence[str], temperature: float) -> Tensor:
        """Return ln π [E] of the domains' experts after these tokens."""
        return self._log_priors(torch.tensor(tokens)[None], [len(tokens)], domains, temperature)[:, 0, 0]

    def _log_priors(self, tokens: Tensor, lengths: Sequence[int], domains: Sequence[str], temperature: float) -> Tensor:
        own = self.scores_at(tokens, lengths)[..., [self.domains.index(domain) for domain in domains]]
        return (own / temperature).log_softmax(-1).permute(2, 0, 1)


def uniform_prior(experts: int) -> Tensor:
    """Return the uniform ln π [E]."""
    return torch.full((experts,), -math.log(experts), dtype=torch.float64)


def cached_prior(logps: Tensor, decay: float) -> Tensor:
    """Return ln π [E] from held-out texts in order: a moving average of each text's own posterior.

    π ← (1 - decay) · π + decay · softmax_j(ln p_j(x)), from uniform (arXiv 2208.03306, section 2.3; decay 0.3).
    ``logps`` [E, N, D] are log-probabilities of whole texts, N of each of D domains. The posteriors of D parallel texts
    are averaged, so no domain comes last. Each posterior starts from uniform rather than the running π, which would
    turn small differences into a permanent zero weight.
    """
    pi = torch.full((len(logps),), 1 / len(logps), dtype=torch.float64)
    for posterior in logps.double().softmax(0).mean(-1).T:
        pi = (1 - decay) * pi + decay * posterior
    return pi.clamp_min(torch.finfo(pi.dtype).tiny).log()


def fit_worst_domain_weights(
    held_out: Mapping[str, Tensor], floor: float = FLOOR, tolerance: float = TOLERANCE
) -> MinimaxWeights:
    """Return the weights for the domain with the largest mixture loss, with domain prices and a certificate.

    ``held_out``: domain → log-probabilities of its texts' tokens [E, N, T]; each row is a whole text.

    :raises UserError: naming the domain, as ``minimax_weights.make_problem`` does.
    """
    sums = {name: logps.double().sum(-1).T.numpy() for name, logps in held_out.items()}
    return worst_domain(make_problem(sums, floor), tolerance)


def centre_scores(texts: Tensor, centres: Tensor) -> Tensor:
    """Return the scores [N, E] of embedded texts [N, D]: -‖e(x) - c_j‖² (c-BTM, arXiv 2303.14177, eq. 2).

    ``centres`` [E, D] are those of the experts' domains; the paper's prior has T = 0.1.
    """
    return -(torch.cdist(texts.double(), centres.double()) ** 2)


def log_weights(logps: Tensor, log_prior: Tensor) -> Tensor:
    """Return ln w_{j,t} [E, N, T]: the posterior of expert j after the tokens before t.

    w_{j,t} = π_j p_j(x_<t) / Σ_k π_k p_k(x_<t) (arXiv 2208.03306, eq. 2); it does not depend on token t. If all experts
    consider the prefix impossible, it is the prior.
    """
    prior = _broadcast(log_prior)
    before = F.pad(logps.cumsum(-1)[..., :-1], (1, 0))
    scores = prior + before
    impossible = torch.isneginf(scores).all(0, keepdim=True)
    return torch.where(impossible, prior.expand_as(scores), scores).log_softmax(0)


def log_mixture(logps: Tensor, log_w: Tensor) -> Tensor:
    """Return ln Σ_j w_{j,t} p_j(x_t | x_<t), [N, T]; for all next tokens with ``logps`` [E, V] and ``log_w`` [E, 1]."""
    return torch.logsumexp(logps + log_w, 0)


def keep_strongest(log_w: Tensor, k: int, prefix: int) -> Tensor:
    """Restrict ln w [E, N, T], in each text, to the ``k`` (0: all) strongest experts after its first ``prefix`` tokens.

    The others read no further and stay excluded; the remaining posterior is renormalised.
    """
    if not 0 < k < len(log_w) or log_w.shape[-1] <= prefix:
        return log_w
    at = log_w[..., prefix]
    chosen = torch.zeros_like(at, dtype=torch.bool).scatter(
        0, at.argsort(stable=True, dim=0, descending=True)[:k], True
    )
    after = log_w[..., prefix:].masked_fill(~chosen[..., None], -torch.inf).log_softmax(0)
    return torch.cat((log_w[..., :prefix], after), -1)


def forward_passes_per_token(experts: int, tokens: int, k: int, prefix: int) -> float:
    """Return the experts' forward passes per token of a text: the cost of inference in models of their mean size."""
    if not 0 < k < experts or tokens <= prefix:
        return float(experts)
    return (experts * prefix + k * (tokens - prefix)) / tokens


def mean_expert_logps(logps: Tensor, log_prior: Tensor) -> Tensor:
    """Return the experts' mean loss as log-probabilities [N, T]: Jensen's bound on the mixture's loss."""
    return (_broadcast(log_prior).exp() * logps).sum(0)


def _broadcast(log_prior: Tensor) -> Tensor:
    return log_prior if log_prior.dim() == 3 else log_prior[:, None, None]
