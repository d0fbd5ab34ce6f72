"""Weights of experts for the domain on which they do worst, with a proof of how far from the best weights they are.

min over w, max over q of Σ_d q_d f_d(w), where f_d(w) = mean over texts i of domain d of -ln Σ_j w_j P_ij: K experts, D
domains, n texts, w and q distributions. It is convex in w and linear in q, so w has a price vector q that proves it.

Two things are folded into the rows once, so that nothing below knows of them. Each row is divided by its largest entry,
or it would underflow; that adds a constant to its domain's loss (``shift``). And w ≥ φ: with w = φ + (1 - Kφ) v,
w · P_i = v · B_i for B_ij = (1 - Kφ) P_ij + φ Σ_k P_ik, so that v is any distribution. A point u is (v, q) [K + D].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.common.errors import UserError

Array = NDArray[np.float64]

FLOOR = 0.01
"""least weight of an expert; it costs at most -ln(1 - Kφ) nats a text"""
ROUNDS = 200
"""of expectation and maximisation, by which the bound is tightened"""
TIGHT = 1e-12
"""nats; a tighter bound is of no use"""


@dataclass(frozen=True)
class Problem:
    """The rows of all domains, one after the other."""

    names: tuple[str, ...]
    """of domains [D]"""
    rows: Array
    """B [n, K], scaled"""
    domain: NDArray[np.int64]
    """of each row [n]"""
    size: Array
    """n_d: rows of each domain [D]"""
    shift: Array
    """what scaling took from each domain's loss [D], nats"""
    floor: float

    @property
    def experts(self) -> int:
        return int(self.rows.shape[1])

    def losses(self, v: Array) -> Array:
        """f_d [D], nats a text."""
        return self.shift - np.bincount(self.domain, np.log(self.rows @ v), len(self.size)) / self.size

    def force(self, u: Array, chosen: NDArray[np.int64] | None = None) -> Array:
        """(1/b) Σ F_i(u) [K + D] of the ``chosen`` rows [b], or of all n.

        F_i = (-(n/n_d) q_d B_i / (v · B_i), and at place d of q's part (n/n_d) ln(v · B_i)), less the shift: the
        gradient of the sum in v, and its negative gradient in q. F is monotone.
        """
        rows, domain = (self.rows, self.domain) if chosen is None else (self.rows[chosen], self.domain[chosen])
        v, q = u[: self.experts], u[self.experts :]
        inner, share = rows @ v, len(self.rows) / (len(rows) * self.size[domain])
        prices = np.bincount(domain, share * np.log(inner), len(self.size)) - self.shift
        return np.concatenate((-(share * q[domain] / inner) @ rows, prices))

    def project(self, u: Array) -> Array:
        """The nearest pair of distributions."""
        return np.concatenate((_simplex(u[: self.experts]), _simplex(u[self.experts :])))

    def residual(self, u: Array, force: Array) -> float:
        """min over g in the normal cone at u of ‖F(u) + g‖; zero exactly at a solution.

        -F less its projection on the normal cone is its projection on the tangent cone (Moreau): that is measured.
        """
        parts = np.split(np.stack((u, force)), [self.experts], axis=1)
        return float(np.linalg.norm([_along(part[0], -part[1]) for part in parts]))

    def middle(self) -> Array:
        """Both distributions uniform."""
        return self.project(np.zeros(self.experts + len(self.size)))

    def weights(self, v: Array) -> Array:
        """w [K] of v."""
        return self.floor + (1 - self.experts * self.floor) * v

    def folded(self, w: Array) -> Array:
        """v [K] of w: the inverse of :meth:`weights`; what rounding left of a zero is a zero again."""
        v = _simplex((w - self.floor) / (1 - self.experts * self.floor))
        return np.where(v < TIGHT, 0.0, v)


