"""Mixture weights of experts that minimise the loss on the worst domain, with a certificate of optimality.

min over w, max over q of Σ_d q_d f_d(w), where f_d(w) = mean over texts i of domain d of -ln Σ_j w_j P_ij: K experts, D
domains, n texts, w and q distributions. It is convex in w and linear in q, so a price vector q certifies w.

Two transformations are applied to the rows in advance. Each row is divided by its largest entry to avoid underflow,
which adds a constant to its domain's loss (``shift``). And w ≥ φ: with w = φ + (1 - Kφ) v, w · P_i = v · B_i for
B_ij = (1 - Kφ) P_ij + φ Σ_k P_ik, so that v is any distribution. A point u is (v, q) [K + D].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planaria.common.errors import UserError

Array = NDArray[np.float64]

FLOOR = 0.01
"""minimum weight of an expert; it costs at most -ln(1 - Kφ) nats per text"""
MAX_BOUND_STEPS = 200
"""maximum number of iterations of expectation maximisation to tighten the bound"""
TIGHT = 1e-12
"""nats; slack at which the bound counts as tight"""


@dataclass(frozen=True)
class MinimaxProblem:
    """The concatenated rows of all domains."""

    names: tuple[str, ...]
    """names of domains [D]"""
    rows: Array
    """B [n, K], scaled"""
    domain: NDArray[np.int64]
    """domain of each row [n]"""
    size: Array
    """n_d: rows of each domain [D]"""
    shift: Array
    """amount by which scaling lowered each domain's loss [D], nats"""
    floor: float

    @property
    def experts(self) -> int:
        return int(self.rows.shape[1])

    def losses(self, v: Array) -> Array:
        """Return f_d [D], nats per text."""
        return self.shift - np.bincount(self.domain, np.log(self.rows @ v), len(self.size)) / self.size

    def force(self, u: Array, chosen: NDArray[np.int64] | None = None) -> Array:
        """Return (1/b) Σ F_i(u) [K + D] of the ``chosen`` rows [b], or of all n.

        F_i = (-(n/n_d) q_d B_i / (v · B_i), and at index d of q's part (n/n_d) ln(v · B_i)), less the shift: the
        gradient of the sum in v, and its negative gradient in q. F is monotone.
        """
        rows, domain = (self.rows, self.domain) if chosen is None else (self.rows[chosen], self.domain[chosen])
        v, q = u[: self.experts], u[self.experts :]
        inner, share = rows @ v, len(self.rows) / (len(rows) * self.size[domain])
        prices = np.bincount(domain, share * np.log(inner), len(self.size)) - self.shift
        return np.concatenate((-(share * q[domain] / inner) @ rows, prices))

    def project(self, u: Array) -> Array:
        """Return the nearest pair of distributions."""
        return np.concatenate((_simplex(u[: self.experts]), _simplex(u[self.experts :])))

    def residual(self, u: Array, force: Array) -> float:
        """Return min over g in the normal cone at u of ‖F(u) + g‖; zero exactly at a solution.

        By Moreau's decomposition it is the norm of -F projected on the tangent cone.
        """
        by_domain = np.split(np.stack((u, force)), [self.experts], axis=1)
        return float(np.linalg.norm([_tangent_length(row[0], -row[1]) for row in by_domain]))

    def centre(self) -> Array:
        """Return two uniform distributions."""
        return self.project(np.zeros(self.experts + len(self.size)))

    def weights(self, v: Array) -> Array:
        """Return w [K] of v."""
        return self.floor + (1 - self.experts * self.floor) * v

    def without_floor(self, w: Array) -> Array:
        """Return v [K] of w, the inverse of :meth:`weights`; rounding residues of zeros are removed."""
        v = _simplex((w - self.floor) / (1 - self.experts * self.floor))
        return np.where(v < TIGHT, 0.0, v)


def make_problem(texts: Mapping[str, Array], floor: float) -> MinimaxProblem:
    """Return the problem of these domains. ``texts``: domain → ln p_j of its texts by each expert [n_d, K], nats.

    :raises UserError: for a domain without texts, a single expert, a floor that leaves no choice, or a text that all
        experts consider impossible.
    """
    for name, logps in texts.items():
        if not logps.shape[0]:
            raise UserError(f"domain {name!r} has no held-out text, on which weights are fitted; provide some")
    experts = next(iter(texts.values())).shape[1]
    if experts < 2:
        raise UserError("there is only one expert, so there are no weights; add another with `planaria experts edit`")
    if not 0 < floor < 1 / experts:
        raise UserError(f"floor = {floor:g} must be above 0 and below 1/{experts}, so that weights can differ")
    for name, logps in texts.items():
        if (bad := np.flatnonzero(~np.isfinite(logps.max(1)))).size:
            raise UserError(
                f"domain {name!r}, held-out text {bad[0]}: all {experts} experts consider it impossible; remove it, or "
                "add an expert that can read it"
            )
    scaled = [np.exp(logps - logps.max(1, keepdims=True)) for logps in texts.values()]
    rows = np.concatenate(scaled)
    return MinimaxProblem(
        names=tuple(texts),
        rows=(1 - experts * floor) * rows + floor * rows.sum(1, keepdims=True),
        domain=np.repeat(np.arange(len(texts)), [len(likelihoods) for likelihoods in scaled]),
        size=np.array([float(len(likelihoods)) for likelihoods in scaled]),
        shift=np.array([-logps.max(1).mean() for logps in texts.values()]),
        floor=floor,
    )


