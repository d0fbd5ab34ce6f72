"""When replicas that pull themselves together over momentum stay together: the bound on γ."""

from __future__ import annotations


def contraction(members: int, group: int) -> float:
    """c of equation (3): the mean share of a disagreement that lies within the groups of a round.

    ``members`` replicas in K = ⌈members / group⌉ groups, drawn as ``pairing.py`` does. Within-group differences span
    members − K of the members − 1 dimensions of all differences, and no direction is preferred:

        c = (members − K) / (members − 1),    members / (2(members − 1)) for pairs of an even number.

    It is never below 1 − 1/group, its limit for many members. [derived here]
    """
    return (members - -(-members // group)) / (members - 1)


def largest_gamma(alpha: float, c: float) -> float:
    """Equation (3): disagreement dies out (in mean square, without noise) if and only if 0 < γ < this. [derived here]

        γ < 2(1 − α²) / (1 + α − 2αc)

    α is the momentum, c as :func:`contraction` says. With d a replica's distance from the mean of all and P the
    projection on differences within groups, δ ← αδ − γPd and d ← d + δ close a linear recursion in E|d|², E⟨d, δ⟩ and
    E|δ|², because P is drawn apart from both and E P = c; its spectral radius passes 1 there.
    """
    return 2.0 * (1.0 - alpha * alpha) / (1.0 + alpha - 2.0 * alpha * c)