def problem(texts: Mapping[str, Array], floor: float = FLOOR) -> Problem:
    """The problem of these domains. ``texts``: domain → ln p_j of its texts by each expert [n_d, K], nats.

    :raises UserError: for a domain without texts, a single expert, a floor that leaves nothing to choose, or a text
        that no expert holds possible.
    """
    for name, found in texts.items():
        if not found.shape[0]:
            raise UserError(f"domain {name!r}: has no held-out text; weights are fitted on that, so give it some")
    experts = next(iter(texts.values())).shape[1]
    if experts < 2:
        raise UserError("there is one expert only, and nothing to weigh; add another with `planaria experts add`")
    if not 0 < floor < 1 / experts:
        raise UserError(f"floor = {floor:g}: must be above 0 and below 1/{experts}, or all weights are alike")
    for name, found in texts.items():
        if (bad := np.flatnonzero(~np.isfinite(found.max(1)))).size:
            raise UserError(
                f"domain {name!r}, held-out text {bad[0]}: all {experts} experts hold it impossible; take it out, or "
                "add an expert that can read it"
            )
    scaled = [np.exp(found - found.max(1, keepdims=True)) for found in texts.values()]
    rows = np.concatenate(scaled)
    return Problem(
        names=tuple(texts),
        rows=(1 - experts * floor) * rows + floor * rows.sum(1, keepdims=True),
        domain=np.repeat(np.arange(len(texts)), [len(part) for part in scaled]),
        size=np.array([float(len(part)) for part in scaled]),
        shift=np.array([-found.max(1).mean() for found in texts.values()]),
        floor=floor,
    )


@dataclass(frozen=True)
class Certificate:
    """What w and q prove of each other; nats a text."""

    value: float
    """max_d f_d(w)"""
    bound: float
    """no weights of at least the floor have a worst domain below this"""
    residual: float
    """‖F + g‖, in units of the problem"""

    @property
    def gap(self) -> float:
        """What w could be improved by, at most."""
        return self.value - self.bound


def certificate(given: Problem, w: Array, q: Array) -> Certificate:
    """The certificate of weights w [K] and prices q [D], computed from these alone."""
    v = given.folded(w)
    u = np.concatenate((v, q))
    return Certificate(float(given.losses(v).max()), bound(given, v, q), given.residual(u, given.force(u)))


def bound(given: Problem, v: Array, q: Array) -> float:
    """A number that min over v' of Σ_d q_d f_d(v') cannot be below; nats a text.

    With r_i = q_d / n_d and D_j(v) = Σ_i r_i B_ij / (v · B_i), Jensen's inequality gives for every v and v'
    g(v) - g(v') = Σ_i r_i ln(v' · B_i / v · B_i) ≤ ln Σ_j v'_j D_j(v) ≤ ln max_j D_j(v). So each v proves a bound, and
    steps v ← v D(v) (expectation and maximisation, which never raise g) tighten it; the best one counts.
    """
    share, base = q[given.domain] / given.size[given.domain], float(q @ given.shift)
    best, at = -np.inf, v
    for turn in range(ROUNDS):
        inner = given.rows @ at
        gain = (share / inner) @ given.rows
        slack = float(np.log(gain.max()))
        best = max(best, base - float(share @ np.log(inner)) - slack)
        if slack < TIGHT:
            break
        # A weight of zero stays zero under these steps, so the second one begins where all are positive.
        at = at * gain if turn else 0.9 * v + 0.1 / len(v)
    return best


def _simplex(x: Array) -> Array:
    """The nearest distribution [K]: x less one number, cut off at zero."""
    sums = np.cumsum(np.sort(x)[::-1]) - 1
    count = np.arange(1, len(x) + 1)
    last = np.flatnonzero(np.sort(x)[::-1] - sums / count > 0)[-1]
    cut: Array = np.maximum(x - sums[last] / count[last], 0)
    return cut


def _along(x: Array, wish: Array) -> float:
    """Length of the part of ``wish`` [K] that leads from the distribution x [K] to others: its projection on those d
    that sum to 0 and are not negative where x is 0."""
    free, stuck = wish[x > 0], np.sort(wish[x <= 0])[::-1]
    total, count, taken = float(free.sum()), len(free), 0
    while taken < len(stuck) and stuck[taken] > total / count:
        total, count, taken = total + float(stuck[taken]), count + 1, taken + 1
    return float(np.linalg.norm(np.concatenate((free, stuck[:taken])) - total / count))