@dataclass(frozen=True)
class MinimaxBounds:
    """Bounds that w and q prove; nats per text."""

    value: float
    """max_d f_d(w)"""
    bound: float
    """lower bound on the worst domain's loss for any weights of at least the floor"""
    residual: float
    """‖F + g‖, in units of the problem"""

    @property
    def gap(self) -> float:
        """Largest possible improvement of w."""
        return self.value - self.bound


def certificate(problem: MinimaxProblem, w: Array, q: Array) -> MinimaxBounds:
    """Compute the certificate of weights w [K] and prices q [D] from these alone."""
    v = problem.without_floor(w)
    u = np.concatenate((v, q))
    return MinimaxBounds(float(problem.losses(v).max()), bound(problem, v, q), problem.residual(u, problem.force(u)))


def bound(problem: MinimaxProblem, v: Array, q: Array) -> float:
    """Return a lower bound on min over v' of Σ_d q_d f_d(v'); nats per text.

    With r_i = q_d / n_d and D_j(v) = Σ_i r_i B_ij / (v · B_i), Jensen's inequality gives for every v and v'
    g(v) - g(v') = Σ_i r_i ln(v' · B_i / v · B_i) ≤ ln Σ_j v'_j D_j(v) ≤ ln max_j D_j(v). So each v gives a bound, and
    steps v ← v D(v) (expectation maximisation, which never raises g) tighten it; the best one counts.
    """
    share, base = q[problem.domain] / problem.size[problem.domain], float(q @ problem.shift)
    best, at = -np.inf, v
    for turn in range(MAX_BOUND_STEPS):
        inner = problem.rows @ at
        gain = (share / inner) @ problem.rows
        slack = float(np.log(gain.max()))
        best = max(best, base - float(share @ np.log(inner)) - slack)
        if slack < TIGHT:
            break
        # A weight of zero stays zero under these steps, so the second one starts from all positive weights.
        at = at * gain if turn else 0.9 * v + 0.1 / len(v)
    return best


def _simplex(x: Array) -> Array:
    """Return the nearest distribution [K]: x less a constant, clipped at zero."""
    sums = np.cumsum(np.sort(x)[::-1]) - 1
    count = np.arange(1, len(x) + 1)
    last = np.flatnonzero(np.sort(x)[::-1] - sums / count > 0)[-1]
    cut: Array = np.maximum(x - sums[last] / count[last], 0)
    return cut


def _tangent_length(x: Array, direction: Array) -> float:
    """Return the length of ``direction`` [K] projected on the tangent cone of the simplex at x [K].

    The cone contains those d that sum to 0 and are not negative where x is 0.
    """
    free, stuck = direction[x > 0], np.sort(direction[x <= 0])[::-1]
    total, count, included = float(free.sum()), len(free), 0
    while included < len(stuck) and stuck[included] > total / count:
        total, count, included = total + float(stuck[included]), count + 1, included + 1
    return float(np.linalg.norm(np.concatenate((free, stuck[:included])) - total / count))


Solver = Literal["extragradient", "halpern"]

MIN_HALPERN_ROWS = 10_000
"""rows from which halpern needs fewer evaluations, as measured; it was not faster in seconds on one machine"""
TOLERANCE = 1e-3
"""largest residual of a solution"""
MIN_LIPSCHITZ = 1e-3
"""minimum L, for equal experts, whose F is constant"""
PASSES = 4000
"""evaluations of all rows after which the best point is returned, certified or not"""


@dataclass(frozen=True)
class MinimaxWeights:
    """Result of a solver."""

    w: Array
    """[K], each at least the floor"""
    q: Array
    """prices of domains [D]"""
    proof: MinimaxBounds
    rows: int
    evaluations: int
    """row evaluations of the solver, without the certificate's"""
    solver: Solver
    certified: bool
    """whether the residual is within the tolerance"""


def worst_domain(
    problem: MinimaxProblem, tolerance: float = TOLERANCE, passes: int = PASSES, solver: Solver | None = None
) -> MinimaxWeights:
    """Return the weights for the worst domain, to a residual of ``tolerance`` if ``passes`` over the rows suffice.

    ``solver`` defaults by the number of rows.
    """
    chosen: Solver = solver or ("extragradient" if len(problem.rows) < MIN_HALPERN_ROWS else "halpern")
    max_evaluations = passes * len(problem.rows)
    if chosen == "extragradient":
        u, evaluations, _ = extragradient(problem, tolerance, max_evaluations)
    else:
        u, evaluations, _ = halpern(problem, tolerance, max_evaluations, np.random.default_rng(0))
    w, q = problem.weights(u[: problem.experts]), u[problem.experts :]
    proof = certificate(problem, w, q)
    return MinimaxWeights(w, q, proof, len(problem.rows), evaluations, chosen, proof.residual <= tolerance * (1 + 1e-6))


