"""Results of an experts run: perplexity by domain and arm over the seeds, wins and ties, and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import Field

from planaria.common.documents import Record
from planaria.lab.experts.budget import SYNCHRONISED, ExpertPlan, is_generalist
from planaria.lab.experts.experts_spec import MixtureSpec

TIE = 0.005
"""relative difference of perplexities below which arms are equally good"""
WORST = "worst"
"""the prior for the worst domain"""


class DomainScore(Record):
    """An ensemble on one domain's test text; losses in nats per token."""

    loss: float
    """loss of the mixture"""
    best: float
    """loss of the best single expert"""
    averaged: float
    """mean of the experts' losses: an upper bound"""
    speaking: list[float]
    """mean weight of each expert over all tokens"""
    routed: float | None = None
    """share of the texts at whose end the expert of their own domain has the largest weight; None without such an
    expert"""
    routed_by_prior: float | None = None
    """the same of the prior alone; None if it is the same for all texts"""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


class ArmResult(Record):
    """One arm with one seed."""

    experts: list[ExpertPlan]
    """the trained ones"""
    belief: list[float]
    """ln π of each expert if it is the same for all texts"""
    scores: dict[str, DomainScore]
    """test domain → score with the recipe's mixture"""
    all_experts: dict[str, DomainScore] = Field(default_factory=dict)
    """test domain → score with all experts active, whatever the recipe's top_k"""
    held_out: float
    """mean loss of the ensemble on the domains' held-out text, for model selection"""
    fewer: dict[str, dict[str, DomainScore]]
    """top-1, top-2 … → test domain → score with that many experts after the prefix"""
    passes: dict[str, float]
    """top-k → forward passes per token"""
    without: dict[str, dict[str, float]]
    """member → test domain → loss of the ensemble without it"""
    flops: float
    parameter_tokens: float
    inner_parameter_tokens: float
    token_flops: float = 0.0
    """forward passes of the recipe's mixture for one token, in experts of their mean size"""


class SeedResult(Record):
    """All arms with one seed, in one line of descent."""

    seed: int
    line: int = 0
    """number of the line within the seed"""
    parents: dict[str, str] = Field(default_factory=dict)
    """size → the parent of its experts in this line"""
    branched: dict[str, dict[str, float]] = Field(default_factory=dict)
    """size → test domain → loss of that parent"""
    difficulty: dict[str, dict[str, float]]
    """measure → domain → difficulty"""
    tier: dict[str, dict[str, int]]
    curves: dict[str, list[tuple[int, float]]]
    """domain → steps of its probe, and the held-out loss after them"""
    parent: dict[str, float]
    """test domain → loss of the line's parent of middle size"""
    single: dict[str, dict[str, float]]
    """member → test domain → its own loss"""
    lost: list[str]
    """experts that could not be trained"""
    arms: dict[str, ArmResult]


class TextWeights(Record):
    """An ensemble's weights over a text."""

    experts: list[str]
    pieces: list[str]
    """the text of each token"""
    weights: list[list[float]]
    """weights of all experts for each token"""


class FittedWeights(Record):
    """Weights fitted on the first tokens of held-out texts. Losses are in nats per token, of these tokens only."""

    experts: list[str]
    tokens: int
    """first tokens of each text that count"""
    texts: int
    """texts on which the weights were fitted"""
    floor: float
    weights: list[float]
    """weight of each expert"""
    prices: dict[str, float]
    """domain → q_d: reduction of the worst domain's loss per nat of reduction of this domain's"""
    value: float
    """loss of the worst domain on held-out text"""
    bound: float
    """lower bound on ``value`` for any weights of at least the floor"""
    residual: float
    tolerance: float
    certified: bool
    """whether the residual is within the tolerance"""
    solver: str
    passes: float
    """row evaluations over the number of rows"""
    held_out: dict[str, dict[str, float]]
    """prior → domain → loss on the text on which the weights were fitted"""
    test: dict[str, dict[str, float]]
    """prior → domain → loss on test text"""

    @property
    def gap(self) -> float:
        """Largest possible improvement by other weights, nats per token."""
        return self.value - self.bound

    @property
    def most(self) -> float:
        """ln K / T: largest possible gain of any prior over the uniform one on any text, nats per token."""
        return math.log(len(self.experts)) / self.tokens

    def worst(self, prior: str) -> str:
        """Return the domain of the largest loss on held-out text."""
        losses = self.held_out[prior]
        return max(losses, key=losses.__getitem__)

    @property
    def costs(self) -> dict[str, float]:
        """Domain → increase of its test loss by the weights, relative to the uniform prior."""
        return {name: loss - self.test["uniform"][name] for name, loss in self.test[WORST].items()}


