"""An ensemble's weights for its worst domain, what they prove, and what they cost the other domains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planaria.lab.experts import prior, scoring
from planaria.lab.experts.experts_results import WORST, Weighing
from planaria.lab.experts.experts_spec import MixtureSpec
from planaria.lab.experts.worst import FLOOR
from planaria.lab.experts.worst_solvers import TOLERANCE

RIVALS = ("uniform", "cached")
"""priors that stand beside it"""


def weigh(
    experts: Sequence[str],
    held_out: Mapping[str, Tensor],
    test: Mapping[str, Tensor],
    mixture: MixtureSpec,
    tokens: int,
    floor: float = FLOOR,
    tolerance: float = TOLERANCE,
) -> Weighing:
    """Fit on ``held_out`` and measure on both. ``held_out``, ``test``: domain → token log-probabilities [E, N, T].

    ``mixture`` says how the cached prior is made; ``tokens`` of each text count, or all that it has.

    :raises UserError: naming the domain, when the problem has no solution or no choice.
    """
    tokens = min(tokens, *(logps.shape[-1] for logps in (*held_out.values(), *test.values())))
    found = prior.fitted({name: logps[..., :tokens] for name, logps in held_out.items()}, floor, tolerance)
    beliefs = {name: scoring.belief(mixture.model_copy(update={"prior": name}), held_out) for name in RIVALS} | {
        WORST: torch.from_numpy(found.w).log()
    }
    return Weighing(
        experts=list(experts),
        tokens=tokens,
        texts=sum(logps.shape[1] for logps in held_out.values()),
        floor=floor,
        weights=found.w.tolist(),
        prices=dict(zip(held_out, found.q.tolist(), strict=True)),
        value=found.proof.value / tokens,
        bound=found.proof.bound / tokens,
        residual=found.proof.residual,
        tolerance=tolerance,
        certified=found.certified,
        solver=found.solver,
        passes=found.evaluations / found.rows,
        held_out={name: _losses(held_out, belief, tokens) for name, belief in beliefs.items()},
        test={name: _losses(test, belief, tokens) for name, belief in beliefs.items()},
    )


def _losses(texts: Mapping[str, Tensor], log_prior: Tensor, tokens: int) -> dict[str, float]:
    """Domain → mean over texts of -ln Σ_j π_j p_j(first tokens), per token."""
    return {
        name: -float(torch.logsumexp(logps[..., :tokens].sum(-1) + log_prior[:, None], 0).mean()) / tokens
        for name, logps in texts.items()
    }
