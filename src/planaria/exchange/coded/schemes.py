"""Gradient coding, which lets replicas continue without late ones: a registry of schemes.

``exchange.coded`` is ``"msgc"``, or a table such as ``{ scheme = "msgc", burst = 1, window = 3, stragglers = 2, jobs =
8 }``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from planaria.common.errors import UserError
from planaria.config.registry import Registry
from planaria.exchange.coded.base import Scheme, Uncoded
from planaria.exchange.coded.gc import GC
from planaria.exchange.coded.sgc import MSGC, SRSGC

SCHEMES: Registry[Scheme] = Registry(
    "scheme",
    "exchange.coded.scheme",
    Scheme,  # type: ignore[type-abstract]
    {"none": Uncoded, "gc": GC, "srsgc": SRSGC, "msgc": MSGC},
    location="exchange.coded",
)
MIN_REPLICAS = 3
"""replicas; with two, the remaining one computes everything under any code"""
MAX_JOBS = 1 << 10
JOBS = 8
"""default jobs per step of schemes whose last rounds only finish open jobs; 1 for others"""
AUTO = "auto"
"""value of ``stragglers`` that a run rejects, since only `planaria advise` chooses a number"""


@dataclass(frozen=True)
class CodedSchedule:
    """A scheme, and the jobs of a step."""

    scheme: Scheme
    jobs: int = JOBS
    """J; a step takes J + T rounds"""
    slow: float = 2.0
    """1 + µ: a worker is late after ``slow`` times the fastest worker's time"""

    def microbatch_divisor(self, n: int) -> int:
        """Return the divisor of the microbatches of each of n replicas in a step."""
        whole = self.jobs * self.scheme.chunks(n)
        return whole // gcd(whole, n)

    def require(self, n: int, microbatches: int) -> None:
        """Raise UserError if ``microbatches`` per replica cannot be split into jobs and chunks."""
        divisor = self.microbatch_divisor(n)
        if over := microbatches % divisor:
            raise UserError(
                f"exchange.coded: {n} replicas and jobs = {self.jobs} need pipeline.microbatches to be a multiple of "
                f"{divisor}, not {microbatches}; use {microbatches + divisor - over}, or other jobs or parameters"
            )


def make_coded_schedule(setting: str | Mapping[str, Any], members: int) -> CodedSchedule:
    """Return the scheme of ``exchange.coded`` for ``members`` replicas.

    :raises UserError: for an unknown name or incompatible settings.
    """
    options: dict[str, Any] = {"scheme": setting} if isinstance(setting, str) else dict(setting)
    name: Any = options.pop("scheme", None)
    jobs: Any = options.pop("jobs", None)
    slow: Any = options.pop("slow", CodedSchedule.slow)
    if not isinstance(name, str):
        raise UserError(f"exchange.coded = {setting!r}: set scheme to one of {', '.join(SCHEMES.names)}")
    if members < MIN_REPLICAS:
        raise UserError(
            f"exchange.coded: {name!r} needs exchange.replicas = {MIN_REPLICAS} or more, not {members}; "
            "add replicas, or remove exchange.coded"
        )
    _require_window(JOBS if jobs is None else jobs, slow)
    if options.get("stragglers") == AUTO:
        raise UserError(
            "exchange.coded: stragglers = 'auto' needs measured delays; train with exchange.coded = 'none' for about "
            "twenty steps, let `planaria advise RECIPE --delays RUN` choose, and use its answer"
        )
    scheme = SCHEMES.make(name, options)
    if why := scheme.why_unsupported(members):
        raise UserError(f"exchange.coded: {name!r}: {why}")
    if jobs is None:
        jobs = JOBS if scheme.delay() else 1
    return CodedSchedule(scheme, jobs, float(slow))


def _require_window(jobs: Any, slow: Any) -> None:
    if not isinstance(jobs, int) or isinstance(jobs, bool) or not 1 <= jobs <= MAX_JOBS:
        raise UserError(f"exchange.coded.jobs = {jobs!r}: use 1 to {MAX_JOBS} jobs per step")
    if not isinstance(slow, int | float) or isinstance(slow, bool) or not 1 < slow <= 1e6:
        raise UserError(f"exchange.coded.slow = {slow!r}: use a multiple above 1 of the fastest replica's time")
