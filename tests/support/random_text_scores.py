"""Random texts: log-probabilities of K experts on D domains, one of them harder for all."""

from __future__ import annotations

import numpy as np

from planaria.lab.experts.minimax_weights import Array


def random_scores(rows: int, experts: int, domains: int, seed: int) -> dict[str, Array]:
    """Return domain → log-probabilities [rows / domains, experts] of whole texts."""
    draw = np.random.default_rng(seed)
    hard, skill = draw.uniform(0, 1, domains), draw.normal(0, 1, (domains, experts))
    return {f"d{d}": draw.normal(skill[d] - 2 * hard[d], 1.0, (rows // domains, experts)) for d in range(domains)}
