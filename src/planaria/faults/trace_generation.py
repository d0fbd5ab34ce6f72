"""Generate traces from a failure rate."""

from __future__ import annotations

import random

from pydantic import ValidationError

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.faults.failure_groups import FailureDomain, failure_groups, relative_probability
from planaria.faults.trace import Fault, Trace, TraceArguments


def per_step_probability(hourly: float, step_s: float) -> float:
    """Return p = 1 − (1 − h)^(t/3600), the probability that a stage fails within one step (CheckFree, arXiv
    2506.15461).

    ``hourly`` is h, the probability of failing within an hour, in [0, 1); ``step_s`` is t, the step's seconds.
    """
    return float(1.0 - (1.0 - hourly) ** (step_s / 3600.0))


def hourly_of_all(hourly: float, step_s: float, copies: int) -> float:
    """Return the probability that within an hour some step loses all ``copies`` of a stage, which fail independently.

    1 − (1 − pⁿ)^(3600/t), with p by :func:`per_step_probability`; ``hourly`` itself for one copy.
    """
    p = per_step_probability(hourly, step_s)
    return hourly if copies == 1 else float(1.0 - (1.0 - p**copies) ** (3600.0 / step_s))


def generate(
    seed: int,
    hourly: float,
    step_s: float,
    stages: int,
    steps: int,
    exempt: set[int],
    forbid_adjacent: bool,
    ends: bool = False,
    adjacent_probability: float = 0.0,
    failure_domain: FailureDomain = "stage",
    machine: int = 2,
) -> Trace:
    """Kill block stages 1..``stages`` (and 0, with ``ends``) independently, with :func:`per_step_probability` per step.

    Every stage has its own stream of random numbers, one per step: exempting a stage does not change other stages'
    draws, and a higher rate only adds failures. If ``forbid_adjacent`` is set and neighbours would fail together, the
    later stage is spared.

    With probability ``adjacent_probability`` a failure also takes the next stage of the walk 0, 1, …, S, 0 at the same
    moment, then perhaps the one after. A burst ends at a stage that never fails or already fails in this step, so
    bursts only add failures.

    ``failure_domain`` is the kind of failure, and ``machine`` the number of stages per machine
    (:mod:`planaria.faults.failure_groups`); each failure group then has its own stream of random numbers.

    :raises UserError: naming the argument that is out of range.
    """
    try:
        origin = TraceArguments(
            seed=seed,
            hourly=hourly,
            step_s=step_s,
            stages=stages,
            steps=steps,
            exempt=tuple(sorted(exempt)),
            forbid_adjacent=forbid_adjacent,
            ends=ends,
            adjacent_probability=adjacent_probability,
            failure_domain=failure_domain,
            machine=machine,
        )
    except ValidationError as error:
        raise UserError(f"cannot generate a trace: {documents.first_error(error, values=True)}") from None
    return Trace(generated=origin, faults=_generate_faults(origin))


def _generate_faults(origin: TraceArguments) -> tuple[Fault, ...]:
    """Return all faults that ``origin`` generates, in order."""
    stages, p = origin.stages, per_step_probability(origin.hourly, origin.step_s)
    eligible = set(range(0 if origin.ends else 1, stages + 1)) - {*origin.exempt}
    drawn: dict[tuple[int, int], float] = {}
    if origin.failure_domain != "stage":
        p *= relative_probability(origin.failure_domain)
        drawn = _add_groups(origin, eligible, p)
    else:
        for stage in eligible:
            drawn |= _draw_failures(f"planaria trace {origin.seed} stage {stage}", stage, origin.steps, p)
    if origin.adjacent_probability:
        drawn = _add_bursts(drawn, origin, eligible)
    faults: list[Fault] = []
    for (step, stage), u in sorted(drawn.items()):
        failed_now = {fault.stage for fault in faults[-stages:] if fault.step == step}
        if not (origin.forbid_adjacent and failed_now & _neighbours(stage, stages)):
            # If u < p, u/p is uniform in [0, 1): the fault's time within the step.
            faults.append(Fault(step=step, stage=stage, offset=u / p))
    return tuple(faults)


def _add_groups(origin: TraceArguments, eligible: set[int], p: float) -> dict[tuple[int, int], float]:
    """Draw failure groups with probability ``p``; a stage taken by two in one step is lost with the first."""
    failures: dict[tuple[int, int], float] = {}
    for stages in failure_groups(origin.failure_domain, eligible, origin.stages, origin.machine):
        first, *others = stages
        for (step, _), u in _draw_failures(
            f"planaria trace {origin.seed} {origin.failure_domain} {stages}", first, origin.steps, p
        ).items():
            for stage in (first, *others):
                failures[step, stage] = min(u, failures.get((step, stage), u))
    return failures


def _draw_failures(name: str, stage: int, steps: int, p: float) -> dict[tuple[int, int], float]:
    """Return (step, stage) → the random number, where it is below ``p``, from the stream ``name``."""
    stream = random.Random(name)
    return {(step, stage): u for step in range(steps) if (u := stream.random()) < p}


def _add_bursts(
    drawn: dict[tuple[int, int], float], origin: TraceArguments, eligible: set[int]
) -> dict[tuple[int, int], float]:
    """Return ``drawn`` plus the stages that these failures take with them, with the number (so the moment) of their
    cause."""
    lost = dict(drawn)
    for (step, stage), u in sorted(drawn.items()):
        stream = random.Random(f"planaria trace {origin.seed} burst {step} {stage}")
        following = (stage + 1) % (origin.stages + 1)
        while stream.random() < origin.adjacent_probability and following in eligible and (step, following) not in lost:
            lost[step, following] = u
            following = (following + 1) % (origin.stages + 1)
    return lost


def _neighbours(stage: int, stages: int) -> set[int]:
    """Return the stages next to this one on the closed walk 0, 1, …, S, 0."""
    return {(stage - 1) % (stages + 1), (stage + 1) % (stages + 1)}
