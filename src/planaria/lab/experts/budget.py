"""Distribution of equal compute: the arms of HDEE (arXiv 2502.19385, section 3) and their costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import flops_per_token, parameter_count

SYNCHRONISED, LONGER, LARGER = "M_Ho-I_Ho", "M_Ho-I_He", "M_He-I_Ho"
"""arms: equal experts; longer training for harder domains; larger models for harder domains"""
GENERALIST = "generalist"
"""prefix of arms of one model for all domains, and its domain"""
PASSES = 3
"""forward passes equivalent to a training step; the backward pass takes two"""
MAX_COST_DIFFERENCE = 0.01
"""largest relative difference of two arms' compute"""


class ExpertPlan(Record):
    """One expert to train."""

    domain: str
    size: str
    steps: int

    @property
    def name(self) -> str:
        return f"{self.domain}-{self.size}-{self.steps}"


@dataclass(frozen=True)
class ArmCost:
    """Cost of one arm's experts together, without their parents."""

    flops: float
    """6 N + 12 L D T for each token, embeddings included"""
    parameter_tokens: float
    """Σ parameters · tokens, all parameters"""
    inner_parameter_tokens: float
    """Σ parameters · tokens, without embedding tables"""
    token_flops: float
    """a forward pass of every expert of the ensemble, for one token"""


def allot_jobs(tier: Mapping[str, int], sizes: Sequence[str], steps: Sequence[int]) -> dict[str, list[ExpertPlan]]:
    """Return arm → its jobs. ``tier``: domain → 0 (easiest) …; ``sizes`` and ``steps`` are ordered like the tiers."""
    middle = len(sizes) // 2
    return {
        SYNCHRONISED: [ExpertPlan(domain=domain, size=sizes[middle], steps=steps[middle]) for domain in tier],
        LONGER: [ExpertPlan(domain=domain, size=sizes[middle], steps=steps[at]) for domain, at in tier.items()],
        LARGER: [ExpertPlan(domain=domain, size=sizes[at], steps=steps[middle]) for domain, at in tier.items()],
    }


def is_generalist(arm: str) -> bool:
    """Return whether the arm is one model for all domains."""
    return arm.startswith(f"{GENERALIST}-")


def generalist(size: str, flops: float, model: ModelConfig, step_tokens: int) -> tuple[str, ExpertPlan]:
    """Return the arm and its one job: as many whole steps of the shape ``model`` as ``flops`` pay for."""
    steps = int(flops * (1 + 1e-9) / (flops_per_token(model) * step_tokens))
    return f"{GENERALIST}-{size}", ExpertPlan(domain=GENERALIST, size=size, steps=max(1, steps))


def arm_costs(
    arms: Mapping[str, Sequence[ExpertPlan]],
    models: Mapping[str, ModelConfig],
    step_tokens: int,
    speaking: Collection[str] | None = None,
) -> dict[str, ArmCost]:
    """Return each arm's cost. ``models``: size → its shape; ``step_tokens``: tokens of one step.

    ``speaking``: domains whose experts are in the ensemble, by default all; others only serve as starting points.

    :raises UserError: when the costs of arms of experts differ by more than ``MAX_COST_DIFFERENCE``.
    """
    costs = {arm: arm_cost(jobs, models, step_tokens, speaking) for arm, jobs in arms.items()}
    _require_equal_costs({arm: cost for arm, cost in costs.items() if not is_generalist(arm)})
    return costs


def arm_cost(
    jobs: Sequence[ExpertPlan],
    models: Mapping[str, ModelConfig],
    step_tokens: int,
    speaking: Collection[str] | None = None,
) -> ArmCost:
    """Return the cost of one arm. The arguments are those of :func:`arm_costs`."""
    tokens = [(models[job.size], job.steps * step_tokens) for job in jobs]
    return ArmCost(
        sum(flops_per_token(model) * count for model, count in tokens),
        float(sum(parameter_count(model) * count for model, count in tokens)),
        float(sum(_inner_parameters(model) * count for model, count in tokens)),
        sum(flops_per_token(models[job.size]) for job in jobs if speaking is None or job.domain in speaking) / PASSES,
    )


def _require_equal_costs(costs: Mapping[str, ArmCost]) -> None:
    for label in ("flops", "parameter_tokens"):
        amounts = {arm: getattr(cost, label) for arm, cost in costs.items()}
        least, most = (pick(amounts, key=amounts.__getitem__) for pick in (min, max))
        low, high = amounts[least], amounts[most]
        if high > (1 + MAX_COST_DIFFERENCE) * low:
            raise UserError(
                f"experts: {most} would take {high / low - 1:.1%} more compute ({label}) than {least}; make "
                "experts.sizes and experts.steps symmetric about their middle"
            )


def _inner_parameters(model: ModelConfig) -> int:
    return parameter_count(model) - model.vocab * (model.written + (0 if model.tied else model.dim))
