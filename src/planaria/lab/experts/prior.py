"""What is believed of the experts before a text begins: uniform, from held-out text, or by where a text lies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planaria.lab.experts.worst import FLOOR, problem
from planaria.lab.experts.worst_solvers import TOLERANCE, Weights, worst_domain


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
