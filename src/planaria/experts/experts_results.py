"""What came of it: perplexity for each domain and arm over the seeds, wins with ties apart, and what was spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from planaria.documents import Record
from planaria.experts.budget import SYNCHRONISED, Job

TIE = 0.005
"""arms whose perplexities are nearer than this are equally good"""


class Score(Record):
    """An ensemble on one domain's test text; losses in nats per token."""

    loss: float
    """of the mixture"""
    best: float
    """of the best single expert"""
    averaged: float
    """the mean of the experts' losses: an upper bound"""
    speaking: list[float]
    """the mean weight of each expert over all tokens"""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


class ArmResult(Record):
    """One arm with one seed."""

    experts: list[Job]
    """those that were trained"""
    belief: list[float]
    """ln π of each of them, as far as it is the same for all texts"""
    scores: dict[str, Score]
    """test domain → how the ensemble did, as the recipe's mixture says"""
    held_out: float
    """mean loss of the ensemble on the domains' held-out text: what an arm may be chosen by"""
    fewer: dict[str, dict[str, Score]]
    """top-1, top-2 … → test domain → the same with so many going on after the prefix"""
    passes: dict[str, float]
    """top-k → forward passes for each token"""
    without: dict[str, dict[str, float]]
    """expert → test domain → loss of the ensemble of the others"""
    flops: float
    parameter_tokens: float
    inner_parameter_tokens: float


class SeedResult(Record):
    """All arms with one seed."""

    seed: int
    difficulty: dict[str, dict[str, float]]
    """by what → domain → how hard"""
    tier: dict[str, dict[str, int]]
    curves: dict[str, list[tuple[int, float]]]
    """domain → steps of its probe, and the held-out loss after them"""
    parent: dict[str, float]
    """test domain → loss of the seed model of middle size"""
    single: dict[str, dict[str, float]]
    """expert → test domain → its loss by itself"""
    lost: list[str]
    """experts that could not be trained"""
    arms: dict[str, ArmResult]


class Speech(Record):
    """Who speaks when: an ensemble's weights over a text."""

    experts: list[str]
    pieces: list[str]
    """the text of each token"""
    weights: list[list[float]]
    """of every expert, for each token"""


class Results(Record):
    """A whole run."""

    name: str
    trained: list[str]
    untrained: list[str]
    runs: list[SeedResult]
    speech: Speech | None = None

    @property
    def domains(self) -> list[str]:
        return [*self.trained, *self.untrained]

    @property
    def arms(self) -> list[str]:
        return list(self.runs[0].arms)

    def perplexities(self, arm: str, domain: str) -> list[float]:
        """One for each seed."""
        return [run.arms[arm].scores[domain].perplexity for run in self.runs if arm in run.arms]

    def ratios(self, arm: str, domain: str, to: str = SYNCHRONISED) -> list[float]:
        """The arm's perplexity over another's, seed by seed."""
        pairs = zip(self.perplexities(arm, domain), self.perplexities(to, domain), strict=True)
        return [mine / theirs for mine, theirs in pairs]

    def overall(self, arm: str, to: str = SYNCHRONISED, domains: Sequence[str] = ()) -> list[float]:
        """The geometric mean of :meth:`ratios` over these domains, or all, seed by seed."""
        by_domain = [self.ratios(arm, domain, to) for domain in domains or self.domains]
        return [geometric([ratios[n] for ratios in by_domain]) for n in range(len(self.runs))]

    def verdict(self, arm: str, domain: str) -> Literal["win", "tie", "loss"]:
        """Against the even arm: won or lost by more than ``TIE`` with every seed, else a tie."""
        ratios = self.ratios(arm, domain)
        if max(ratios) < 1 - TIE:
            return "win"
        return "loss" if min(ratios) > 1 + TIE else "tie"


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(fmean(map(math.log, values)))
