"""Numbers with bounds, each with its reason.

A bound is far above any practical value, and low enough that what it bounds can be counted, planned and allocated.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

EXACT = 2**53 - 1
MAX_PASSES = 1 << 16
"""forward and backward passes in one step; planning, checking and pricing this many takes a few seconds"""

MIXTURE = 10_000
"""most samples within which a mixture's shares are met exactly; the least share is one of them"""


def at_most(limit: float, reason: str) -> AfterValidator:
    """Return a validator that rejects numbers above ``limit`` with this ``reason``."""
    return AfterValidator(lambda value: _held(value, value <= limit, f"at most {limit:g}", reason))


def at_least(limit: float, reason: str) -> AfterValidator:
    """Return a validator that rejects numbers below ``limit`` with this ``reason``."""
    return AfterValidator(lambda value: _held(value, value >= limit, f"at least {limit:g}", reason))


def _held(value: float, fits: bool, bound: str, reason: str) -> float:
    if not fits:
        raise PydanticCustomError("out_of_bounds", "{bound}: {reason}", {"bound": bound, "reason": reason})
    return value


COLDEST = 1e-6
"""lowest temperature used as a divisor; below it, sampling takes the most likely token, as with 0"""
_WHOLE = at_most(EXACT, "larger integers are not exact in JSON")
Positive = Annotated[int, Field(gt=0), _WHOLE]
Natural = Annotated[int, Field(ge=0), _WHOLE]
Seconds = Annotated[float, Field(ge=0), at_most(1e9, "no run waits for thirty years")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Vocab = Annotated[int, Field(gt=0), at_most(1 << 24, "no tokenizer has that many tokens")]
Width = Annotated[int, Field(gt=0), at_most(1 << 20, "one matrix of that width would fill a machine")]
Heads = Annotated[int, Field(gt=0), at_most(1 << 14, "no width divides into more")]
Context = Annotated[int, Field(gt=0), at_most(1 << 24, "one sample of that length would fill a machine")]
Layers = Annotated[int, Field(gt=0), at_most(1 << 13, "each layer is made and counted one by one")]
_FEW_STAGES = at_most(1 << 10, "each stage is a process, with edges to others")
Stages = Annotated[int, Field(gt=0), _FEW_STAGES]
BlockStages = Annotated[int, Field(ge=0), _FEW_STAGES]
"""block stages of a pipeline; 0: whole models, in groups only"""
Microbatches = Annotated[int, Field(gt=0), at_most(MAX_PASSES // 2, "each one's way through the stages is planned")]
BatchSize = Annotated[int, Field(gt=0), at_most(1 << 20, "the samples of a microbatch are computed at once")]
Replicas = Annotated[int, Field(gt=0), at_most(1 << 10, "each replica is a set of processes")]
Spares = Annotated[int, Field(ge=0), at_most(1 << 10, "each spare is a process that holds a stage")]
Threads = Annotated[int, Field(gt=0), at_most(1 << 10, "no machine has that many cores for one worker")]
Peers = Annotated[int, Field(gt=0), at_most(1 << 10, "each peer is a process of this machine")]
Strikes = Annotated[
    Natural,
    AfterValidator(lambda value: _held(value, value != 1, "0 or at least 2", "no replica is replaced for one mistake")),
]
Steps = Annotated[int, Field(gt=0), at_most(1e9, "no run has taken that many")]
Heartbeat = Annotated[
    float,
    at_least(0.01, "the controller reads every beat of every worker, and a system's clock is no finer"),
    at_most(3600, "a dead worker would be waited for that long"),
]
Bandwidth = Annotated[float, at_least(1.0, "in bytes a second; with less no message arrives within a run")]
Mbits = Annotated[float, at_least(1e-3, "in Mbit/s; with less no message arrives within a run")]
Speed = Annotated[float, at_least(1e-6, "slower is dead"), at_most(1e6, "nothing is so much faster")]
Weight = Annotated[float, Field(gt=0), at_most(1e9, "only shares count")]
Scale = Annotated[float, at_least(1e-9, "shorter times are not whole nanoseconds"), at_most(1e9, "no link is so slow")]
Hosts = Annotated[int, Field(gt=0), at_most(1 << 12, "the planner weighs every pair of nodes")]
