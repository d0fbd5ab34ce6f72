"""Priors and posteriors of experts, which make several models one: p(x_t | x_<t) = Σ_j w_{j,t} · p_j(x_t | x_<t).

Everything is computed in logarithms. E experts, N texts of T tokens. ``logps`` [E, N, T] holds ln p_j(x_t | x_<t), from
the experts' own softmax over one vocabulary; a prior is [E], the same for all texts, or [E, N, T], given by the text
before each token. Nothing here can overflow. Only a token that *every* expert with a say holds impossible gets -inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.lab.experts.worst import FLOOR, TOLERANCE, Weights, problem, worst_domain


def uniform(experts: int) -> Tensor:
    """ln π [E]: nobody is preferred."""
    return torch.full((experts,), -math.log(experts), dtype=torch.float64)


def cached(logps: Tensor, decay: float) -> Tensor:
    """ln π [E] from held-out texts in their order: a moving average of each text's own posterior.

    π ← (1 - decay) · π + decay · softmax_j(ln p_j(x)), begun at uniform (arXiv 2208.03306, section 2.3; decay 0.3).
    ``logps`` [E, N, D] are the log-probabilities of whole texts, N of each of D domains; the posteriors of D texts side
    by side are averaged, so that no domain is the last word. Every posterior starts from uniform: from the running π it
    would be the product of all before, and a hair's breadth between two experts would silence one for good.
    """
    pi = torch.full((len(logps),), 1 / len(logps), dtype=torch.float64)
    for posterior in logps.double().softmax(0).mean(-1).T:
        pi = (1 - decay) * pi + decay * posterior
    return pi.clamp_min(torch.finfo(pi.dtype).tiny).log()


def fitted(held_out: Mapping[str, Tensor], floor: float = FLOOR, tolerance: float = TOLERANCE) -> Weights:
    """π [E] for the domain that the ensemble does worst on, with prices of domains and a certificate.

    ``held_out``: domain → log-probabilities of its texts' tokens [E, N, T]; a row is a whole text, because that is what
    a prior multiplies.

    :raises UserError: naming the domain, as ``worst.problem`` does.
    """
    sums = {name: logps.double().sum(-1).T.numpy() for name, logps in held_out.items()}
    return worst_domain(problem(sums, floor), tolerance)


def nearest(texts: Tensor, centres: Tensor, temperature: float) -> Tensor:
    """ln π [E, N] of N embedded texts [N, D]: π_j ∝ exp(-‖e(x) - c_j‖² / T) (c-BTM, arXiv 2303.14177, eq. 2; T = 0.1).

    ``centres`` [E, D] are those of the experts' domains.
    """
    return (-(torch.cdist(centres.double(), texts.double()) ** 2) / temperature).log_softmax(0)


def centre(texts: Sequence[Tensor]) -> Tensor:
    """The mean [D] of embedded texts."""
    return torch.stack(list(texts)).mean(0)


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
