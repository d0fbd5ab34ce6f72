"""Two ways to the weights for the worst domain: full passes over the texts, or few texts at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planaria.lab.experts.worst import Array, Certificate, Problem, certificate

Solver = Literal["extragradient", "halpern"]

MANY = 10_000
"""rows from which on few at a time are fewer in all, as measured; in seconds on one machine they never were"""
TOLERANCE = 1e-3
"""of the residual"""
FLAT = 1e-3
"""least L: where all experts are alike, F does not change at all"""
PASSES = 4000
"""evaluations of all rows after which the best that was found is returned, certified or not"""


@dataclass(frozen=True)
class Weights:
    """What a solver found."""

    w: Array
    """[K], each at least the floor"""
    q: Array
    """prices of domains [D]"""
    proof: Certificate
    rows: int
    evaluations: int
    """of single rows, all by the solver; the certificate's are not among them"""
    solver: Solver
    lipschitz: float
    """L, as the solver took it to be at its last step"""
    certified: bool
    """the residual is within the tolerance"""


def worst_domain(
    given: Problem, tolerance: float = TOLERANCE, passes: int = PASSES, solver: Solver | None = None, seed: int = 0
) -> Weights:
    """The weights for the worst domain, to a residual of ``tolerance`` if ``passes`` over the rows suffice.

    ``solver``: by default by the number of rows; ``seed`` draws the rows that halpern looks at.
    """
    chosen: Solver = solver or ("extragradient" if len(given.rows) < MANY else "halpern")
    most = passes * len(given.rows)
    if chosen == "extragradient":
        u, evaluations, lipschitz = extragradient(given, tolerance, most)
    else:
        u, evaluations, lipschitz = halpern(given, tolerance, most, np.random.default_rng(seed))
    w, q = given.weights(u[: given.experts]), u[given.experts :]
    proof = certificate(given, w, q)
    return Weights(
        w, q, proof, len(given.rows), evaluations, chosen, lipschitz, proof.residual <= tolerance * (1 + 1e-6)
    )


def extragradient(given: Problem, tolerance: float, most: int) -> tuple[Array, int, float]:
    """A point, row evaluations, and 1/step: u ← Π(u - η F(z)), z = Π(u - η F(u)) (Korpelevich 1976).

    η is halved until η ‖F(z) - F(u)‖ ≤ .7 ‖z - u‖ (Khobotov 1987), and grows by a tenth after each step: L by the
    floor, 1/φ², would be far too careful. All evaluations count, those of refused steps too.
    """
    u, step, spent = given.middle(), 1.0, len(given.rows)
    force = given.force(u)
    best, least = u, given.residual(u, force)
    while least > tolerance and spent < most:
        ahead = given.project(u - step * force)
        there, spent = given.force(ahead), spent + len(given.rows)
        if step * np.linalg.norm(there - force) > 0.7 * np.linalg.norm(ahead - u):
            step /= 2
            continue
        u = given.project(u - step * there)
        force, spent, step = given.force(u), spent + len(given.rows), 1.1 * step
        if (found := given.residual(u, force)) < least:
            best, least = u, found
    return best, spent, 1 / step


def halpern(given: Problem, tolerance: float, most: int, draw: np.random.Generator) -> tuple[Array, int, float]:
    """A point, row evaluations, and L: u ← λ u₀ + (1 - λ) Ĵ(u), λ = 1/(k+2) (arXiv 2310.02987, algorithm 2).

    Ĵ is about the resolvent of γ(F + G), γ = √n/L, by :func:`resolvent`. After each, the residual there is computed
    exactly, in one pass that counts. Where it is twice the least so far, L was too small: it is doubled.
    """
    start = u = given.middle()
    lipschitz, spent = slope(given, u)
    best, least = u, given.residual(u, given.force(u))
    k = 0
    while least > tolerance and spent < most:
        there, cost = resolvent(given, u, lipschitz, k, draw)
        found, spent = given.residual(there, given.force(there)), spent + cost + len(given.rows)
        if found > 2 * least:
            lipschitz, start, u, k = 2 * lipschitz, best, best, 0
            continue
        if found < least:
            best, least = there, found
        u = start / (k + 2) + (1 - 1 / (k + 2)) * there
        k += 1
    return best, spent, lipschitz


def resolvent(given: Problem, u: Array, lipschitz: float, k: int, draw: np.random.Generator) -> tuple[Array, int]:
    """About the resolvent of γ(F + G) at u, and row evaluations: forward, reflected, backward, with reduced variance.

    z ← Π(z - τ[γ(F(w) + F_S(z) - F_S(w₋)) + z - u]) for b = √n rows S drawn anew, where w is a point that F is known
    at and w₋ the one before; w ← z with probability p = b/n. ⌈(3/p) ln(k+3)⌉ steps (arXiv 2310.02987, section 4).
    """
    n = len(given.rows)
    batch = math.isqrt(n - 1) + 1
    p, gamma = batch / n, math.sqrt(n) / lipschitz
    tau = min(0.35 * math.sqrt(p * batch), 0.5) / (gamma * lipschitz)
    z, known, before, force, spent = u, u, u, given.force(u), n
    for _ in range(math.ceil(3 / p * math.log(k + 3))):
        rows = draw.integers(n, size=batch)
        guess = force + given.force(z, rows) - given.force(before, rows)
        z = given.project(z - tau * (gamma * guess + z - u))
        before, spent = known, spent + 2 * batch
        if draw.random() < p:
            known, force, spent = z, given.force(z), spent + n
    return z, spent


def slope(given: Problem, u: Array) -> tuple[float, int]:
    """L where the search begins: ‖F(z) - F(u)‖ / ‖z - u‖ for z = Π(u - F(u)), at least ``FLAT``; and row evaluations.

    By the floor alone L could be as large as 1/φ², and steps by that would be thousands of times too short. What is too
    small here is found out by :func:`halpern` itself.
    """
    force = given.force(u)
    ahead = given.project(u - force)
    apart, change = np.linalg.norm(ahead - u), np.linalg.norm(given.force(ahead) - force)
    return max(float(change / apart) if apart else 0.0, FLAT), 2 * len(given.rows)
