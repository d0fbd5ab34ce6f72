"""Traces that are drawn from a failure rate, and what such a rate means for a step."""

from __future__ import annotations

import random

from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.faults.blows import Lost, blows, share
from planaria.faults.trace import Fault, Generated, Trace, first_complaint


def per_step_probability(hourly: float, step_s: float) -> float:
    """Probability p = 1 − (1 − h)^(t/3600) that a stage fails within one step.

    This is the failure model of CheckFree (arXiv 2506.15461).
    ``hourly`` is h, the probability of failing within an hour, in [0, 1); ``step_s`` is t, the step's seconds.
    """
    return float(1.0 - (1.0 - hourly) ** (step_s / 3600.0))


def hourly_of_all(hourly: float, step_s: float, copies: int) -> float:
    """Probability that within an hour some step takes all ``copies`` of a stage, each of which fails by itself.

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
    together: float = 0.0,
    lost: Lost = "stage",
    machine: int = 2,
) -> Trace:
    """Kills block stages 1..``stages`` (and 0, with ``ends``) independently, each with :func:`per_step_probability` in
    each of ``steps``.

    Every stage has its own stream of random numbers, one for each step, so that exempting a stage changes nothing for
    the others' draws, and a higher rate only adds to them. Where neighbours would fail together and
    ``forbid_adjacent`` is set, the later stage is spared.

    With the chance ``together`` a failure takes the next stage of the walk 0, 1, …, S, 0 too, at the same moment, then
    perhaps the one after. A burst ends at a stage that never fails, or that fails in this step anyway. So bursts only
    add to the failures that there are without.

    ``lost`` is what one blow takes, and ``machine`` how many stages share a machine (:mod:`planaria.faults.blows`);
    each blow has its own stream of random numbers then. Raises UserError naming the argument that is out of range.
    """
    try:
        origin = Generated(
            seed=seed,
            hourly=hourly,
            step_s=step_s,
            stages=stages,
            steps=steps,
            exempt=tuple(sorted(exempt)),
            forbid_adjacent=forbid_adjacent,
            ends=ends,
            together=together,
            lost=lost,
            machine=machine,
        )
    except ValidationError as error:
        raise UserError(f"cannot generate a trace: {first_complaint(error)}") from None
    return Trace(generated=origin, faults=_faults(origin))


def _faults(origin: Generated) -> tuple[Fault, ...]:
    """All that the numbers of ``origin`` come to, in order."""
    stages, p = origin.stages, per_step_probability(origin.hourly, origin.step_s)
    struck = set(range(0 if origin.ends else 1, stages + 1)) - {*origin.exempt}
    drawn: dict[tuple[int, int], float] = {}
    if origin.lost != "stage":
        p *= share(origin.lost)
        drawn = _in_blows(origin, struck, p)
    else:
        for stage in struck:
            drawn |= _drawn(f"planaria trace {origin.seed} stage {stage}", stage, origin.steps, p)
    if origin.together:
        drawn = _with_bursts(drawn, origin, struck)
    faults: list[Fault] = []
    for (step, stage), u in sorted(drawn.items()):
        beside = {fault.stage for fault in faults[-stages:] if fault.step == step}
        if not (origin.forbid_adjacent and beside & _neighbours(stage, stages)):
            # Given that u < p, u/p is itself uniform in [0, 1): when in the step the fault strikes.
            faults.append(Fault(step=step, stage=stage, offset=u / p))
    return tuple(faults)


def _in_blows(origin: Generated, struck: set[int], p: float) -> dict[tuple[int, int], float]:
    """All that blows with probability ``p`` take; a stage that two of them take in one step is lost with the first."""
    found: dict[tuple[int, int], float] = {}
    for stages in blows(origin.lost, struck, origin.stages, origin.machine):
        first, *others = stages
        for (step, _), u in _drawn(
            f"planaria trace {origin.seed} {origin.lost} {stages}", first, origin.steps, p
        ).items():
            for stage in (first, *others):
                found[step, stage] = min(u, found.get((step, stage), u))
    return found


def _drawn(name: str, stage: int, steps: int, p: float) -> dict[tuple[int, int], float]:
    """(step, stage) → the random number that was below ``p``, of the stream of that name."""
    stream = random.Random(name)
    return {(step, stage): u for step in range(steps) if (u := stream.random()) < p}


def _with_bursts(
    drawn: dict[tuple[int, int], float], origin: Generated, struck: set[int]
) -> dict[tuple[int, int], float]:
    """``drawn``, and the stages that these failures take with them, with the number, so the moment, of their cause."""
    found = dict(drawn)
    for (step, stage), u in sorted(drawn.items()):
        stream = random.Random(f"planaria trace {origin.seed} burst {step} {stage}")
        following = (stage + 1) % (origin.stages + 1)
        while stream.random() < origin.together and following in struck and (step, following) not in found:
            found[step, following] = u
            following = (following + 1) % (origin.stages + 1)
    return found


def _neighbours(stage: int, stages: int) -> set[int]:
    """The stages beside this one on the closed walk 0, 1, …, S, 0."""
    return {(stage - 1) % (stages + 1), (stage + 1) % (stages + 1)}
