"""Traces: which stages fail in which steps. Written once, then replayed by every strategy that is to be compared."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from planaria import documents, whole
from planaria.bounds import EXACT, Fraction, Natural, Stages, Steps
from planaria.config import Section
from planaria.errors import UserError, nearest

MAX_BYTES = 64 * 2**20
"""largest trace file that is read or written, about half a million faults"""

MOST_DRAWS = 10**8
"""random numbers that one trace may take, some ten seconds"""


class Fault(Section):
    """One blow against a worker in step ``step``."""

    step: Natural
    stage: Natural
    """that the worker holds; in a run on a schedule, the number of its node"""
    signal: Literal["kill", "stop"] = "kill"
    """kill: SIGKILL, the process is gone; stop: SIGSTOP, it is frozen"""
    moment: Literal["any", "forward", "backward", "commit", "transfer"] = "any"
    """strike while the stage does this (transfer: while it gives or receives state), or at any time of the step"""
    offset: Fraction = 0.0
    """how far into the moment, as a fraction of its usual duration"""
    resume_after_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """seconds until a stopped worker gets SIGCONT; never unless given"""

    @model_validator(mode="after")
    def _only_the_stopped_resume(self) -> Self:
        if self.signal == "kill" and self.resume_after_s is not None:
            raise ValueError("a killed worker cannot resume; remove resume_after_s or use signal 'stop'")
        return self


class Generated(Section):
    """How a trace was made by :func:`generate`: with the same numbers it comes out the same again."""

    seed: Annotated[int, Field(ge=-EXACT, le=EXACT)]
    hourly: Fraction
    """probability that a block stage fails within an hour"""
    step_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """seconds of one step"""
    stages: Stages
    steps: Steps
    exempt: tuple[Natural, ...] = ()
    """block stages that never fail, ascending"""
    forbid_adjacent: bool = False
    """two neighbouring stages never fail in the same step"""
    ends: bool = False
    """stage 0 fails at the same rate"""

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        if self.stages * self.steps > MOST_DRAWS:
            raise ValueError(
                f"stages × steps = {self.stages * self.steps}: a number is drawn for each stage in each step, at most "
                f"{MOST_DRAWS}; give fewer steps"
            )
        return self

    @model_validator(mode="after")
    def _exempt_stages_exist(self) -> Self:
        for stage in self.exempt:
            if stage > self.stages:
                raise ValueError(f"exempt names stage {stage}; the last one is {self.stages}")
        return self


class Trace(Section):
    """Faults, and where they come from."""

    version: Literal[1] = 1
    generated: Generated | None = None
    """absent if the faults were chosen by hand"""
    faults: tuple[Fault, ...]


def read(path: Path) -> Trace:
    """The trace in the file ``path``. Raises UserError naming file, fault and field if it is not one."""
    found = documents.data(path, MAX_BYTES, "give the path of a trace, such as `planaria trace` writes")
    documents.refuse_nul(found, path)
    try:
        return Trace.model_validate_json(found)
    except ValidationError as error:
        raise UserError(f"trace {path}: {_first(error)}") from None


def text(trace: Trace) -> str:
    """What a file says of ``trace``; UserError when that is too much for one."""
    found = json.dumps(trace.model_dump(mode="json"), indent=1) + "\n"
    if len(found) > MAX_BYTES:
        raise UserError(f"the trace has {len(trace.faults)} faults, too many for a file; lower its rate or its steps")
    return found


def write(trace: Trace, path: Path) -> None:
    """Writes ``trace`` to ``path``, where it appears whole or not at all. Raises UserError if that is impossible."""
    try:
        whole.write_text(path, text(trace))
    except OSError as error:
        raise UserError(f"cannot write the trace {path}: {error.strerror}") from None


def digest(trace: Trace) -> str:
    """SHA-256, in hex, of the trace as canonical JSON: two runs that print the same digest met the same faults."""
    canonical = json.dumps(trace.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def per_step_probability(hourly: float, step_s: float) -> float:
    """Probability p = 1 − (1 − h)^(t/3600) that a stage fails within one step.

    This is the failure model of CheckFree (arXiv 2506.15461).
    ``hourly`` is h, the probability of failing within an hour, in [0, 1); ``step_s`` is t, the step's seconds.
    """
    return float(1.0 - (1.0 - hourly) ** (step_s / 3600.0))


def generate(
    seed: int,
    hourly: float,
    step_s: float,
    stages: int,
    steps: int,
    exempt: set[int],
    forbid_adjacent: bool,
    ends: bool = False,
) -> Trace:
    """Kills block stages 1..``stages`` (and 0, with ``ends``) independently, each with :func:`per_step_probability` in
    each of ``steps``.

    Every stage has its own stream of random numbers, one for each step, so that exempting a stage changes nothing for
    the others' draws, and a higher rate only adds to them. Where neighbours would fail together and
    ``forbid_adjacent`` is set, the later stage is spared. Raises UserError naming the argument that is out of range.
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
        )
    except ValidationError as error:
        raise UserError(f"cannot generate a trace: {_first(error)}") from None
    p = per_step_probability(hourly, step_s)
    drawn: dict[tuple[int, int], float] = {}
    for stage in set(range(0 if ends else 1, stages + 1)) - exempt:
        drawn |= _drawn(seed, stage, steps, p)
    faults: list[Fault] = []
    for (step, stage), u in sorted(drawn.items()):
        together = {fault.stage for fault in faults[-stages:] if fault.step == step}
        if not (forbid_adjacent and together & _neighbours(stage, stages)):
            # Given that u < p, u/p is itself uniform in [0, 1): when in the step the fault strikes.
            faults.append(Fault(step=step, stage=stage, offset=u / p))
    return Trace(generated=origin, faults=tuple(faults))


def _drawn(seed: int, stage: int, steps: int, p: float) -> dict[tuple[int, int], float]:
    """(step, stage) → the random number that was below ``p``."""
    stream = random.Random(f"planaria trace {seed} stage {stage}")
    return {(step, stage): u for step in range(steps) if (u := stream.random()) < p}


def _neighbours(stage: int, stages: int) -> set[int]:
    """The stages beside this one on the closed walk 0, 1, …, S, 0."""
    return {(stage - 1) % (stages + 1), (stage + 1) % (stages + 1)}


def _first(error: ValidationError) -> str:
    """The first complaint of ``error`` in one line: where, what, and what was found there."""
    problems = error.errors(include_url=False)
    # A misspelt key is also a missing one; the spelling is the cause.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    what = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        sections: dict[str, type[Section]] = {"faults": Fault, "generated": Generated}
        known = sections.get(str(problem["loc"][0]), Trace).model_fields
        what = f"unknown key; {nearest(str(problem['loc'][-1]), known)}"
    elif problem["type"] not in ("missing", "value_error", "json_invalid"):
        what = f"{what}, not {problem['input']!r:.80}"
    return f"{where}: {what}" if where else what