class Results(Record):
    """Results of a whole run."""

    name: str
    trained: list[str]
    untrained: list[str]
    mixture: MixtureSpec | None = None
    """mixture of all ensembles; None in results of older versions"""
    runs: list[SeedResult]
    speech: TextWeights | None = None
    worst: FittedWeights | None = None
    """the ensemble's weights for its worst domain, or None for a single expert, or for too many to choose"""

    @property
    def domains(self) -> list[str]:
        return [*self.trained, *self.untrained]

    @property
    def arms(self) -> list[str]:
        """The arms that exist for every seed and parent."""
        return [arm for arm in self.runs[0].arms if all(arm in run.arms for run in self.runs)]

    @property
    def ensembles(self) -> list[str]:
        """The arms of several experts."""
        return [arm for arm in self.arms if not is_generalist(arm)]

    @property
    def generalists(self) -> list[str]:
        """The arms of one model."""
        return [arm for arm in self.arms if is_generalist(arm)]

    @property
    def active_domains(self) -> list[str]:
        """The domains whose experts are active in the even arm: all trained ones, unless some follow others."""
        active = {job.domain for run in self.runs for job in run.arms[SYNCHRONISED].experts}
        return [domain for domain in self.trained if domain in active]

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    def of(self, seed: int) -> list[SeedResult]:
        """Return the seed's lines of descent."""
        return [run for run in self.runs if run.seed == seed]

    def perplexities(self, arm: str, domain: str) -> list[float]:
        """Return one perplexity per seed: the geometric mean over its lines of descent."""
        return [
            geometric_mean([run.arms[arm].scores[domain].perplexity for run in self.of(seed)]) for seed in self.seeds
        ]

    def ratios(self, arm: str, domain: str, to: str = SYNCHRONISED) -> list[float]:
        """Return the arm's perplexity over another's, seed by seed."""
        pairs = zip(self.perplexities(arm, domain), self.perplexities(to, domain), strict=True)
        return [own / theirs for own, theirs in pairs]

    def overall(self, arm: str, to: str = SYNCHRONISED, domains: Sequence[str] = ()) -> list[float]:
        """Return the geometric mean of :meth:`ratios` over these domains, or all, seed by seed."""
        by_domain = [self.ratios(arm, domain, to) for domain in domains or self.domains]
        return [geometric_mean([ratios[n] for ratios in by_domain]) for n in range(len(self.seeds))]

    def luck(self, arm: str) -> list[float]:
        """Return the effect of the parent alone on an arm's perplexity over the synchronised arm's, over all domains.

        There is one number per line of descent, relative to the geometric mean of all lines of its seed. It is 1 if a
        seed has one line.
        """
        ratios = []
        for seed in self.seeds:
            logs = [
                fmean(run.arms[arm].scores[d].loss - run.arms[SYNCHRONISED].scores[d].loss for d in self.domains)
                for run in self.of(seed)
            ]
            ratios += [math.exp(log - fmean(logs)) for log in logs]
        return ratios

    def branched(self, size: str) -> list[list[float]]:
        """Return the parents' perplexity, geometric mean over all domains, by seed and line of descent."""
        return [
            [math.exp(fmean(run.branched[size][domain] for domain in self.domains)) for run in self.of(seed)]
            for seed in self.seeds
        ]

    def times(self, arm: str, to: str) -> float:
        """Return the compute per token of one arm over another's, with the recipe's mixture."""
        run = max(self.runs, key=lambda run: len(run.arms[arm].experts))
        once = run.arms[to].token_flops
        return run.arms[arm].token_flops / once if once else math.nan

    def routed(self, arm: str, domains: Sequence[str], by_prior: bool = False) -> list[float]:
        """Return the mean share of these domains' test texts that are routed to their own expert, seed by seed.

        ``by_prior``: by the prior alone. Seeds that did not measure it are omitted.
        """
        shares = []
        for seed in self.seeds:
            scores = [run.arms[arm].scores[domain] for run in self.of(seed) for domain in domains]
            known = [score.routed_by_prior if by_prior else score.routed for score in scores]
            if measured := [share for share in known if share is not None]:
                shares.append(fmean(measured))
        return shares

    def verdict(self, arm: str, domain: str, to: str = SYNCHRONISED) -> Literal["win", "tie", "loss"]:
        """Compare with another arm: a win or loss by more than ``TIE`` with every seed, else a tie."""
        ratios = self.ratios(arm, domain, to)
        if max(ratios) < 1 - TIE:
            return "win"
        return "loss" if min(ratios) > 1 + TIE else "tie"


def geometric_mean(numbers: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(fmean(map(math.log, numbers)))
