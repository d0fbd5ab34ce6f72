"""Advantages of a round: groups of accepted completions, each rewarded relative to its group, and draws of groups."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planaria.swarm.config.rounds_config import RoundsConfig
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.peer.rollout import Rollout

log = logging.getLogger(__name__)
GroupName = tuple[int, str]
"""(problem, peer) of a group in vertical mode"""


@dataclass(frozen=True)
class Advantages:
    """A round's accepted completions with their advantages."""

    rollouts: list[Rollout]
    """completions with advantages"""
    skipped: int
    """groups without effect: all rewards equal, or too few members"""


def round_advantages(rollouts: Sequence[Rollout], mode: Literal["horizontal", "vertical"], scale: bool) -> Advantages:
    """Group completions by problem (horizontal) or by problem and peer (vertical), and compute advantages.

    A completion that a layer of the defence has not confirmed gets no positive advantage. Rejected completions must not
    be among ``rollouts``: with reward 0 they would teach the group to avoid similar ones (measured: accuracy 0.10
    instead of 0.51).
    """
    grouped: dict[tuple[int, str], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        grouped[rollout.problem.number, rollout.peer if mode == "vertical" else ""].append(rollout)
    rewarded: list[Rollout] = []
    skipped = 0
    for _, group in sorted(grouped.items()):
        advantages = group_advantages([rollout.score for rollout in group], scale)
        if advantages is None:
            skipped += 1
        else:
            rewarded += [
                replace(r, advantage=_cap_if_unproven(r, value)) for r, value in zip(group, advantages, strict=True)
            ]
    return Advantages(rewarded, skipped)


def with_length_penalty(rollout: Rollout, limit: int, margin: int) -> Rollout:
    """Return the completion with its length penalty over the last ``margin`` of ``limit`` tokens; none if 0."""
    return replace(rollout, penalty=overlong_penalty(len(rollout.ids), limit, margin)) if margin else rollout


def _cap_if_unproven(rollout: Rollout, advantage: float) -> float:
    return advantage if rollout.proven and not rollout.layer else min(advantage, 0.0)


NO_SPREAD = 1e-9
"""relative and absolute tolerance of equal rewards; division by σ would turn rounding errors into advantages"""


def group_advantages(rewards: Sequence[float], scale: bool = True) -> list[float] | None:
    """Return Â_i = (r_i − μ) / σ of one group; without ``scale`` Â_i = r_i − μ (Dr. GRPO).

    σ is the sample standard deviation (divisor n − 1) without TRL's added 1e-4. Return None for a group without spread
    or with fewer than two members; its samples must be neither trained on nor counted in a divisor.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; without σ: arXiv 2503.20783.

    :raises ValueError: for a reward that is not finite.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if not rewards or math.isclose(min(rewards), max(rewards), rel_tol=NO_SPREAD, abs_tol=NO_SPREAD):
        return None
    mean = statistics.fmean(rewards)
    sigma = statistics.stdev(rewards) if scale else 1.0
    return [(reward - mean) / sigma for reward in rewards]


def overlong_penalty(length: int, limit: int, margin: int) -> float:
    """Return the reward penalty of a completion of ``length`` tokens: 0, falling to −1 over the last ``margin`` tokens.

    It is (limit − margin − length) / margin above limit − margin, and −1 beyond ``limit``. ValueError unless
    0 < margin ≤ limit. Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 0 < margin <= limit:
        raise ValueError(f"a margin of {margin} tokens does not fit into a limit of {limit}")
    return -min(1.0, max(0.0, (length - (limit - margin)) / margin))


def group_of(rollout: Rollout) -> GroupName:
    return rollout.problem.number, rollout.peer


def mix_groups(
    advantages: Advantages, rollouts: Sequence[Rollout], me: str, rounds: RoundsConfig, *purpose: object
) -> Advantages:
    """Return the completions of drawn groups, in the order of ``advantages``: SAPO (arXiv 2509.08721).

    I = ``rounds.own`` of the own and J = ``rounds.foreign`` of the foreign groups are drawn, uniformly without
    replacement, or all if there are fewer, which is logged. Flat groups, which have no advantages, are dropped before
    the draw as ``rounds.drop_flat`` requires; flat groups that are drawn count as drawn, without effect. A peer has no
    maximum number of drawn groups, so dropping flat groups favours peers without any. The two draws are independent,
    and repeat for equal groups and an equal ``purpose``, which contains the run's seed.

    :param rollouts: the round's completions, rewarded by this peer
    :param me: this peer's id
    """
    learnable = {group_of(rollout) for rollout in advantages.rollouts}
    groups = sorted({group_of(rollout) for rollout in rollouts})
    own = [group for group in groups if group[1] == me and (rounds.drop_flat != "all" or group in learnable)]
    foreign = [group for group in groups if group[1] != me and (rounds.drop_flat == "none" or group in learnable)]
    chosen: set[GroupName] = set()
    for key, pool, wanted in (("own", own, rounds.own or 0), ("foreign", foreign, rounds.foreign or 0)):
        count = min(wanted, len(pool))
        chosen.update(random.Random(derive_seed("mixing", *purpose, key)).sample(pool, count))
        if count < wanted:
            log.info("learns from %d groups of rounds.%s = %d: no more are available", count, key, wanted)
    return replace(advantages, rollouts=[rollout for rollout in advantages.rollouts if group_of(rollout) in chosen])