def extragradient(problem: MinimaxProblem, tolerance: float, max_evaluations: int) -> tuple[Array, int, float]:
    """Return a point, row evaluations and 1/step of u ← Π(u - η F(z)), z = Π(u - η F(u)) (Korpelevich 1976).

    η is halved until η ‖F(z) - F(u)‖ ≤ .7 ‖z - u‖ (Khobotov 1987) and grows by a tenth after each step, since the L
    implied by the floor, 1/φ², is far too large. Evaluations of rejected steps count.
    """
    u, step, spent = problem.centre(), 1.0, len(problem.rows)
    force = problem.force(u)
    best, least = u, problem.residual(u, force)
    while least > tolerance and spent < max_evaluations:
        ahead = problem.project(u - step * force)
        force_ahead, spent = problem.force(ahead), spent + len(problem.rows)
        if step * np.linalg.norm(force_ahead - force) > 0.7 * np.linalg.norm(ahead - u):
            step /= 2
            continue
        u = problem.project(u - step * force_ahead)
        force, spent, step = problem.force(u), spent + len(problem.rows), 1.1 * step
        if (residual := problem.residual(u, force)) < least:
            best, least = u, residual
    return best, spent, 1 / step


def halpern(
    problem: MinimaxProblem, tolerance: float, max_evaluations: int, draw: np.random.Generator
) -> tuple[Array, int, float]:
    """Return a point, row evaluations and L of u ← λ u₀ + (1 - λ) Ĵ(u), λ = 1/(k+2) (arXiv 2310.02987, algorithm 2).

    Ĵ approximates the resolvent of γ(F + G), γ = √n/L, by :func:`resolvent`. After each step the residual is computed
    exactly, in one pass that counts. If it is twice the least so far, L was too small and is doubled.
    """
    start = u = problem.centre()
    lipschitz, spent = slope(problem, u)
    best, least = u, problem.residual(u, problem.force(u))
    k = 0
    while least > tolerance and spent < max_evaluations:
        resolved, cost = resolvent(problem, u, lipschitz, k, draw)
        residual, spent = problem.residual(resolved, problem.force(resolved)), spent + cost + len(problem.rows)
        if residual > 2 * least:
            lipschitz, start, u, k = 2 * lipschitz, best, best, 0
            continue
        if residual < least:
            best, least = resolved, residual
        u = start / (k + 2) + (1 - 1 / (k + 2)) * resolved
        k += 1
    return best, spent, lipschitz


def resolvent(
    problem: MinimaxProblem, u: Array, lipschitz: float, k: int, draw: np.random.Generator
) -> tuple[Array, int]:
    """Approximate the resolvent of γ(F + G) at u by a variance-reduced forward-reflected-backward method.

    z ← Π(z - τ[γ(F(w) + F_S(z) - F_S(w₋)) + z - u]) for b = √n newly drawn rows S, where F is known at w and w₋ is the
    previous w; w ← z with probability p = b/n. ⌈(3/p) ln(k+3)⌉ steps (arXiv 2310.02987, section 4). Return the point
    and row evaluations.
    """
    n = len(problem.rows)
    batch = math.isqrt(n - 1) + 1
    p, gamma = batch / n, math.sqrt(n) / lipschitz
    tau = min(0.35 * math.sqrt(p * batch), 0.5) / (gamma * lipschitz)
    z, known, before, force, spent = u, u, u, problem.force(u), n
    for _ in range(math.ceil(3 / p * math.log(k + 3))):
        rows = draw.integers(n, size=batch)
        guess = force + problem.force(z, rows) - problem.force(before, rows)
        z = problem.project(z - tau * (gamma * guess + z - u))
        before, spent = known, spent + 2 * batch
        if draw.random() < p:
            known, force, spent = z, problem.force(z), spent + n
    return z, spent


def slope(problem: MinimaxProblem, u: Array) -> tuple[float, int]:
    """Return the initial L = ‖F(z) - F(u)‖ / ‖z - u‖ for z = Π(u - F(u)), at least MIN_LIPSCHITZ, and evaluations.

    The L implied by the floor, 1/φ², could be thousands of times too large. :func:`halpern` corrects one too small.
    """
    force = problem.force(u)
    ahead = problem.project(u - force)
    distance, change = np.linalg.norm(ahead - u), np.linalg.norm(problem.force(ahead) - force)
    return max(float(change / distance) if distance else 0.0, MIN_LIPSCHITZ), 2 * len(problem.rows)
