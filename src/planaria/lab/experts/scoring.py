"""How good an ensemble is, from its experts' token log-probabilities alone: nothing is read twice for another arm.

For the worst domain: the weights, what they prove, and what they cost the other domains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from planaria.lab.experts import posterior
from planaria.lab.experts.budget import GENERALIST, Job, Spent
from planaria.lab.experts.experts_results import WORST, ArmResult, Score, Weighing
from planaria.lab.experts.experts_spec import ExpertsSpec, MixtureSpec
from planaria.lab.experts.reading import Readings
from planaria.lab.experts.worst import FLOOR, TOLERANCE


def arm_result(
    jobs: Sequence[Job],
    bill: Spent,
    readings: Mapping[str, Readings],
    spec: ExpertsSpec,
    places: Mapping[str, Tensor],
) -> ArmResult:
    """The ensemble of an arm's experts, as far as they were trained, on every domain's test text.

    ``places``: for a prior that the text tells, part and domain ("test.law") → ln π [D, N, T] of its samples, D the
    domains that speak.
    """
    there = [job for job in jobs if job.name in readings]
    found = _stacked([readings[job.name] for job in there])
    fixed, by_place = (
        belief(spec.mixture, {name: found[f"held_out.{name}"] for name in spec.domains}),
        dict[str, Tensor](),
    )
    if places:
        speaking = spec.speaking
        rows = [0 if job.domain == GENERALIST else speaking.index(job.domain) for job in there]
        by_place = {part: log_prior[rows].log_softmax(0) for part, log_prior in places.items()}

    def scores(part: str, mixture: MixtureSpec, lost: int | None = None) -> dict[str, Score]:
        left = [n for n in range(len(there)) if n != lost]
        own = {name: logps for name, logps in found.items() if name.startswith(part)}
        return {
            name.removeprefix(part): score(logps[left], by_place.get(name, fixed)[left].log_softmax(0), mixture)
            for name, logps in own.items()
        }

    def losses_without(lost: int) -> dict[str, float]:
        return {name: one.loss for name, one in scores("test.", mixture, lost).items()}

    length, mixture = next(iter(found.values())).shape[-1], spec.mixture
    ks = {f"top-{k}": k for k in range(1, len(there))}
    return ArmResult(
        experts=there,
        belief=fixed.tolist(),
        scores=scores("test.", mixture),
        held_out=fmean(one.loss for one in scores("held_out.", mixture).values()),
        fewer={name: scores("test.", mixture.model_copy(update={"top_k": k})) for name, k in ks.items()},
        passes={name: posterior.passes(len(there), length, k, mixture.prefix) for name, k in ks.items()},
        without={job.name: losses_without(n) for n, job in enumerate(there)} if len(there) > 1 else {},
        flops=bill.flops,
        parameter_tokens=bill.parameter_tokens,
        inner_parameter_tokens=bill.inner_parameter_tokens,
        token_flops=bill.token_flops,
    )


def belief(spec: MixtureSpec, held_out: Mapping[str, Tensor]) -> Tensor:
    """ln π [E] before a text begins. ``held_out``: domain → its held-out texts' log-probabilities [E, N, T].

    :raises UserError: for prior = "worst", naming a domain that no weights can be fitted on.
    """
    texts = list(held_out.values())
    if spec.prior == "worst" and len(texts[0]) > 1:
        first = {name: logps[..., : spec.prefix] for name, logps in held_out.items()}
        return torch.from_numpy(posterior.fitted(first).w).log()
    if spec.prior != "cached":
        return posterior.uniform(len(texts[0]))
    each = min(math.ceil(spec.sequences / len(texts)), *(logps.shape[1] for logps in texts))
    return posterior.cached(torch.stack([logps[:, :each].sum(-1) for logps in texts], -1), spec.decay)


def score(logps: Tensor, log_prior: Tensor, spec: MixtureSpec) -> Score:
    """The mixture on texts [E, N, T]; where ``spec`` has it, only the strongest go on after the prefix."""
    log_w = posterior.speakers(posterior.log_weights(logps, log_prior), spec.top_k, spec.prefix)
    return Score(
        loss=-float(posterior.mixed(logps, log_w).mean()),
        best=-float(logps.mean((1, 2)).max()),
        averaged=-float(posterior.averaged(logps, log_prior).mean()),
        speaking=log_w.exp().mean((1, 2)).tolist(),
    )


def _stacked(readings: Sequence[Readings]) -> dict[str, Tensor]:
    """Part and domain → what several experts read there [E, N, T]."""
    parts = {f"test.{name}": [one.test[name] for one in readings] for name in readings[0].test}
    parts |= {f"held_out.{name}": [one.held_out[name] for one in readings] for name in readings[0].held_out}
    return {name: torch.stack(logps).double() for name, logps in parts.items()}


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
    found = posterior.fitted({name: logps[..., :tokens] for name, logps in held_out.items()}, floor, tolerance)
    beliefs = {name: belief(mixture.model_copy(update={"prior": name}), held_out) for name in RIVALS} | {
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
