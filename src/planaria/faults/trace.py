"""Traces: which stages fail in which steps. Written once, then replayed by every strategy under comparison."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.config.bounds import MAX_EXACT_INT, Fraction, Natural, Stages, Steps
from planaria.config.schema import Section
from planaria.config.section import formerly
from planaria.faults.failure_groups import FailureDomain

MAX_BYTES = 64 * 2**20
"""maximum size of a trace file, about half a million faults"""
MAX_DRAWS = 10**8
"""maximum random numbers per trace, about ten seconds"""
CORRUPT_UPDATE = "corrupt_update"
FORMER_SIGNALS = {"lie": CORRUPT_UPDATE}
"""signal in traces of older versions → its present name"""
WITH_END = ("stop", "stuck", "slow", "slow_host", "slow_data", "delay", "cut", "disk_full", "disk_slow")
"""faults that may have an end"""
FATAL = ("kill", "stop", "stuck")
"""faults that destroy the worker's state, unless they end in time"""
LAGGING = ("slow", "slow_data")
"""faults that delay a worker's results"""
WITH_STRENGTH = ("slow", "slow_host", "slow_data", "delay", CORRUPT_UPDATE)
"""faults that have a strength"""


class Fault(Section):
    """One fault of a worker in step ``step``."""

    step: Natural
    stage: Natural
    """stage of the worker; in a run on a schedule, the number of its node"""
    signal: Annotated[
        Literal[
            "kill", "stop", "stuck", "slow", "slow_host", "slow_data", "delay", "reset", "cut", "disk_full",
            "disk_slow", "flip", "corrupt_update",
        ],
        BeforeValidator(lambda name: FORMER_SIGNALS.get(name, name) if isinstance(name, str) else name),
    ] = "kill"  # fmt: skip
    """kill: SIGKILL; stop: SIGSTOP; stuck: the main thread hangs while heartbeats continue; slow: actions take
    ``strength`` times as long; slow_host: so do those of all workers of its machine, including later ones; slow_data:
    each batch that it reads arrives ``strength`` seconds late, from the beginning of the step; delay: frames to it, or
    those from ``peer``, are held for ``strength`` seconds; reset: its connection to a neighbour breaks; cut: it loses
    all neighbours; disk_full, disk_slow: writes fail, or block; flip: a bit of its stage in the newest checkpoint
    flips; corrupt_update: its next update to replicas is corrupted, or all of them up to ``until``"""
    moment: Literal["any", "forward", "backward", "commit", "transfer", "save", "settle", "link"] = "any"
    """the action at which the fault occurs (transfer: sending or receiving a state; settle: a round of the exchange,
    or a step's gradients once all replicas' have arrived; link: connecting in a new generation), or any action of the
    step"""
    offset: Fraction = 0.0
    """any, forward, backward: which of these actions of the step, as a fraction of their number"""
    resume_after_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """seconds until a lasting fault ends: a stopped worker gets SIGCONT; None if it never ends"""
    strength: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    """slow, slow_host: factor, default 5; slow_data, delay: seconds, default 0.1; corrupt_update: of
    the attack"""
    attack: str | None = None
    """corrupt_update: the attack (``exchange/update_attacks.py``); default: non-finite numbers"""
    until: Natural | None = None
    """corrupt_update: first honest step; default: one update is corrupted"""
    peer: Natural | None = None
    """delay: only frames from this stage (or node) to ``stage``; reset: the connection to it, instead of any"""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.signal == "kill" and self.resume_after_s is not None:
            raise ValueError("a killed worker cannot resume; remove resume_after_s or use signal 'stop'")
        if self.signal not in WITH_END and self.resume_after_s is not None:
            raise ValueError(f"signal '{self.signal}' does not last; remove resume_after_s")
        if self.signal not in WITH_STRENGTH and self.strength is not None:
            raise ValueError(f"signal '{self.signal}' has no strength; remove it")
        if self.signal == "slow_data" and (self.moment, self.offset) != ("any", 0.0):
            raise ValueError("signal 'slow_data' begins with its step; remove moment and offset")
        if self.peer is not None and self.signal not in ("delay", "reset"):
            raise ValueError(f"signal '{self.signal}' has no peer; remove it, or use signal 'delay' or 'reset'")
        if self.peer == self.stage:
            raise ValueError(f"peer = {self.peer}: a stage sends nothing to itself; use a neighbour")
        for name in ("attack", "until"):
            if self.signal != CORRUPT_UPDATE and getattr(self, name) is not None:
                raise ValueError(f"signal '{self.signal}' has no {name}; remove it, or use signal '{CORRUPT_UPDATE}'")
        if self.until is not None and self.until <= self.step:
            raise ValueError(f"until = {self.until} must be after the fault's first step, {self.step}")
        if self.attack is not None or (self.strength is not None and self.signal == CORRUPT_UPDATE):
            from planaria.exchange.update_attacks import make_attack  # imports torch, which most traces do not need

            try:
                make_attack(self.attack, self.strength)
            except UserError as error:
                raise ValueError(str(error)) from None
        return self


