"""Several models as one: p(x_t | x_<t) = Σ_j w_{j,t} · p_j(x_t | x_<t), computed in logarithms throughout.

E experts, N texts of T tokens. ``logps`` [E, N, T] holds ln p_j(x_t | x_<t), from the experts' own softmax over one
vocabulary; a prior is [E], the same for all texts, or [E, N, T], told by the text before each token. Nothing here can
overflow, and only a token that *every* expert with a say holds impossible gets -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def log_weights(logps: Tensor, log_prior: Tensor) -> Tensor:
    """ln w_{j,t} [E, N, T]: the posterior of expert j after the tokens before t.

    w_{j,t} = π_j p_j(x_<t) / Σ_k π_k p_k(x_<t) (arXiv 2208.03306, eq. 2). Token t itself has no say in its own weights.
    Where all experts held the prefix impossible, the prior stands.
    """
    prior = _everywhere(log_prior)
    before = F.pad(logps.cumsum(-1)[..., :-1], (1, 0))
    scores = prior + before
    hopeless = torch.isneginf(scores).all(0, keepdim=True)
    return torch.where(hopeless, prior.expand_as(scores), scores).log_softmax(0)


def mixed(logps: Tensor, log_w: Tensor) -> Tensor:
    """ln Σ_j w_{j,t} p_j(x_t | x_<t), [N, T]; of every next token with ``logps`` [E, V] and ``log_w`` [E, 1]."""
    return torch.logsumexp(logps + log_w, 0)


def speakers(log_w: Tensor, k: int, prefix: int) -> Tensor:
    """ln w [E, N, T] of those who go on: in each text the ``k`` (0: all) strongest after its first ``prefix`` tokens.

    Whoever falls silent there reads no more, so it cannot come back; among the others the posterior goes on as before.
    """
    if not 0 < k < len(log_w) or log_w.shape[-1] <= prefix:
        return log_w
    at = log_w[..., prefix]
    chosen = torch.zeros_like(at, dtype=torch.bool).scatter(0, at.topk(k, 0).indices, True)
    after = log_w[..., prefix:].masked_fill(~chosen[..., None], -torch.inf).log_softmax(0)
    return torch.cat((log_w[..., :prefix], after), -1)


def passes(experts: int, tokens: int, k: int, prefix: int) -> float:
    """Experts' forward passes for each token of a text: what inference costs, in single models of their mean size."""
    if not 0 < k < experts or tokens <= prefix:
        return float(experts)
    return (experts * prefix + k * (tokens - prefix)) / tokens


def averaged(logps: Tensor, log_prior: Tensor) -> Tensor:
    """The mean of the experts' losses as log-probabilities [N, T]: what a mixture must beat, by Jensen's inequality."""
    return (_everywhere(log_prior).exp() * logps).sum(0)


def _everywhere(log_prior: Tensor) -> Tensor:
    """A prior that broadcasts against [E, N, T]."""
    return log_prior if log_prior.dim() == 3 else log_prior[:, None, None]
