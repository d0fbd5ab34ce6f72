"""Rewards into advantages: how much better a completion did than the others of its group.

A group is what the caller says it is. Where peers share problems (horizontal) it is a round's completions of one
problem, whoever sent them; where a peer owns whole groups (vertical) it is that peer's completions of one problem.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

NO_SPREAD = 1e-9
"""rewards that differ by less, absolutely or relatively, differ by rounding: divided by σ it would become advantages"""


def group_advantages(rewards: Sequence[float], scale: bool = True) -> list[float] | None:
    """Â_i = (r_i − μ) / σ of one group; without ``scale`` Â_i = r_i − μ (Dr. GRPO).

    σ is the sample standard deviation (divisor n − 1), with nothing added: what TRL takes, less its 1e-4. A group
    without spread, or with fewer than two members, has no advantages: None, and no sample of it may be trained on or
    counted in a divisor. Raises ValueError for a reward that is not finite.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; without σ: arXiv 2503.20783.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if not rewards or math.isclose(min(rewards), max(rewards), rel_tol=NO_SPREAD, abs_tol=NO_SPREAD):
        return None
    mean = statistics.fmean(rewards)
    sigma = statistics.stdev(rewards) if scale else 1.0
    return [(reward - mean) / sigma for reward in rewards]


def overlong_penalty(length: int, limit: int, margin: int) -> float:
    """What to add to the reward of a completion of ``length`` tokens: 0, falling to −1 over the last ``margin`` tokens.

    0 up to limit − margin, then (limit − margin − length) / margin, and −1 beyond ``limit``. Raises ValueError unless
    0 < margin ≤ limit. Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 0 < margin <= limit:
        raise ValueError(f"a margin of {margin} tokens does not fit into a limit of {limit}")
    return -min(1.0, max(0.0, (length - (limit - margin)) / margin))
