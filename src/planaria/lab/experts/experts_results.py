"""What came of it: perplexity for each domain and arm over the seeds, wins with ties apart, and what was spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import Field

from planaria.common.documents import Record
from planaria.lab.experts.budget import SYNCHRONISED, Job, is_generalist

TIE = 0.005
"""arms whose perplexities are nearer than this are equally good"""
WORST = "worst"
"""the prior for the worst domain"""


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
    token_flops: float = 0.0
    """a forward pass of all that speak, for one token"""


class SeedResult(Record):
    """All arms with one seed, in one line of descent."""

    seed: int
    line: int = 0
    """which of the seed's"""
    parents: dict[str, str] = Field(default_factory=dict)
    """size → the parent of its experts in this line"""
    branched: dict[str, dict[str, float]] = Field(default_factory=dict)
    """size → test domain → loss of that parent"""
    difficulty: dict[str, dict[str, float]]
    """by what → domain → how hard"""
    tier: dict[str, dict[str, int]]
    curves: dict[str, list[tuple[int, float]]]
    """domain → steps of its probe, and the held-out loss after them"""
    parent: dict[str, float]
    """test domain → loss of the line's parent of middle size"""
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


class Weighing(Record):
    """Weights fitted on the first tokens of held-out texts. A loss is in nats per token, of these tokens alone."""

    experts: list[str]
    tokens: int
    """of each text, from its beginning"""
    texts: int
    """that the weights were fitted on"""
    floor: float
    weights: list[float]
    """of each expert"""
    prices: dict[str, float]
    """domain → q_d: how much lower the worst domain's loss were if this domain's were 1 nat lower"""
    value: float
    """loss of the worst domain, held-out text"""
    bound: float
    """no weights of at least the floor have a worst domain below this"""
    residual: float
    tolerance: float
    certified: bool
    """the residual is within the tolerance"""
    solver: str
    passes: float
    """evaluations of rows, over their number"""
    held_out: dict[str, dict[str, float]]
    """prior → domain → loss on the text that the weights were fitted on"""
    test: dict[str, dict[str, float]]
    """the same on test text"""

    @property
    def gap(self) -> float:
        """Nats per token that other weights could bring, at most."""
        return self.value - self.bound

    @property
    def most(self) -> float:
        """ln K / T: nats per token that any prior can be better than the uniform one, on any text."""
        return math.log(len(self.experts)) / self.tokens

    def worst(self, prior: str) -> str:
        """The domain of the largest loss on held-out text."""
        losses = self.held_out[prior]
        return max(losses, key=losses.__getitem__)

    @property
    def costs(self) -> dict[str, float]:
        """Domain → what the weights add to its test loss, over the uniform prior."""
        return {name: loss - self.test["uniform"][name] for name, loss in self.test[WORST].items()}


class Results(Record):
    """A whole run."""

    name: str
    trained: list[str]
    untrained: list[str]
    runs: list[SeedResult]
    speech: Speech | None = None
    worst: Weighing | None = None
    """the ensemble's weights for its worst domain; None for a single expert, or for too many to choose"""

    @property
    def domains(self) -> list[str]:
        return [*self.trained, *self.untrained]

    @property
    def arms(self) -> list[str]:
        """Those that were made with every seed, from every parent."""
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
    def spoken(self) -> list[str]:
        """The domains whose experts speak in the even arm: all trained ones, unless some come after others."""
        heard = {job.domain for run in self.runs for job in run.arms[SYNCHRONISED].experts}
        return [domain for domain in self.trained if domain in heard]

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    def of(self, seed: int) -> list[SeedResult]:
        """The seed's lines of descent."""
        return [run for run in self.runs if run.seed == seed]

    def perplexities(self, arm: str, domain: str) -> list[float]:
        """One for each seed: the geometric mean over its lines of descent."""
        return [geometric([run.arms[arm].scores[domain].perplexity for run in self.of(seed)]) for seed in self.seeds]

    def ratios(self, arm: str, domain: str, to: str = SYNCHRONISED) -> list[float]:
        """The arm's perplexity over another's, seed by seed."""
        pairs = zip(self.perplexities(arm, domain), self.perplexities(to, domain), strict=True)
        return [mine / theirs for mine, theirs in pairs]

    def overall(self, arm: str, to: str = SYNCHRONISED, domains: Sequence[str] = ()) -> list[float]:
        """The geometric mean of :meth:`ratios` over these domains, or all, seed by seed."""
        by_domain = [self.ratios(arm, domain, to) for domain in domains or self.domains]
        return [geometric([ratios[n] for ratios in by_domain]) for n in range(len(self.seeds))]

    def luck(self, arm: str, to: str = SYNCHRONISED) -> list[float]:
        """What the parent alone makes of an arm's perplexity over another's, all domains: of each line of descent, over
        the geometric mean of all lines of its seed. Ones where a seed has one line.
        """
        found = []
        for seed in self.seeds:
            logs = [
                fmean(run.arms[arm].scores[d].loss - run.arms[to].scores[d].loss for d in self.domains)
                for run in self.of(seed)
            ]
            found += [math.exp(log - fmean(logs)) for log in logs]
        return found

    def branched(self, size: str) -> list[list[float]]:
        """The parents' own perplexity, geometric mean over all domains: of each seed, one for each line of descent."""
        return [
            [math.exp(fmean(run.branched[size][domain] for domain in self.domains)) for run in self.of(seed)]
            for seed in self.seeds
        ]

    def times(self, arm: str, to: str) -> float:
        """How much more compute a token takes to read with one arm than with another, all experts speaking."""
        run = max(self.runs, key=lambda run: len(run.arms[arm].experts))
        once = run.arms[to].token_flops
        return run.arms[arm].token_flops / once if once else math.nan

    def verdict(self, arm: str, domain: str, to: str = SYNCHRONISED) -> Literal["win", "tie", "loss"]:
        """Against another arm: won or lost by more than ``TIE`` with every seed, else a tie."""
        ratios = self.ratios(arm, domain, to)
        if max(ratios) < 1 - TIE:
            return "win"
        return "loss" if min(ratios) > 1 + TIE else "tie"


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(fmean(map(math.log, values)))
