"""Classification of hidden states by domain: ridge regression in closed form, from one matrix of sums per domain.

Sums are additive over texts, so domains can be added or removed without reading others again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.common.errors import UserError

RIDGE = 1e-2
"""default λ; source: the published code of arXiv 2603.29765"""


def sums(rows: Tensor) -> Tensor:
    """Return [X 1]ᵀ[X 1] [D + 1, D + 1] in fp64 of one domain's rows X [n, D].

    Its last column is Xᵀ1, the domain's column of C for one-hot targets. Its corner is n.
    """
    rows = F.pad(rows.double(), (0, 1), value=1.0)
    return rows.T @ rows


def router(domains: Sequence[Tensor], ridge: float, bias: bool = True, unit: bool = True) -> Tensor:
    """Return W [D + 1, N] from the :func:`sums` of N domains; without ``bias``, the last row is missing.

    W = (G + λI)⁻¹ C with G = Σ_i [X_i 1]ᵀ[X_i 1] and C = [X 1]ᵀY, Y the rows' domains, one-hot. If ``unit``, each
    column, with its bias, is divided by the norm of its weights (arXiv 2603.29765; order and λ as in its published
    code). Without ``unit``, [x 1] W is the least-squares estimate of each domain's probability.

    :raises UserError: when λ = 0 leaves more than one solution.
    """
    size = len(domains[0]) if bias else len(domains[0]) - 1
    gram = torch.stack(list(domains)).sum(0)
    cross = torch.stack([own[:, -1] for own in domains], 1)
    regular = gram[:size, :size] + ridge * torch.eye(size, dtype=gram.dtype)
    factor, failed = torch.linalg.cholesky_ex(regular)
    if int(failed) or (ridge == 0 and float(gram[-1, -1]) < size):
        raise UserError(
            f"λ = {ridge:g}: {float(gram[-1, -1]):,.0f} tokens for {size} numbers of a router leave more than one "
            "solution; use a larger λ, or more text"
        )
    solution = torch.cholesky_solve(cross[:size], factor)
    norms = solution[: len(gram) - 1].norm(dim=0)
    return solution / torch.where(norms > 0, norms, 1.0) if unit else solution