class TraceArguments(Section):
    """The arguments of ``trace_generation.generate`` that made a trace; they reproduce it."""

    seed: Annotated[int, Field(ge=-MAX_EXACT_INT, le=MAX_EXACT_INT)]
    hourly: Fraction
    """probability that a block stage fails within an hour"""
    step_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """seconds per step"""
    stages: Stages
    steps: Steps
    exempt: tuple[Natural, ...] = ()
    """block stages that never fail, ascending"""
    forbid_adjacent: bool = False
    """whether neighbouring stages never fail in the same step"""
    ends: bool = False
    """whether stage 0 fails at the same rate"""
    adjacent_probability: Annotated[Fraction, formerly("adjacent_probability", "together")] = 0.0
    """probability that a failure also destroys the next stage, and so on"""
    failure_domain: Annotated[FailureDomain, formerly("failure_domain", "lost")] = "stage"
    """stages that one failure destroys: stage, adjacent (a stage and the next), machine, or region (half of all
    stages)"""
    machine: Stages = 2
    """consecutive stages that share a machine"""

    @model_serializer(mode="wrap")
    def _omit_defaults(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unused bursts and failure kinds, so that older traces keep their file and digest."""
        stored: dict[str, Any] = plain(self)
        idle = {
            "adjacent_probability": not self.adjacent_probability,
            "failure_domain": self.failure_domain == "stage",
            "machine": self.failure_domain != "machine",
        }
        return {name: value for name, value in stored.items() if not idle.get(name)}

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.adjacent_probability and self.forbid_adjacent:
            raise ValueError(
                f"adjacent_probability = {self.adjacent_probability:g} takes neighbours in the same step, which "
                "forbid_adjacent forbids; remove one of them"
            )
        if self.failure_domain != "stage" and (self.adjacent_probability or self.forbid_adjacent):
            setting = "adjacent_probability" if self.adjacent_probability else "forbid_adjacent"
            raise ValueError(f"failure_domain = '{self.failure_domain}' takes several stages; remove {setting}")
        if self.stages * self.steps > MAX_DRAWS:
            raise ValueError(
                f"stages × steps = {self.stages * self.steps}: a number is drawn for each stage in each step, at most "
                f"{MAX_DRAWS}; use fewer steps"
            )
        for stage in self.exempt:
            if stage > self.stages:
                raise ValueError(f"exempt lists stage {stage}; the last one is {self.stages}")
        return self


class Trace(Section):
    """Faults and their origin."""

    version: Literal[1] = 1
    generated: TraceArguments | None = None
    """None if the faults were chosen by hand"""
    faults: tuple[Fault, ...]


BEFORE_COMMIT = ("any", "forward", "backward")
"""moments at which a failure restarts the step"""


def moments_before_commit(agreed: bool) -> tuple[str, ...]:
    """Return the moments at which a failure restarts the step; ``agreed``: replicas exchange within every step."""
    return (*BEFORE_COMMIT, "settle") if agreed else BEFORE_COMMIT


def injection_order(fault: Fault) -> tuple[bool, str, float]:
    """Return a fault's sort key: fatal faults of one step are injected in this order, each after recovery; equal ones
    together."""
    return (fault.moment not in BEFORE_COMMIT, fault.moment, fault.offset)


def is_pending(fault: Fault, step: int) -> bool:
    """Whether the fault is still to begin or to end in a part of a run that begins with ``step``."""
    return fault.step >= step or (fault.until is not None and fault.until > step)


def burst_sizes(trace: Trace) -> Counter[int]:
    """Return number of simultaneous kills → how often they occur."""
    moments = Counter((fault.step, injection_order(fault)) for fault in trace.faults if fault.signal == "kill")
    return Counter(moments.values())


def read(path: Path) -> Trace:
    """Return the trace in the file ``path``.

    :raises UserError: naming file, fault and field, if it is invalid.
    """
    content = documents.read_bytes(path, MAX_BYTES, "use a trace file of `python -m planaria.lab.commands.trace`")
    documents.refuse_nul(content, path)
    try:
        return Trace.model_validate_json(content)
    except ValidationError as error:
        raise UserError(f"trace {path}: {documents.first_error(error, Trace, values=True)}") from None


def trace_text(trace: Trace) -> str:
    """Return a trace file's content.

    :raises UserError: if it is too large.
    """
    content = json.dumps(trace.model_dump(mode="json"), indent=1) + "\n"
    if len(content) > MAX_BYTES:
        raise UserError(f"the trace has {len(trace.faults)} faults, too many for a file; lower its rate or its steps")
    return content


def write(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path`` atomically.

    :raises UserError: if it cannot be written.
    """
    try:
        atomic.write_text(path, trace_text(trace))
    except OSError as error:
        raise UserError(f"cannot write the trace {path}: {error.strerror}") from None


def digest(trace: Trace) -> str:
    """Return the SHA-256 (hex) of the trace as canonical JSON; equal digests mean equal faults."""
    plain = trace.model_dump(mode="json")
    former = {present: name for name, present in FORMER_SIGNALS.items()}
    for fault in plain["faults"]:  # newer fields and names do not change the digests of older traces
        fault["signal"] = former.get(fault["signal"], fault["signal"])
        for name in ("strength", "attack", "until", "peer"):
            if fault[name] is None:
                del fault[name]
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
