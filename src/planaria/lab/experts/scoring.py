"""Quality of an ensemble from its experts' token log-probabilities, which all arms share.

For the worst domain it computes the weights, their certificate, and their cost for other domains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean

import torch
from torch import Tensor

from planaria.lab.experts import posterior
from planaria.lab.experts.budget import GENERALIST, ArmCost, ExpertPlan
from planaria.lab.experts.experts_results import WORST, ArmResult, DomainScore, FittedWeights
from planaria.lab.experts.experts_spec import ExpertsSpec, MixtureSpec
from planaria.lab.experts.log_probabilities import DomainLogProbabilities, stack_readings
from planaria.lab.experts.minimax_weights import FLOOR, TOLERANCE


def arm_result(
    jobs: Sequence[ExpertPlan],
    cost: ArmCost,
    readings: Mapping[str, DomainLogProbabilities],
    spec: ExpertsSpec,
    positions: Mapping[str, Tensor],
) -> ArmResult:
    """Score the ensemble of an arm's trained experts on every domain's test text.

    ``positions``: for text priors, split and domain ("test.law") → ln π [D, N, T] of its samples, for the D domains
    whose experts are active.
    """
    trained = [job for job in jobs if job.name in readings]
    logps_of = stack_readings([readings[job.name] for job in trained])
    length, mixture = next(iter(logps_of.values())).shape[-1], spec.mixture
    fixed = belief(mixture, {name: logps_of[f"held_out.{name}"] for name in spec.domains})
    by_text = _expert_priors(positions, trained, spec.speaking) if positions else {}

    def scores(prefix: str, mixture: MixtureSpec, lost: int | None = None) -> dict[str, DomainScore]:
        left = [n for n in range(len(trained)) if n != lost]
        domains = [trained[n].domain for n in left]
        return {
            (domain := name.removeprefix(prefix)): score(
                logps[left],
                by_text.get(name, fixed)[left].log_softmax(0),
                mixture,
                domains.index(domain) if domain in domains else None,
            )
            for name, logps in logps_of.items()
            if name.startswith(prefix)
        }

    passes = posterior.forward_passes_per_token(len(jobs), length, mixture.top_k, mixture.prefix)
    ks = {f"top-{k}": k for k in range(1, len(trained))}
    return ArmResult(
        experts=trained,
        belief=fixed.tolist(),
        scores=scores("test.", mixture),
        all_experts=scores("test.", mixture.model_copy(update={"top_k": 0})),
        held_out=fmean(domain_score.loss for domain_score in scores("held_out.", mixture).values()),
        fewer={name: scores("test.", mixture.model_copy(update={"top_k": k})) for name, k in ks.items()},
        passes={
            name: posterior.forward_passes_per_token(len(trained), length, k, mixture.prefix) for name, k in ks.items()
        },
        without={
            job.name: {name: domain_score.loss for name, domain_score in scores("test.", mixture, n).items()}
            for n, job in enumerate(trained if len(trained) > 1 else ())
        },
        **asdict(replace(cost, token_flops=cost.token_flops * passes / len(jobs))),
    )


def _expert_priors(
    positions: Mapping[str, Tensor], jobs: Sequence[ExpertPlan], speaking: Sequence[str]
) -> dict[str, Tensor]:
    """Return split and domain → ln π [E, N, T] of the jobs' experts, from those of the domains ``speaking``."""
    rows = [0 if job.domain == GENERALIST else speaking.index(job.domain) for job in jobs]
    return {name: log_prior[rows].log_softmax(0) for name, log_prior in positions.items()}


