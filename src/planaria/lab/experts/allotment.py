"""The arms of an experts run: who is trained how long in which size, at what cost."""

from __future__ import annotations

from collections.abc import Mapping

from planaria.config.schema import RunConfig
from planaria.lab.experts.budget import GENERALIST, SYNCHRONISED, Job, Spent, allot, bills, generalist, spent
from planaria.lab.experts.experts_spec import ExpertsSpec, sized, step_tokens
from planaria.lab.experts.lineage import tiered


def arms(spec: ExpertsSpec, base: RunConfig, tier: Mapping[str, Mapping[str, int]]) -> dict[str, list[Job]]:
    """Arm → its jobs. ``tier``: what difficulty was told by → domain → its tier.

    Further ways to tell what is hard add uneven arms; the even one is the same for all, and what it costs is what each
    generalist may spend.
    """
    found: dict[str, list[Job]] = {}
    for by, tiers in tier.items():
        for arm, jobs in allot(tiers, list(spec.sizes), spec.steps).items():
            if by == spec.probe.by[0]:
                found[arm] = jobs
            elif arm != SYNCHRONISED:
                found[f"{arm}, by {by}"] = jobs
    models, tokens = sized(base.model, spec), step_tokens(base)
    flops = spent(SYNCHRONISED, found[SYNCHRONISED], models, tokens).flops
    for size in spec.rivals:
        arm, job = generalist(size, flops, models[size], tokens)
        found[arm] = [job]
    return found


def costs(spec: ExpertsSpec, base: RunConfig, offered: Mapping[str, list[Job]]) -> dict[str, Spent]:
    """Arm → its bill.

    :raises UserError: when arms of experts do not cost the same.
    """
    return bills(offered, sized(base.model, spec), step_tokens(base), {*spec.speaking, GENERALIST})


def require_even(spec: ExpertsSpec, base: RunConfig) -> None:
    """Count before anything runs: what an arm costs depends on how many domains are how hard, not on which.

    :raises UserError: as :func:`costs` does.
    """
    anyhow = tiered(dict.fromkeys(spec.domains, 0.0), spec.after, len(spec.sizes))
    costs(spec, base, arms(spec, base, {spec.probe.by[0]: anyhow}))


def schedule_steps(spec: ExpertsSpec, job: Job) -> int:
    """Steps of the schedule that a job's steps are the first of; 0: just these.

    A generalist's is to its steps as the even arm's is to an expert's, so that both end at the same rate.
    """
    if job.domain != GENERALIST:
        return spec.schedule_steps
    return spec.schedule_steps * job.steps // spec.steps[len(spec.steps) // 2]
