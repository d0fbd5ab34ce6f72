"""Numbers with bounds, each with its reason.

A bound is far above any practical value, and low enough that the bounded quantity can be counted, planned and
allocated.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

MAX_EXACT_INT = 2**53 - 1
"""largest integer that JSON readers represent exactly"""
MAX_PASSES = 1 << 16
"""forward and backward passes in one step; planning, checking and pricing this many takes a few seconds"""

MAX_MIXTURE_PERIOD = 10_000
"""maximum number of samples within which a mixture's shares are met exactly; the smallest share is one of them"""


def at_most(limit: float, reason: str) -> AfterValidator:
    """Return a validator that rejects numbers above ``limit`` with this ``reason``."""
    return AfterValidator(lambda value: _require(value, value <= limit, f"at most {limit:g}", reason))


def at_least(limit: float, reason: str) -> AfterValidator:
    """Return a validator that rejects numbers below ``limit`` with this ``reason``."""
    return AfterValidator(lambda value: _require(value, value >= limit, f"at least {limit:g}", reason))


def _require(value: float, valid: bool, bound: str, reason: str) -> float:
    if not valid:
        raise PydanticCustomError("out_of_bounds", "{bound}: {reason}", {"bound": bound, "reason": reason})
    return value


MIN_TEMPERATURE = 1e-6
"""lowest temperature used as a divisor; below it, sampling takes the most likely token, as with 0"""
_WHOLE = at_most(MAX_EXACT_INT, "larger integers are not exact in JSON")
Positive = Annotated[int, Field(gt=0), _WHOLE]
Natural = Annotated[int, Field(ge=0), _WHOLE]
Seconds = Annotated[float, Field(ge=0), at_most(1e9, "longer times exceed the range of deadlines")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Vocab = Annotated[int, Field(gt=0), at_most(1 << 24, "a larger embedding table does not fit in memory")]
Width = Annotated[int, Field(gt=0), at_most(1 << 20, "one matrix of a greater width does not fit in memory")]
Heads = Annotated[int, Field(gt=0), at_most(1 << 14, "more heads do not divide a supported width")]
Context = Annotated[int, Field(gt=0), at_most(1 << 24, "one longer sample does not fit in memory")]
Layers = Annotated[int, Field(gt=0), at_most(1 << 13, "each layer is created and counted separately")]
_FEW_STAGES = at_most(1 << 10, "each stage is a process with connections to others")
Stages = Annotated[int, Field(gt=0), _FEW_STAGES]
BlockStages = Annotated[int, Field(ge=0), _FEW_STAGES]
"""block stages of a pipeline; 0: whole models, in groups only"""
Microbatches = Annotated[int, Field(gt=0), at_most(MAX_PASSES // 2, "the plan of a step lists every pass")]
BatchSize = Annotated[int, Field(gt=0), at_most(1 << 20, "the samples of a microbatch are in memory together")]
Replicas = Annotated[int, Field(gt=0), at_most(1 << 10, "each replica is a set of processes")]
Spares = Annotated[int, Field(ge=0), at_most(1 << 10, "each spare is a process that holds a stage")]
Threads = Annotated[int, Field(gt=0), at_most(1 << 10, "more threads exceed the cores of any machine")]
Peers = Annotated[int, Field(gt=0), at_most(1 << 10, "each peer is a process on this machine")]
Strikes = Annotated[
    Natural,
    AfterValidator(lambda value: _require(value, value != 1, "0 or at least 2", "one rejection excludes no replica")),
]
Steps = Annotated[int, Field(gt=0), at_most(1e9, "longer runs are not supported")]
Heartbeat = Annotated[
    float,
    at_least(0.01, "the controller reads every heartbeat, and shorter intervals overload it"),
    at_most(3600, "the run waits at least this long for a dead worker"),
]
Bandwidth = Annotated[float, at_least(1.0, "the unit is bytes/s; messages do not arrive at a lower bandwidth")]
Mbits = Annotated[float, at_least(1e-3, "the unit is Mbit/s; messages do not arrive at a lower bandwidth")]
_SPEED_UNIT = "the unit is the speed in [network]"
Speed = Annotated[float, at_least(1e-6, f"{_SPEED_UNIT}; exclude slower nodes"), at_most(1e6, _SPEED_UNIT)]
Weight = Annotated[float, Field(gt=0), at_most(1e9, "weights are relative; divide all of them by one number")]
Scale = Annotated[
    float,
    at_least(1e-9, "shorter times are not whole nanoseconds"),
    at_most(1e9, "longer times are not supported"),
]
Hosts = Annotated[int, Field(gt=0), at_most(1 << 12, "the planner evaluates every pair of nodes")]