def belief(spec: MixtureSpec, held_out: Mapping[str, Tensor]) -> Tensor:
    """Return the prior ln π [E]. ``held_out``: domain → its held-out texts' log-probabilities [E, N, T].

    :raises UserError: for prior = "worst", naming a domain on which weights cannot be fitted.
    """
    texts = list(held_out.values())
    if spec.prior == "worst" and len(texts[0]) > 1:
        first = {name: logps[..., : spec.prefix] for name, logps in held_out.items()}
        return torch.from_numpy(posterior.fit_worst_domain_weights(first).w).log()
    if spec.prior != "cached":
        return posterior.uniform_prior(len(texts[0]))
    each = min(math.ceil(spec.sequences / len(texts)), *(logps.shape[1] for logps in texts))
    return posterior.cached_prior(torch.stack([logps[:, :each].sum(-1) for logps in texts], -1), spec.decay)


def score(logps: Tensor, log_prior: Tensor, spec: MixtureSpec, own: int | None = None) -> DomainScore:
    """Score the mixture on texts [E, N, T]; ``spec`` may restrict it to the strongest experts after the prefix.

    ``own``: the number of the expert of the texts' domain, if there is one.
    """
    log_w = posterior.keep_strongest(posterior.log_weights(logps, log_prior), spec.top_k, spec.prefix)
    return DomainScore(
        loss=-float(posterior.log_mixture(logps, log_w).mean()),
        best=-float(logps.mean((1, 2)).max()),
        averaged=-float(posterior.mean_expert_logps(logps, log_prior).mean()),
        speaking=log_w.exp().mean((1, 2)).tolist(),
        routed=None if own is None else _share_led_by(own, log_w),
        routed_by_prior=None if own is None or log_prior.dim() < 3 else _share_led_by(own, log_prior),
    )


def _share_led_by(expert: int, log_w: Tensor) -> float:
    """Return the share of texts [E, N, T] at whose end this expert has the largest weight."""
    return float((log_w[..., -1].argmax(0) == expert).double().mean())


REFERENCE_PRIORS = ("uniform", "cached")
"""priors compared with the fitted one"""


def fit_weights(
    experts: Sequence[str],
    held_out: Mapping[str, Tensor],
    test: Mapping[str, Tensor],
    mixture: MixtureSpec,
    tokens: int,
    floor: float = FLOOR,
    tolerance: float = TOLERANCE,
) -> FittedWeights:
    """Fit weights on ``held_out`` and measure them on both. Arguments: domain → token log-probabilities [E, N, T].

    ``mixture`` determines the cached prior; ``tokens`` limits the length of each text.

    :raises UserError: naming the domain, when the problem has no solution or no choice.
    """
    tokens = min(tokens, *(logps.shape[-1] for logps in (*held_out.values(), *test.values())))
    solution = posterior.fit_worst_domain_weights(
        {name: logps[..., :tokens] for name, logps in held_out.items()}, floor, tolerance
    )
    beliefs = {name: belief(mixture.model_copy(update={"prior": name}), held_out) for name in REFERENCE_PRIORS} | {
        WORST: torch.from_numpy(solution.w).log()
    }
    return FittedWeights(
        experts=list(experts),
        tokens=tokens,
        texts=sum(logps.shape[1] for logps in held_out.values()),
        floor=floor,
        weights=solution.w.tolist(),
        prices=dict(zip(held_out, solution.q.tolist(), strict=True)),
        value=solution.proof.value / tokens,
        bound=solution.proof.bound / tokens,
        residual=solution.proof.residual,
        tolerance=tolerance,
        certified=solution.certified,
        solver=solution.solver,
        passes=solution.evaluations / solution.rows,
        held_out={name: _losses(held_out, log_prior, tokens) for name, log_prior in beliefs.items()},
        test={name: _losses(test, log_prior, tokens) for name, log_prior in beliefs.items()},
    )


def _losses(texts: Mapping[str, Tensor], log_prior: Tensor, tokens: int) -> dict[str, float]:
    """Return domain → mean over texts of -ln Σ_j π_j p_j(first tokens), per token."""
    return {
        name: -float(torch.logsumexp(logps[..., :tokens].sum(-1) + log_prior[:, None], 0).mean()) / tokens
        for name, logps in texts.items()
    }
